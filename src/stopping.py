"""How a run stops where all ranks can save: a request that waits for the step's end, and an agreement on which step.

A signal may reach one rank alone, or each at another moment. Whoever then leaves by itself leaves the others waiting
in a collective, with nothing saved.
"""

import _thread
import logging
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

from src.errors import Interrupted
from src.world import World

log = logging.getLogger(__name__)

#: What ends a run. SIGUSR1 is what schedulers are often told to send some time before they kill.
STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)

#: A second signal means "at once" when it arrives at least this long after the first. Nearer ones are the same wish
#: said twice: Ctrl-C reaches every process of a terminal, and the parent hands it on; timeout(1) signals its child and
#: then the whole group.
SECOND_WISH_SECONDS = 1.0
TELLING_SECONDS = 0.5

#: How often ranks ask one another. A small all-reduce, though it runs beside the step, costs each rank 0.1 to 0.3 ms
#: of a core: nothing once in so long, and a tenth of a step of 2 ms.
ASKING_SECONDS = 0.05
#: The most steps between two, should steps that were fast become slow.
MOST_STEPS_BETWEEN = 50


class StopRequest:
    """What the stop signals of this process have asked for so far.

    signal_number: the first one's; None: nobody has asked. is_agreed: all ranks know, and stop after the same step.
    failed_since: something else than the stop ended the block that a request was waiting in. launcher: the process that
    started this rank, at whose end torch has the kernel send SIGINT (torch.multiprocessing.spawn).
    """

    def __init__(self, launcher: int | None = None) -> None:
        self.launcher = launcher
        self.signal_number: int | None = None
        self.is_agreed = False
        self.failed_since = False
        self._is_deferred, self._is_told = False, True
        self._first_at: float | None = None
        self._arrivals: Arrivals | None = None

    def receive(self, signal_number: int) -> bool:
        """Note a signal. Whether it is to be obeyed now. Called by the handler, between any two of Python's steps."""
        self.signal_number = self.signal_number or signal_number
        if not self._is_deferred:
            return True
        if self._arrivals is None or self._first_at is None:
            self._first_at = time.time()
            self._arrivals = Arrivals()
            # In a thread, since the main one may be in the middle of writing to the same file. No threading.Thread:
            # its start takes a lock that the main thread may hold as well.
            if self._is_told:
                _thread.start_new_thread(self._tell, (signal_number,))
            return False
        is_second = self._arrivals.last() - self._first_at >= SECOND_WISH_SECONDS
        if is_second:
            self.is_agreed = False  # this rank does not wait for the others any more
        return is_second

    def _tell(self, signal_number: int) -> None:
        """Say what is being waited for, if it takes long enough to wonder.

        A rank whose peer has failed is sent a signal as well, and is gone before.
        """
        time.sleep(TELLING_SECONDS)
        if self._is_deferred:
            name = signal.Signals(signal_number).name
            log.info("%s: finishing this step, then saving; a second one stops at once", name)

    @contextmanager
    def deferred(self, is_told: bool = True) -> Iterator[None]:
        """While the block runs, the first stop signal is only remembered; a second one, later, raises Interrupted.

        is_told: whether the log says so; where ranks are only waited for, they say it.
        A request that nobody has obeyed by the block's end raises Interrupted there.
        """
        self._is_deferred, self._is_told = True, is_told
        try:
            yield
        except BaseException as error:
            self.failed_since = self.signal_number is not None and not isinstance(error, Interrupted)
            raise
        finally:
            self._is_deferred = False
            if self._arrivals is not None:
                self._arrivals.close()
                self._arrivals = None
        if self.signal_number is not None:
            raise self.ending(self.signal_number)

    def ending(self, signal_number: int) -> Interrupted:
        """What a run ends of that stops for this signal."""
        if self.launcher is None or os.getppid() == self.launcher:
            return Interrupted(signal_number)
        gone = f"the launcher, process {self.launcher}, was killed (often by the system, out of memory)"
        return Interrupted(signal_number, f"{gone}; its ranks have stopped")


class Arrivals:
    """When the last signal arrived. Python calls a handler only when C code returns, which may be many seconds later.

    Until closed: for each signal Python's handler in C writes a byte to a file in memory, which notes the time.
    """

    def __init__(self) -> None:
        self.file = os.memfd_create("signals")
        os.set_blocking(self.file, False)
        self.previous = signal.set_wakeup_fd(self.file, warn_on_full_buffer=False)

    def last(self) -> float:
        """Seconds since the epoch."""
        return os.fstat(self.file).st_mtime

    def close(self) -> None:
        signal.set_wakeup_fd(self.previous)
        os.close(self.file)


class Agreement:
    """Makes all ranks of `world` stop after the same step, whichever of them was asked to.

    Collective: every rank builds it, and calls `begin` and `end` once for each step. Where steps are shorter than
    ASKING_SECONDS only every so many ask, the same on all ranks. timeout_seconds: how long `end` waits for the slowest
    rank; None: as long as c10d does by itself.

    Its group is its own: a collective that is open while a step's others begin and end would have to take its turn
    among them in the same order on every rank, which backward passes and pipelines do not promise.
    """

    def __init__(self, world: World, timeout_seconds: float | None = None) -> None:
        self.request: StopRequest | None = None
        self.group: dist.ProcessGroup | None = None
        self.work: dist.Work | None = None
        self.notes = torch.zeros(2, dtype=torch.int64)  # signal number or 0, microseconds a step
        self.steps_between = self.steps_left = 1
        self.asked_at: float | None = None
        if world.has_peers:
            timeout = None if timeout_seconds is None else timedelta(seconds=timeout_seconds)
            group = dist.new_group(backend="gloo", timeout=timeout)
            assert isinstance(group, dist.ProcessGroup), "every rank is a member"
            self.group = group

    def begin(self, request: StopRequest) -> None:
        """At a step's start: say whether this rank has been asked to stop, if it is time. Waits for nobody."""
        self.request = request
        self.steps_left -= 1
        if self.group is None or self.steps_left > 0:
            return
        now = time.perf_counter()
        # Of the first step nobody knows how long it takes: ask again after it.
        seconds = ASKING_SECONDS if self.asked_at is None else (now - self.asked_at) / self.steps_between
        self.asked_at = now
        self.notes[0], self.notes[1] = request.signal_number or 0, int(seconds * 1e6)
        self.work = dist.all_reduce(self.notes, dist.ReduceOp.MAX, group=self.group, async_op=True)

    def end(self) -> int | None:
        """At the step's end: the signal that all stop for now, None to go on.

        In a step that asks it waits until all have begun the step. A request that came after `begin` is obeyed when
        they ask next.
        """
        assert self.request is not None, "begin comes first"
        if self.group is None:
            number = self.request.signal_number or 0
        elif self.work is None:
            return None
        else:
            self.work.wait()
            self.work = None
            number, step_microseconds = self.notes.tolist()
            wanted = int(ASKING_SECONDS * 1e6) // max(1, step_microseconds)
            self.steps_between = self.steps_left = min(max(1, wanted), MOST_STEPS_BETWEEN)
        if number == 0:
            return None
        self.request.is_agreed = True
        self.request.signal_number = self.request.signal_number or number
        return number

    def settle(self, request: StopRequest) -> int | None:
        """`begin` and `end` at once, whether or not it is time to ask: for after the last step."""
        self.steps_left = 1
        self.begin(request)
        return self.end()
