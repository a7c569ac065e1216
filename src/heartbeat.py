"""A run that makes no progress ends, and each rank's log holds the stacks of all its threads.

A thread of each rank looks a few times per time-out whether a step has ended since. Where none has, the main thread is
made to raise `Hung`, which shows the line that it hangs in and lets everything be closed. Code in C can't be made to:
then the thread says so for it, and ends the process. Code in C that also keeps Python's lock stops that thread as
well: then a timer of faulthandler's, which needs no lock, writes the stacks and ends the process.
"""

import faulthandler
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TextIO

#: Writes the stacks of all threads of a rank into its log, at any time. The parent sends it before it ends a hang.
STACKS_SIGNAL = signal.SIGUSR2

LOOKS_PER_TIMEOUT = 4
#: Seconds in which the main thread must have come back from C code, and then those to close files and trackers in.
RETURN_SECONDS, CLOSING_SECONDS = 5.0, 60.0

#: Where a rank's innermost Python frame stands while it waits for another rank, or for a device that does.
WAITS = ("torch.distributed", "torch.autograd", "torch.nn.parallel", "src")
#: Of our own modules these compute, and may hang by themselves.
COMPUTES = ("src.data", "src.models")
#: Whose frames stand in a main thread that a person has stopped to look at.
DEBUGGERS = ("bdb", "pydevd", "_pydevd_bundle")


class Hung(BaseException):
    """No progress within the time-out. Not an Exception: a retry around what hangs must not swallow it."""


class Heartbeat:
    """Watches the main thread from its first `beat` until `rest`, and again from the next.

    timeout_seconds: the longest time between two beats. stacks: where faulthandler writes. is_alone: there is no other
    rank to wait for. give_up: called in the watching thread, with what to say, before the process ends by force.
    """

    def __init__(self, timeout_seconds: float, stacks: TextIO, is_alone: bool, give_up: Callable[[Hung], None]) -> None:
        self.timeout_seconds, self.stacks, self.is_alone, self.give_up = timeout_seconds, stacks, is_alone, give_up
        self.last_beat: float | None = None
        self.hung: Hung | None = None
        self.is_over, self.is_raised = threading.Event(), threading.Event()
        self.owner, self.main = os.getpid(), threading.get_ident()
        self.timer = threading.Lock()  # faulthandler's one timer; both threads set it

    def beat(self) -> None:
        """There is progress: call it after each step and each micro-batch of an evaluation. Costs a clock's reading.

        The first one starts the watch, so what is built, fetched and compiled before it may take any time.
        """
        if self.last_beat is None:  # what hangs now may not let the other thread look even once
            with self.timer:
                self.last_beat = time.monotonic()
                self.end_without_us(self.timeout_seconds * (1 + 1 / LOOKS_PER_TIMEOUT) + RETURN_SECONDS)
        self.last_beat = time.monotonic()

    def rest(self) -> None:
        """Before what may rightly take longer, such as writing a large checkpoint: watch again from the next beat."""
        with self.timer:
            self.last_beat = None
            faulthandler.cancel_dump_traceback_later()

    def watch(self) -> None:
        """The watching thread's life."""
        between_looks = left = self.timeout_seconds / LOOKS_PER_TIMEOUT
        while not self.is_over.wait(min(left, between_looks)):
            with self.timer:
                left = self.left()
                if left > 0 and self.last_beat is not None:
                    self.end_without_us(left + between_looks + RETURN_SECONDS)
            if left <= 0:
                self.end()
                return

    def left(self) -> float:
        """Seconds until there has been no progress for too long."""
        if self.last_beat is None:
            return self.timeout_seconds
        left = self.last_beat + self.timeout_seconds - time.monotonic()
        if left <= 0 and self.is_debugged():
            self.beat()
            return self.timeout_seconds
        return left

    def end(self) -> None:
        """Make the main thread raise Hung; end the process where it can't."""
        self.hung = Hung(self.in_words())
        self.end_without_us(2 * RETURN_SECONDS)
        signal.pthread_kill(self.main, STACKS_SIGNAL)  # also cuts a sleep short
        if self.is_over.wait(RETURN_SECONDS):
            return
        if self.is_raised.is_set():
            self.end_without_us(2 * CLOSING_SECONDS)
            if self.is_over.wait(CLOSING_SECONDS):
                return
        self.give_up(self.hung)
        os._exit(1)

    def end_without_us(self, seconds: float) -> None:
        """Set the timer that needs no lock of Python's."""
        faulthandler.dump_traceback_later(seconds, exit=True, file=self.stacks)

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        """In the main thread, after faulthandler has written the stacks."""
        # In a loader process, or asked for by the parent; or who is being closed is not to be closed again.
        if os.getpid() != self.owner or self.hung is None or self.is_raised.is_set() or sys.exc_info()[0] is not None:
            return
        self.is_raised.set()
        raise self.hung

    def in_words(self) -> str:
        """Where the main thread is, and whether for another rank's sake."""
        frame = sys._current_frames()[self.main]
        code = frame.f_code
        place = f"in {code.co_name} ({code.co_filename}:{frame.f_lineno})"
        waits = not self.is_alone and stands_in(frame, WAITS) and not stands_in(frame, COMPUTES)
        return f"no progress for {self.timeout_seconds:g} s, {'waiting for another rank ' if waits else ''}{place}"

    def is_debugged(self) -> bool:
        """Whether the main thread stands in a debugger, before a person who thinks."""
        frame: FrameType | None = sys._current_frames()[self.main]
        while frame is not None:
            if stands_in(frame, DEBUGGERS):
                return True
            frame = frame.f_back
        return False


def stands_in(frame: FrameType, modules: tuple[str, ...]) -> bool:
    """Whether a frame's module is one of `modules` or below one."""
    name = frame.f_globals.get("__name__") or ""
    return any(f"{name}.".startswith(f"{module}.") for module in modules)


@contextmanager
def heartbeat(
    timeout_seconds: float, log_file: Path, is_alone: bool, give_up: Callable[[Hung], None]
) -> Iterator[Heartbeat]:
    """A Heartbeat and its thread, for the length of the block. To be called in the main thread."""
    with log_file.open("a", encoding="utf-8") as stacks:
        heart = Heartbeat(timeout_seconds, stacks, is_alone, give_up)
        previous = signal.signal(STACKS_SIGNAL, heart.on_signal)
        faulthandler.register(STACKS_SIGNAL, stacks, all_threads=True, chain=True)
        thread = threading.Thread(target=heart.watch, name="heartbeat", daemon=True)
        thread.start()
        try:
            yield heart
        finally:
            heart.is_over.set()
            thread.join()
            faulthandler.cancel_dump_traceback_later()
            faulthandler.unregister(STACKS_SIGNAL)
            signal.signal(STACKS_SIGNAL, previous)
