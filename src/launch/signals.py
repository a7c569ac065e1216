"""Signals as an exception: the rank that gets one leaves its loop, closes what it opened, and says why."""

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from src.stopping import STOPPING, StopRequest


def stop_signals() -> list[signal.Signals]:
    """The signals that end a run, without SIGHUP where nohup has it ignored: that run is to outlive its terminal."""
    return [number for number in STOPPING if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN]


def stop_signal(exit_code: int) -> int | None:
    """The signal that a rank with this exit code (negative: killed by a signal) was stopped by, if it was by one."""
    number = -exit_code if exit_code < 0 else exit_code - 128
    return number if number in STOPPING else None


@contextmanager
def interrupts(launcher: int | None = None) -> Iterator[StopRequest]:
    """Until the block ends a stop signal raises Interrupted in the main thread, once; see StopRequest.deferred.

    launcher: see StopRequest.
    """
    request, owner = StopRequest(launcher), os.getpid()

    def interrupt(number: int, frame: FrameType | None) -> None:
        if os.getpid() != owner:
            raise KeyboardInterrupt  # a loader process forked from this one; torch's worker loop leaves quietly on it
        # Whoever is handling an exception is on the way out, closing files and trackers; a second exception would
        # cut that short. The owner of the block finds the request there.
        if request.receive(number) and sys.exc_info()[0] is None:
            # One is enough: the launcher and the terminal often send a second while the first is being obeyed.
            for other in numbers:
                signal.signal(other, signal.SIG_IGN)
            raise request.ending(request.signal_number or number)

    numbers = stop_signals()
    previous = {number: signal.signal(number, interrupt) for number in numbers}
    try:
        yield request
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
