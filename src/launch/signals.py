"""Signals as an exception: the rank that gets one leaves its loop, closes what it opened, and says why."""

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

from src.errors import Interrupted

STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass
class StopRequest:
    """signal_number: of the signal that asked this process to stop; None: nobody has."""

    signal_number: int | None = None


def stop_signals() -> list[signal.Signals]:
    """The signals that end a run, without SIGHUP where nohup has it ignored: that run is to outlive its terminal."""
    return [number for number in STOPPING if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN]


@contextmanager
def interrupts() -> Iterator[StopRequest]:
    """Until the block ends a stop signal raises Interrupted in the main thread, once."""
    request, owner = StopRequest(), os.getpid()

    def interrupt(number: int, frame: FrameType | None) -> None:
        if os.getpid() != owner:
            raise KeyboardInterrupt  # a loader process forked from this one; torch's worker loop leaves quietly on it
        request.signal_number = number
        # Whoever is handling an exception is on the way out, closing files and trackers; a second exception would
        # cut that short. The owner of the block finds the request there.
        if sys.exc_info()[0] is None:
            # One is enough: the launcher and the terminal often send a second while the first is being obeyed.
            for other in numbers:
                signal.signal(other, signal.SIG_IGN)
            raise Interrupted(number)

    numbers = stop_signals()
    previous = {number: signal.signal(number, interrupt) for number in numbers}
    try:
        yield request
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


@contextmanager
def kept_handlers() -> Iterator[None]:
    """Undo, when the block ends, what it did to the handlers of the stop signals (the elastic agent sets its own)."""
    previous = {number: signal.getsignal(number) for number in STOPPING}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
