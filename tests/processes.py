"""Looking after the processes of a test: who of a session is left, and what to wait for."""

import os
import signal
import time
from collections.abc import Callable

import psutil


def survivors(session: int, within_seconds: float = 0.0) -> list[str]:
    """The command lines of a session's processes that are still there after `within_seconds`; zombies are gone."""
    wait_until(lambda: not _alive(session), within_seconds)
    return [f"{process.pid} {' '.join(process.cmdline())[-200:]}" for process in _alive(session)]


def end_session(session: int) -> None:
    """Kill a session's processes, each by its id."""
    for process in _alive(session):
        os.kill(process.pid, signal.SIGKILL)


def wait_until(condition: Callable[[], bool], timeout_seconds: float) -> bool:
    """Whether `condition` came true in time."""
    end = time.monotonic() + timeout_seconds
    while not condition():
        if time.monotonic() >= end:
            return False
        time.sleep(0.05)
    return True


def _alive(session: int) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        try:
            if os.getsid(process.pid) == session and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (ProcessLookupError, psutil.NoSuchProcess):
            continue  # it ended while we looked
    return found
