"""Two hosts on one machine: network namespaces joined by a virtual cable of a chosen rate. Linux, root, iproute2.

What runs in a namespace sees one interface and one peer, as on a host with one cable: sockets, TCP and its buffers are
the kernel's own. What is missing is distance: the cable adds no delay, and both hosts share cores and memory.
"""

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from src.errors import Refused

INTERFACE = "link0"  # in both namespaces
ADDRESSES = ("10.77.0.1", "10.77.0.2")  # seen inside the namespaces only, so they meet nobody else's
PREFIX = "slow-link"
QUEUE_MILLISECONDS = 50  # what a full queue before the cable holds, as a router's would
BURST_SECONDS = 0.01  # what may pass at once after a silence; below 64 KiB the kernel would split TCP's packets
STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
GRACE_SECONDS = 3.0
KILL_SECONDS = 10.0  # that SIGKILL may take


@dataclass(frozen=True)
class Link:
    """mbit_per_second: 10^6 bits a second each way; None: as fast as the machine copies."""

    name: str
    mbit_per_second: float | None

    def burst_bytes(self) -> int:
        assert self.mbit_per_second is not None, "nothing holds an unlimited link back"
        return max(2 * 65536, int(self.mbit_per_second * 1e6 / 8 * BURST_SECONDS))


def refuse_without_means() -> None:
    """Refused, in one line, where namespaces can't be made."""
    if not hasattr(os, "geteuid") or os.geteuid() != 0:
        raise Refused("two hosts on one machine are network namespaces, and only root makes them: run this with sudo.")
    missing = [program for program in ("ip", "tc", "setpriv") if shutil.which(program) is None]
    if missing:
        raise Refused(f"{' and '.join(missing)} not found: install iproute2 and util-linux (apt-get install ...).")


class TwoHosts:
    """A context: both namespaces stand inside it, and nothing of them, processes included, is left after it."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self.names = tuple(f"{PREFIX}-{os.getpid()}-{number}" for number in range(len(ADDRESSES)))

    def __enter__(self) -> "TwoHosts":
        refuse_without_means()
        for name in abandoned(_namespaces()):
            remove(name)
        try:
            self._build()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _build(self) -> None:
        first, second = self.names
        for name in self.names:
            _run("ip", "netns", "add", name)
        _run("ip", "-n", first, "link", "add", INTERFACE, "type", "veth", "peer", "name", INTERFACE, "netns", second)
        for name, address in zip(self.names, ADDRESSES, strict=True):
            _run("ip", "-n", name, "address", "add", f"{address}/24", "dev", INTERFACE)
            for interface in ("lo", INTERFACE):
                _run("ip", "-n", name, "link", "set", interface, "up")
            if self.link.mbit_per_second is not None:  # each end holds back what it sends
                tbf = ["tbf", "rate", f"{self.link.mbit_per_second:g}mbit", "burst", str(self.link.burst_bytes())]
                queue = ["latency", f"{QUEUE_MILLISECONDS}ms"]
                _run("tc", "-n", name, "qdisc", "add", "dev", INTERFACE, "root", *tbf, *queue)

    def close(self) -> None:
        for name in self.names:
            remove(name)

    def run(
        self, commands: Sequence[Sequence[str]], logs: Sequence[Path], cwd: Path, env: dict[str, str], timeout: float
    ) -> None:
        """One command a host, to the end of all. Raises HostFailed where one fails or `timeout` seconds pass.

        logs: where each one's output goes.
        """
        end = time.monotonic() + timeout
        started: dict[str, subprocess.Popen[bytes]] = {}
        try:
            for name, command, log in zip(self.names, commands, logs, strict=True):
                started[name] = _start(name, command, log, cwd, env)
            _wait_for_all(started, end)
        except HostFailed as failed:
            raise HostFailed(f"{failed}\n{_last_words(logs)}") from None
        except TimeoutError:
            raise HostFailed(f"not done after {timeout:g} s\n{_last_words(logs)}") from None
        finally:
            for process in started.values():
                process.terminate()  # one may be about to enter its namespace, and none is left in the other
            end_processes(*self.names)
            for process in started.values():
                process.kill()  # none that is in a namespace is left
                process.wait(GRACE_SECONDS)


class HostFailed(Exception):  # noqa: N818 - an outcome, named like src.errors' others
    """A host's command failed; the message holds the last lines of both."""


