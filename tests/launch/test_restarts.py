"""launch.max_restarts: when a rank dies all are started again, so many times, and each time is told."""

import re
from pathlib import Path

import pytest

from tests.command import QUICK, Outcome, metrics, summary
from tests.command_server import Served, serve
from tests.launch.test_torchrun import torchrun
from tests.processes import survivors

DOUBLE = ["data._target_=tests.doubles.MisbehavingDigits"]
ONCE = [*DOUBLE, "+data.restarts=0"]
RESTART = "starting all ranks again, restart"


def restarts(outcome: Outcome) -> list[str]:
    """What was said of each."""
    return [line for line in outcome.stderr.splitlines() if RESTART in line]


def assert_finished(outcome: Served, restart_lines: list[str]) -> None:
    assert outcome.code == 0, outcome.text
    assert restarts(outcome) == restart_lines
    assert summary(outcome.run_dir())["status"] == "finished"
    assert summary(outcome.run_dir())["steps"] == 2
    said = (outcome.run_dir() / "train.log").read_text()
    assert all(line.removeprefix("shardlab: ") in said for line in restart_lines)
    assert survivors(outcome.session) == []


def test_a_killed_rank_is_started_again_and_the_run_finishes(tmp_path: Path) -> None:
    outcome = serve(tmp_path, *QUICK, *ONCE, "+data.what=SIGKILL", "launch.max_restarts=1")
    line = (
        "shardlab: rank 1 failed: killed by SIGKILL (often the system, out of memory);"
        " starting all ranks again, restart 1 of launch.max_restarts=1"
    )
    assert_finished(outcome, [line])
    logs = (outcome.run_dir() / "rank_1.log").read_text()
    assert len(re.findall("rank 1 of 2, process", logs)) == 2
    assert logs.count(", restart 1") == 1


def test_ranks_that_are_started_again_go_on_from_the_last_checkpoint(tmp_path: Path) -> None:
    words = [*ONCE, "+data.what=SIGKILL", "+data.at=4", "trainer.max_steps=6", "checkpoint.every=2"]
    outcome = serve(tmp_path, *QUICK, *words, "launch.max_restarts=1")
    assert outcome.code == 0, outcome.text
    # Killed before step 4; step 3 was not saved and is taken again.
    assert [record["step"] for record in metrics(outcome.run_dir())] == [1, 2, 3, 3, 4, 5, 6]
    assert [record["step"] for record in metrics(outcome.run_dir(), "resume")] == [2]
    first, again = metrics(outcome.run_dir())[2:4]
    assert (first["loss"], first["batch_hash"]) == (again["loss"], again["batch_hash"])


def test_a_failure_is_told_with_its_traceback_before_each_restart(tmp_path: Path) -> None:
    words = [*DOUBLE, "+data.restarts=1", "+data.what=raise", "+data.on_rank=0", "launch.max_restarts=3"]
    outcome = serve(tmp_path, *QUICK, *words)
    failed = "shardlab: rank 0 failed: ValueError: boom; starting all ranks again, restart {} of launch.max_restarts=3"
    assert_finished(outcome, [failed.format(1), failed.format(2)])
    assert outcome.stderr.count("Traceback") == 2


def test_a_run_fails_when_its_restarts_are_used_up(tmp_path: Path) -> None:
    outcome = serve(tmp_path, *QUICK, *DOUBLE, "+data.what=raise", "launch.max_restarts=1")
    assert outcome.code == 1
    assert len(restarts(outcome)) == 1
    assert outcome.stderr.splitlines()[-2] == "shardlab: rank 1 failed: ValueError: boom"
    assert summary(outcome.run_dir())["error"] == "rank 1: ValueError: boom"
    assert survivors(outcome.session) == []


def test_the_cause_of_the_last_failure_is_named_and_not_the_first_ones(tmp_path: Path) -> None:
    # Rank 1 raises at first; after the restart it is killed, which leaves no record beside the old one.
    outcome = serve(tmp_path, *QUICK, "data._target_=tests.doubles.RaisesThenIsKilled", "launch.max_restarts=1")
    assert outcome.code == 1
    assert "ValueError: boom" in restarts(outcome)[0]
    assert "killed by SIGKILL" in summary(outcome.run_dir())["error"]


def test_one_rank_is_not_in_place_where_it_may_be_started_again(tmp_path: Path) -> None:
    words = [*ONCE, "+data.what=SIGKILL", "+data.on_rank=0", "launch.nproc=1", "launch.max_restarts=1"]
    outcome = serve(tmp_path, *QUICK, *words)
    assert outcome.code == 0, outcome.text
    assert len(restarts(outcome)) == 1


def test_what_a_rank_refuses_is_not_tried_again(tmp_path: Path) -> None:
    double = ["model=mlp", "model._target_=tests.doubles.MLPThatRefuses"]
    outcome = serve(tmp_path, *QUICK, *double, "launch.max_restarts=3")
    assert outcome.code == 1
    assert restarts(outcome) == []
    assert "Refused: no such model" in summary(outcome.run_dir())["error"]


def test_a_negative_number_of_restarts_is_refused(tmp_path: Path) -> None:
    outcome = serve(tmp_path, *QUICK, "launch.max_restarts=-1")
    assert outcome.is_refusal()
    assert outcome.problems == ["launch.max_restarts=-1 is negative; choose 0 or more."]


@pytest.mark.slow  # 15 s of torchrun's
def test_torchruns_own_restarts_work(tmp_path: Path) -> None:
    words = [*QUICK, *ONCE, "+data.what=SIGKILL"]
    outcome = torchrun(tmp_path, *words, "checkpoint.every=1", options=("--max-restarts=1",))
    assert outcome.code == 0, outcome.text
    assert summary(outcome.run_dir())["status"] == "finished"
    assert [record["step"] for record in metrics(outcome.run_dir())] == [1, 2]
