"""Running train.py many times without importing torch each time.

Each command is a fresh process, forked from a server that has imported torch and our modules and run none of
them. It has its own folder, environment, arguments and output, and an audit hook that notes every process it starts.
"""

import ctypes
import json
import multiprocessing as mp
import os
import runpy
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from tests.command import TRAIN, Outcome, environment
from tests.processes import end_session
from tests.workers import PRELOAD

STARTS_A_PROCESS = ("os.fork", "os.forkpty", "os.posix_spawn", "os.spawn", "os.exec", "os.system", "subprocess.Popen")


def starts_a_process(event: str, words: tuple[object, ...]) -> bool:
    """Whether an audit event tells of a process. A library that asks ldconfig where another lies is none of ours."""
    return event in STARTS_A_PROCESS and not (event == "subprocess.Popen" and str(words[0]).endswith("ldconfig"))


@dataclass(frozen=True)
class Served(Outcome):
    """started_processes: the audit events of processes that the command started itself. session: all of them are in."""

    started_processes: tuple[str, ...] = ()
    session: int = 0
    ended_at: float = 0.0  # seconds since the epoch

    @property
    def problems(self) -> list[str]:
        """The lines of a refusal, without its heading."""
        heading, *lines = self.stderr.splitlines()
        assert heading == "shardlab refused to start:", self.stderr
        return [line.strip() for line in lines]

    def is_refusal(self) -> bool:
        """Exit code 2, something to read, no traceback, no process, and a current folder left as empty as it was."""
        return (
            self.code == 2
            and bool(self.problems)
            and "Traceback" not in self.text
            and not self.started_processes
            and not any(self.cwd.iterdir())
        )


def serve(cwd: Path, *overrides: str, timeout: float = 60, rights: bool = True, **env: str | None) -> Served:
    """`python train.py <overrides>` in cwd, to its end. rights: False: permissions bind it even as root."""
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    with tempfile.TemporaryDirectory(prefix="shardlab-test-") as folder:
        given = (str(cwd), overrides, environment(**env), folder, rights)
        process = context.Process(target=_command, args=given)
        process.start()
        assert process.pid is not None
        process.join(timeout)
        if process.is_alive():
            end_session(process.pid)
            process.join()
            raise TimeoutError(f"train.py {overrides} took more than {timeout} s")
        ended_at = time.time()
        stdout, stderr, started = (Path(folder, name).read_text() for name in ("stdout", "stderr", "started"))
        assert process.exitcode is not None
        return Served(process.exitcode, stdout, stderr, cwd, tuple(json.loads(started)), process.pid, ended_at)


def _command(cwd: str, overrides: tuple[str, ...], env: dict[str, str], folder: str, rights: bool) -> None:
    """In the new process: become `python train.py <overrides>`."""
    sys.stdin = open(os.devnull)  # noqa: SIM115 - closed with the process
    for descriptor, name in ((1, "stdout"), (2, "stderr")):
        target = os.open(Path(folder, name), os.O_WRONLY | os.O_CREAT)
        os.dup2(target, descriptor)
    os.setsid()
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    sys.argv = [str(TRAIN), *overrides]
    started: list[str] = []
    note = os.open(Path(folder, "started"), os.O_WRONLY | os.O_CREAT)
    if not rights:
        _give_up_capabilities()
    sys.addaudithook(lambda event, words: started.append(event) if starts_a_process(event, words) else None)
    try:
        runpy.run_path(str(TRAIN), run_name="__main__")
    finally:
        os.write(note, json.dumps(started).encode())


def _give_up_capabilities() -> None:
    """capset(2) to nothing, so that file permissions hold for root as they do for everybody else."""
    version_3, this_process = 0x20080522, 0
    header = (ctypes.c_uint32 * 2)(version_3, this_process)
    nothing = (ctypes.c_uint32 * 6)()
    if ctypes.CDLL(None, use_errno=True).capset(header, nothing):
        raise OSError(ctypes.get_errno(), "capset")