def _start(name: str, command: Sequence[str], log: Path, cwd: Path, env: dict[str, str]) -> subprocess.Popen[bytes]:
    """The command inside namespace `name`.

    A session of its own: a Ctrl-C at the terminal reaches only this process, which then ends all. Where this process is
    killed, the kernel ends them.
    """
    inside = ["setpriv", "--pdeathsig", "TERM", "ip", "netns", "exec", name]
    with log.open("wb") as output:
        return subprocess.Popen(
            [*inside, *command], cwd=cwd, env=env, stdin=subprocess.DEVNULL,
            stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip


def _wait_for_all(started: dict[str, subprocess.Popen[bytes]], end: float) -> None:
    """Returns when all have ended well; HostFailed at the first that has not, TimeoutError at `end`."""
    pending = dict(started)
    while pending:
        for name, process in list(pending.items()):
            try:
                code = process.wait(0.2)
            except subprocess.TimeoutExpired:
                continue
            del pending[name]
            if code:
                raise HostFailed(f"host {name} ended with exit code {code}")
        if time.monotonic() > end:
            raise TimeoutError


def _last_words(logs: Sequence[Path]) -> str:
    """The last 20 lines of each log; of torchrun's, those before it tells at length that a process has failed."""
    said = [log.read_text(errors="replace").split(" failed (exitcode")[0] for log in logs]
    return "\n".join(
        "\n".join([f"--- {log.name}", *text.splitlines()[-20:]]) for log, text in zip(logs, said, strict=True)
    )


def abandoned(names: Sequence[str]) -> list[str]:
    """Those of `names` that a benchmark made which is gone: it was killed before it could remove them."""
    made = [(name, name.removeprefix(f"{PREFIX}-").split("-")[0]) for name in names if name.startswith(f"{PREFIX}-")]
    return [name for name, process in made if process.isdigit() and not Path(f"/proc/{process}").exists()]


def remove(name: str) -> None:
    """End what runs in a namespace, then remove it, and with it its end of the cable. It may not be there."""
    if name in _namespaces():
        end_processes(name)
        _run("ip", "netns", "delete", name)


def end_processes(*names: str) -> None:
    """SIGTERM, and after a grace SIGKILL, to each process in the namespaces; returns when none is left.

    Raises HostFailed where one outlives that by KILL_SECONDS, as in a disk's or a driver's wait.
    """
    signal_number, patience = signal.SIGTERM, time.monotonic() + GRACE_SECONDS
    while processes := [process for name in names for process in _processes(name)]:
        for process in processes:
            try:
                os.kill(process, signal_number)
            except ProcessLookupError:
                continue  # it ended while we looked
        time.sleep(0.1)
        if time.monotonic() > patience + KILL_SECONDS:
            raise HostFailed(f"processes {processes} of {' and '.join(names)} outlive SIGKILL. End them by hand.")
        if time.monotonic() > patience:
            signal_number = signal.SIGKILL


def _processes(name: str) -> list[int]:
    return [int(word) for word in _run("ip", "netns", "pids", name).split()] if name in _namespaces() else []


def _namespaces() -> list[str]:
    return [line.split()[0] for line in _run("ip", "netns", "list").splitlines() if line.strip()]


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if done.returncode:
        reason = " ".join((done.stderr or done.stdout).split())
        raise Refused(f"`{' '.join(command)}` failed: {reason}. It needs root with the right to change networks.")
    return done.stdout


@contextmanager
def stoppable() -> Iterator[None]:
    """Ctrl-C, SIGTERM and SIGHUP leave by SystemExit(128 + signal); after the first, cleaning up is not disturbed.

    A signal that is ignored stays ignored (nohup).
    """
    before = {number: signal.getsignal(number) for number in STOPPING}
    heeded = [number for number, handler in before.items() if handler != signal.SIG_IGN]

    def stop(number: int, frame: object) -> None:
        for each in heeded:
            signal.signal(each, signal.SIG_IGN)
        raise SystemExit(128 + number)

    for number in heeded:
        signal.signal(number, stop)
    try:
        yield
    finally:
        for number in heeded:
            signal.signal(number, before[number])
