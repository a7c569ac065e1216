"""Ctrl-C, SIGTERM and a killed parent: ranks and their loader processes go, and the run says how it ended."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from src.errors import Interrupted
from src.launch.signals import interrupts, stop_signal, stop_signals
from src.stopping import STOPPING
from tests.command import QUICK, TRAIN, environment, metrics, summary
from tests.processes import end_session, survivors, wait_until

ENDLESS = [*QUICK, "trainer.max_steps=100000", "trainer.epochs=100000"]
WITH_LOADERS = [
    "data._target_=src.data.loader.MapData",
    "data.num_workers=2",
    "+data.train={_target_: tests.doubles.SlowSamples, num_samples: 100000, seconds: 0.005}",
    "+data.test={_target_: tests.doubles.SlowSamples, num_samples: 8, seconds: 0}",
    "trainer.micro_batch_size=8",
]


def be_told_twice() -> None:
    with interrupts():
        try:
            os.kill(os.getpid(), signal.SIGTERM)
        finally:
            os.kill(os.getpid(), signal.SIGTERM)  # while the first is being obeyed


def test_a_signal_is_raised_once_and_the_handlers_come_back() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(Interrupted, match="stopped by SIGTERM") as caught:
        be_told_twice()
    assert caught.value.exit_code == 143
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_signal_does_not_cut_short_what_handles_an_exception() -> None:
    closed = []
    with interrupts() as stop:
        try:
            raise ValueError("a failure")
        except ValueError:
            os.kill(os.getpid(), signal.SIGTERM)
            closed.append("tracker")
    assert closed == ["tracker"]
    assert stop.signal_number == signal.SIGTERM


def test_a_loader_process_leaves_as_torch_expects() -> None:
    with interrupts():
        pid = os.fork()
        if pid == 0:
            try:
                os.kill(os.getpid(), signal.SIGINT)
            except KeyboardInterrupt:
                os._exit(0)
            os._exit(1)
        assert os.waitpid(pid, 0)[1] == 0


def test_nohup_keeps_a_run_alive_when_its_terminal_goes() -> None:
    assert signal.SIGHUP in stop_signals()
    previous = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert stop_signals() == [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1]
        with interrupts():
            os.kill(os.getpid(), signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, previous)


def test_an_exit_code_tells_the_signal_that_stopped_a_rank() -> None:
    assert stop_signal(143) == stop_signal(-15) == signal.SIGTERM
    assert stop_signal(138) == signal.SIGUSR1
    assert stop_signal(0) is stop_signal(1) is stop_signal(-signal.SIGKILL) is stop_signal(128 + 9) is None


@contextmanager
def running(cwd: Path, *overrides: str, steps: int = 2) -> Iterator[subprocess.Popen[str]]:
    """train.py in a session of its own, after its first `steps` steps; killed at the end if it has to be."""
    with subprocess.Popen(
        [sys.executable, str(TRAIN), *overrides],
        cwd=cwd,
        env=environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            assert wait_until(lambda: steps_done(cwd) >= steps or process.poll() is not None, 60)
            assert process.poll() is None, process.communicate()
            yield process
        finally:
            end_session(process.pid)


def steps_done(cwd: Path) -> int:
    return sum(len(path.read_text().splitlines()) for path in cwd.rglob("metrics.jsonl"))


def run_dir(cwd: Path) -> Path:
    [only] = cwd.rglob("metrics.jsonl")
    return only.parent


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGUSR1, 138)])
def test_a_signal_to_the_parent_alone_ends_ranks_and_loaders(number: signal.Signals, code: int, tmp_path: Path) -> None:
    with running(tmp_path, *ENDLESS, *WITH_LOADERS) as process:
        assert len(survivors(process.pid)) >= 1 + 2 + 2 * 2  # parent, ranks, loader processes
        process.send_signal(number)
        stdout, stderr = process.communicate(timeout=20)
        assert process.returncode == code
        assert survivors(process.pid, within_seconds=5) == []
    found = summary(run_dir(tmp_path))
    assert found["status"] == "interrupted"
    assert found["error"] == f"stopped by {number.name}"
    assert found["steps"] >= 2
    assert "Traceback" not in stdout + stderr
    assert stderr.splitlines()[-1] == f"shardlab: stopped by {number.name}"
    assert f"stopped by {number.name}" in (run_dir(tmp_path) / "train.log").read_text()


@pytest.mark.slow
def test_a_signal_to_a_loader_process_is_its_ranks_to_obey(tmp_path: Path) -> None:
    with running(tmp_path, *ENDLESS, *WITH_LOADERS) as process:
        ranks = psutil.Process(process.pid).children()
        workers = [worker for rank in ranks for worker in rank.children()]
        assert len(workers) >= 2 * 2
        for worker in workers:
            for number in STOPPING:
                worker.send_signal(number)
        done = steps_done(tmp_path)
        assert wait_until(lambda: steps_done(tmp_path) >= done + 10, 30)
        assert all(worker.is_running() for worker in workers)
        process.terminate()
        process.communicate(timeout=20)
        assert process.returncode == 143
        assert survivors(process.pid, within_seconds=5) == []


@pytest.mark.slow
def test_a_killed_parent_leaves_nobody_behind(tmp_path: Path) -> None:
    with running(tmp_path, *ENDLESS, *WITH_LOADERS) as process:
        process.kill()
        assert survivors(process.pid, within_seconds=10) == []
    found = summary(run_dir(tmp_path))
    assert found["status"] == "interrupted"  # rank 0 had its moment
    assert f"the launcher, process {process.pid}, was killed" in str(found["error"])


@pytest.mark.slow
def test_ctrl_c_in_a_terminal_reaches_everybody_and_prints_no_traceback(tmp_path: Path) -> None:
    with running(tmp_path, *ENDLESS, *WITH_LOADERS) as process:
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does
        stdout, stderr = process.communicate(timeout=20)
        assert process.returncode == 130
        assert survivors(process.pid, within_seconds=5) == []
    assert "Traceback" not in stdout + stderr
    assert summary(run_dir(tmp_path))["status"] == "interrupted"


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_run_in_place_ends_the_same_way(number: signal.Signals, code: int, tmp_path: Path) -> None:
    with running(tmp_path, *ENDLESS, "launch.nproc=1") as process:
        process.send_signal(number)
        _, stderr = process.communicate(timeout=20)
        assert process.returncode == code
        assert stderr.splitlines() == [f"shardlab: stopped by {number.name}"]
    assert summary(run_dir(tmp_path))["status"] == "interrupted"


@pytest.mark.slow
def test_a_second_ctrl_c_does_not_wait_for_a_deaf_rank(tmp_path: Path) -> None:
    deaf = ["data._target_=tests.doubles.MisbehavingDigits", "+data.what=hang", "+data.at=3"]
    with running(tmp_path, *ENDLESS, *deaf) as process:
        process.send_signal(signal.SIGINT)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(timeout=3)  # rank 1 has 25 s from when rank 0 left
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=10)
        assert process.returncode == 130
        assert survivors(process.pid, within_seconds=5) == []


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGUSR1, 138)])
def test_a_signal_to_one_rank_stops_the_run(number: signal.Signals, code: int, tmp_path: Path) -> None:
    with running(tmp_path, *ENDLESS, "launch.max_restarts=1") as process:
        log = (run_dir(tmp_path) / "rank_1.log").read_text()
        os.kill(int(log.split("process ")[1].split(",")[0]), number)
        _, stderr = process.communicate(timeout=20)
        assert process.returncode == code
        assert survivors(process.pid) == []
    assert stderr.splitlines()[-1] == f"shardlab: stopped by {number.name}"
    assert summary(run_dir(tmp_path))["status"] == "interrupted"
    assert metrics(run_dir(tmp_path))
