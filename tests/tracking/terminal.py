"""A command in a terminal of its own, and what a person would see there."""

import os
import pty
import re
import select
import struct
import termios
import time
from collections.abc import Callable
from dataclasses import dataclass
from fcntl import ioctl
from pathlib import Path

ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


@dataclass(frozen=True)
class Seen:
    """raw: all that the terminal was sent. lines: the same, one entry a line, without colours and cursor moves."""

    code: int
    raw: str

    @property
    def lines(self) -> list[str]:
        return [line.rstrip() for line in ESCAPE.sub("", self.raw).replace("\r", "\n").split("\n")]


def watch(
    command: list[str],
    cwd: Path,
    env: dict[str, str],
    columns: int = 100,
    timeout_seconds: float = 100,
    when: str = "\0",
    do: Callable[[int], None] = lambda pid: None,
) -> Seen:
    """Run `command` under a pseudo-terminal to its end; do(pid) once `when` has appeared. Nobody types anything."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(cwd)
        os.execve(command[0], command, {**env, "TERM": "xterm-256color"})
    ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    text, done, deadline = "", False, time.monotonic() + timeout_seconds
    try:
        while time.monotonic() < deadline:
            if not select.select([terminal], [], [], 0.2)[0]:
                continue
            try:
                part = os.read(terminal, 65536)
            except OSError:  # EIO: the last process of the terminal is gone
                break
            text += part.decode(errors="replace")
            if not done and when in text:
                done = True
                do(pid)
        else:
            os.kill(pid, 9)
            raise TimeoutError(f"{command} was still there after {timeout_seconds} s; it had printed:\n{text}")
    finally:
        os.close(terminal)
        _, status = os.waitpid(pid, 0)
    return Seen(os.waitstatus_to_exitcode(status), text)
