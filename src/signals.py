"""Signals as an exception: the rank that gets one leaves its loop, closes what it opened, and says why."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from src.errors import Interrupted

STOPPING = (signal.SIGINT, signal.SIGTERM)


def _interrupt(number: int, frame: FrameType | None) -> None:
    # One is enough: the launcher and the terminal often send a second while the first is being obeyed.
    for other in STOPPING:
        signal.signal(other, signal.SIG_IGN)
    raise Interrupted(number)


@contextmanager
def interrupts() -> Iterator[None]:
    """SIGINT and SIGTERM raise Interrupted in the main thread, once."""
    previous = {number: signal.signal(number, _interrupt) for number in STOPPING}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def restore_default_signals() -> None:
    """Undo the handlers that the elastic agent leaves behind."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)
