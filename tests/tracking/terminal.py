"""A command in a terminal of its own, and what a person would see there."""

import os
import pty
import re
import select
import struct
import subprocess
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
    """Run `command` under a pseudo-terminal to its end; do(pid) once `when` has appeared. Nobody types anything.

    pid: of the command, which leads a process group.
    """
    terminal, theirs = pty.openpty()
    ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    env = {**env, "TERM": "xterm-256color"}
    with subprocess.Popen(
        command, cwd=cwd, env=env, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True
    ) as process:
        os.close(theirs)
        raw, text, done, deadline = b"", "", False, time.monotonic() + timeout_seconds
        while (part := read(terminal)) is not None:
            raw += part
            text = raw.decode(errors="replace")  # of the whole: a part may end inside a character
            if not done and when in text:
                done = True
                do(process.pid)
            if time.monotonic() > deadline:
                process.kill()
                raise TimeoutError(f"{command} was still there after {timeout_seconds} s; it had printed:\n{text}")
        os.close(terminal)
        return Seen(process.wait(timeout=10), text)


def read(terminal: int) -> bytes | None:
    """What was printed within 0.2 s; None once the last process of the terminal is gone."""
    if not select.select([terminal], [], [], 0.2)[0]:
        return b""
    try:
        return os.read(terminal, 65536)
    except OSError:  # EIO
        return None
