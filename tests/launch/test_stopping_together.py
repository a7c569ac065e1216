"""A stop signal, whoever gets it: all ranks stop after the same step, save, and leave with 128 + signal."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.command import environment, summary
from tests.launch.test_torchrun import free_port
from tests.processes import end_session, survivors, wait_until

#: signal -> exit code: 128 and its number
STOPPING = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGUSR1: 138}
PROGRAM = ["-m", "tests.launch.stepping"]


@contextmanager
def stepping(
    folder: Path, *words: str, ranks: int = 2, launcher: tuple[str, ...] = ()
) -> Iterator[subprocess.Popen[str]]:
    """tests/launch/stepping.py in a session of its own, once each rank has done some steps."""
    with subprocess.Popen(
        [sys.executable, *launcher, *PROGRAM, str(folder), *words],
        env=environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            files = [folder / f"step_{world_rank}" for world_rank in range(ranks)]
            ready = wait_until(lambda: all(file.exists() for file in files) or process.poll() is not None, 60)
            assert ready, "no step in 60 s"
            assert process.poll() is None, process.communicate()
            yield process
        finally:
            end_session(process.pid)


def pid_of(folder: Path, world_rank: int) -> int:
    found = re.search(r"process (\d+)", (folder / f"rank_{world_rank}.log").read_text())
    assert found
    return int(found[1])


def saved(folder: Path) -> list[int]:
    """The steps that ranks have saved after, by rank."""
    return [int(path.read_text()) for path in sorted(folder.glob("saved_*"))]


def assert_saved_together(folder: Path, process: subprocess.Popen[str], code: int, ranks: int = 2) -> None:
    stdout, stderr = process.communicate(timeout=30)
    assert process.returncode == code, stdout + stderr
    assert survivors(process.pid, within_seconds=5) == []
    steps = saved(folder)
    assert len(steps) == ranks
    assert len(set(steps)) == 1
    assert summary(folder)["status"] == "interrupted"
    words = stdout + stderr + "".join(path.read_text() for path in folder.glob("*.log"))
    assert "Traceback" not in words
    assert "closed by peer" not in words


@pytest.mark.parametrize("number", STOPPING)
def test_a_signal_to_the_parent_has_all_ranks_save_after_one_step(number: signal.Signals, tmp_path: Path) -> None:
    with stepping(tmp_path) as process:
        process.send_signal(number)
        assert_saved_together(tmp_path, process, STOPPING[number])


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_to_one_rank_has_all_ranks_save_after_one_step(number: signal.Signals, tmp_path: Path) -> None:
    with stepping(tmp_path, "max_restarts=3") as process:
        os.kill(pid_of(tmp_path, 1), number)
        assert_saved_together(tmp_path, process, STOPPING[number])
    assert "restart" not in (tmp_path / "rank_0.log").read_text()  # nobody starts again what was told to stop


def test_ctrl_c_in_a_terminal_counts_once_though_ranks_hear_it_twice(tmp_path: Path) -> None:
    with stepping(tmp_path) as process:
        os.killpg(process.pid, signal.SIGINT)  # the parent, too, and it hands it on
        process.send_signal(signal.SIGINT)  # and timeout(1) says it again
        assert_saved_together(tmp_path, process, 130)


def test_a_second_signal_does_not_wait_for_the_save(tmp_path: Path) -> None:
    with stepping(tmp_path, "save_seconds=60") as process:
        process.send_signal(signal.SIGTERM)
        assert wait_until((tmp_path / "saving_1").exists, 10)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(timeout=1.5)  # it waits for the save
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=10)
        assert process.returncode == 143  # the first one's
        assert survivors(process.pid, within_seconds=5) == []
    assert saved(tmp_path) == []
    assert summary(tmp_path)["status"] == "interrupted"


def test_a_save_that_fails_is_a_failure_of_the_run(tmp_path: Path) -> None:
    with stepping(tmp_path, "save=fails") as process:
        process.send_signal(signal.SIGTERM)
        _, stderr = process.communicate(timeout=40)
        assert process.returncode == 1
        assert "rank 1 failed: OSError: [Errno 28] No space left on device" in stderr
        assert survivors(process.pid) == []
    assert summary(tmp_path)["status"] == "failed"


def test_a_lone_rank_in_place_saves_as_well(tmp_path: Path) -> None:
    with stepping(tmp_path, "nproc=1", ranks=1) as process:
        process.send_signal(signal.SIGUSR1)
        assert_saved_together(tmp_path, process, 138, ranks=1)


def test_a_second_signal_to_a_lone_rank_does_not_wait_for_the_save(tmp_path: Path) -> None:
    with stepping(tmp_path, "nproc=1", "save_seconds=60", ranks=1) as process:
        process.send_signal(signal.SIGTERM)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(timeout=1.5)
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=10)
        assert process.returncode == 143
    assert saved(tmp_path) == []


TORCHRUN = ("-m", "torch.distributed.run", "--nproc-per-node=2", "--master-port={port}")


@pytest.mark.parametrize("to", ["torchrun", "rank 1"])
def test_under_torchrun_all_ranks_save_after_one_step(to: str, tmp_path: Path) -> None:
    launcher = tuple(word.format(port=free_port()) for word in TORCHRUN)
    with stepping(tmp_path, launcher=launcher) as process:
        os.kill(process.pid if to == "torchrun" else pid_of(tmp_path, 1), signal.SIGTERM)
        _, stderr = process.communicate(timeout=40)
        assert survivors(process.pid, within_seconds=5) == []
    assert len(saved(tmp_path)) == 2
    assert len(set(saved(tmp_path))) == 1
    assert summary(tmp_path)["status"] == "interrupted"
    if to == "rank 1":
        assert re.search(r"exitcode\s*: 143", stderr)  # torchrun's own is 1
