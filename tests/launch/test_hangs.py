"""launch.timeout_seconds: a run that makes no progress ends, each rank's stack is in its log, and who hung is named."""

import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.command import environment, summary
from tests.processes import end_session, survivors

TIMEOUT = 3.0


def hang(folder: Path, *words: str, launcher: tuple[str, ...] = ()) -> tuple[int, str, float]:
    """tests/launch/hanging.py to its end: exit code, stderr, seconds from the last step to the end."""
    command = [sys.executable, *launcher, "-m", "tests.launch.hanging", str(folder), f"timeout={TIMEOUT}", *words]
    with subprocess.Popen(
        command, env=environment(), stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        try:
            _, stderr = process.communicate(timeout=90)
            ended = time.time()
            assert survivors(process.pid, within_seconds=5) == []
        finally:
            end_session(process.pid)
    return process.returncode, stderr, ended - (folder / "step_0").stat().st_mtime


def test_a_rank_that_sleeps_is_named_and_not_the_one_that_waits_for_it(tmp_path: Path) -> None:
    code, stderr, seconds = hang(tmp_path, "what=sleep", "on_rank=1")
    assert code == 1
    assert re.search(r"^rank 1 failed: Hung: no progress for 3 s, in act \(.*tests/doubles.py:\d+\)$", stderr, re.M)
    assert stderr.splitlines()[-1] == f"  its log: {tmp_path / 'rank_1.log'}"
    assert TIMEOUT <= seconds < TIMEOUT + 10
    assert "in act" in (tmp_path / "rank_1.log").read_text()
    assert "in step_until_hung" in (tmp_path / "rank_0.log").read_text()  # the victim's stack as well
    assert summary(tmp_path)["status"] == "failed"


def test_a_victim_that_is_slow_to_tell_of_its_end_is_not_taken_for_the_cause(tmp_path: Path) -> None:
    code, stderr, _ = hang(tmp_path, "what=sleep", "on_rank=1", "lingers=0.8")
    assert code == 1
    assert "rank 1 failed: Hung: no progress for 3 s, in act" in stderr


@pytest.mark.slow
def test_code_in_c_that_keeps_pythons_lock_is_named_by_those_who_wait_for_it(tmp_path: Path) -> None:
    code, stderr, seconds = hang(tmp_path, "what=hold_the_lock", "on_rank=1")
    assert code == 1
    assert "rank 1 failed: Hung: the others waited for it in vain" in stderr
    assert TIMEOUT <= seconds < TIMEOUT + 30
    assert "in act" in (tmp_path / "rank_1.log").read_text()


def test_a_lone_process_that_sleeps_ends_and_shows_where(tmp_path: Path) -> None:
    code, stderr, seconds = hang(tmp_path, "what=sleep", "on_rank=0", "nproc=1")
    assert code == 1
    assert "rank 0 failed: Hung: no progress for 3 s, in act" in stderr
    assert TIMEOUT <= seconds < TIMEOUT + 10
    assert "in step_until_hung" in (tmp_path / "rank_0.log").read_text()


@pytest.mark.slow
def test_a_lone_process_in_c_code_that_keeps_pythons_lock_ends(tmp_path: Path) -> None:
    code, _, seconds = hang(tmp_path, "what=hold_the_lock", "on_rank=0", "nproc=1")
    assert code == 1
    assert TIMEOUT <= seconds < TIMEOUT + 30
    assert "in act" in (tmp_path / "rank_0.log").read_text()


@pytest.mark.slow
def test_a_rank_that_hangs_while_it_is_built_is_found_by_those_who_wait_for_it(tmp_path: Path) -> None:
    # No step yet, so nothing watches but the others' time-out in their first collective.
    code, stderr, _ = hang(tmp_path, "what=sleep", "on_rank=1", "at=0")
    assert code == 1
    assert "rank 1 failed: Hung: the others waited for it in vain" in stderr
    assert "in act" in (tmp_path / "rank_1.log").read_text()


@pytest.mark.slow
def test_what_comes_before_the_first_step_may_take_longer(tmp_path: Path) -> None:
    code, stderr, _ = hang(tmp_path, "what=sleep", "seconds=5", "on_rank=0", "at=0", "nproc=1", "steps=3")
    assert code == 0, stderr


@pytest.mark.slow
def test_under_torchrun_the_rank_that_sleeps_is_named(tmp_path: Path) -> None:
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    code, stderr, _ = hang(tmp_path, "what=sleep", "on_rank=1", launcher=launcher)
    assert code == 1
    assert set(re.findall(r"^rank \d failed: .*?,", stderr, re.M)) == {"rank 1 failed: Hung: no progress for 3 s,"}
    assert summary(tmp_path)["error"].startswith("rank 1: Hung: ")
