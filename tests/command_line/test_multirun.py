"""Sweeps: one job after the other, a failed one told at once and again at the end, the others run on."""

import os
import re
import signal
from datetime import datetime
from pathlib import Path

import pytest
import yaml

from tests.command import QUICK, Outcome, metrics, summary, train
from tests.command_server import Served, serve
from tests.launch.test_signals import running
from tests.processes import survivors

DOUBLE = "data._target_=tests.doubles.MisbehavingDigits"


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    outcome = train(tmp_path_factory.mktemp("sweep"), "-m", *QUICK, "strategy=ddp", "trainer.accumulate=1,2")
    assert outcome.code == 0, outcome.text
    return outcome


def jobs(outcome: Outcome) -> list[Path]:
    """The folders of a sweep's jobs, in order."""
    [folder] = (outcome.cwd / "multirun").iterdir()
    return sorted(path for path in folder.iterdir() if path.is_dir())


def test_a_sweep_has_one_folder_with_one_of_each_job(sweep: Outcome) -> None:
    assert [path.name for path in sweep.cwd.iterdir()] == ["multirun"]
    assert [path.name for path in jobs(sweep)] == ["0", "1"]
    assert len(list(sweep.cwd.rglob("multirun.yaml"))) == 1
    assert len(list(sweep.cwd.rglob(".hydra"))) == 2


def test_every_job_runs_all_its_steps_on_all_its_ranks(sweep: Outcome) -> None:
    for accumulate, folder in enumerate(jobs(sweep), start=1):
        assert yaml.safe_load((folder / "config.yaml").read_text())["trainer"]["accumulate"] == accumulate
        assert summary(folder)["world_size"] == 2
        assert [record["step"] for record in metrics(folder)] == [1, 2]
        assert summary(folder)["samples"] == 2 * 64 * accumulate * 2  # steps x micro-batch x accumulate x ranks


def first_line(path: Path) -> tuple[datetime, int]:
    """When a rank began and its process."""
    line = path.read_text().splitlines()[0]
    process = re.search(r"process (\d+)", line)
    assert process is not None
    return datetime.strptime(line[1:24], "%Y-%m-%d %H:%M:%S,%f"), int(process[1])


def test_each_jobs_ranks_end_before_the_next_begins(sweep: Outcome) -> None:
    first, second = jobs(sweep)
    ended = datetime.fromtimestamp((first / "summary.json").stat().st_mtime)
    for number in range(2):
        began, process = first_line(second / f"rank_{number}.log")
        assert began > ended
        assert process not in {first_line(path)[1] for path in first.glob("rank_*.log")}


@pytest.fixture(scope="module")
def with_a_failure(tmp_path_factory: pytest.TempPathFactory) -> Served:
    words = ["-m", *QUICK, DOUBLE, "+data.what=raise,nothing,os_exit_3"]
    return serve(tmp_path_factory.mktemp("failing"), *words)


def test_a_failed_job_does_not_keep_the_others_from_running(with_a_failure: Served) -> None:
    assert with_a_failure.code == 1
    assert [summary(folder)["status"] for folder in jobs(with_a_failure)] == ["failed", "finished", "failed"]
    assert survivors(with_a_failure.session) == []


def test_a_failed_job_is_told_at_once_and_listed_at_the_end(with_a_failure: Served) -> None:
    lines = with_a_failure.stderr.splitlines()
    first, _, third = jobs(with_a_failure)
    at_once = [line for line in lines if re.match(r"shardlab: job \d", line)]
    assert len(at_once) == 2
    assert at_once[0].startswith("shardlab: job 0 (")
    assert "+data.what=raise" in at_once[0]
    assert at_once[0].endswith("rank 1 failed: ValueError: boom")
    end = lines[lines.index("shardlab: 2 job(s) of the sweep did not finish:") :]
    assert "rank 1 failed: ValueError: boom" in end[1]
    assert end[2].strip() == f"its log: {first / 'rank_1.log'}"
    assert "rank 1 failed: left with exit code 3 and no message" in end[3]
    assert end[4].strip() == f"its log: {third / 'rank_1.log'}"
    assert len(end) == 5


def test_a_lone_rank_of_a_sweep_has_a_process_of_its_own(tmp_path: Path) -> None:
    # In place it would start torch's thread pool in the process that forks the next job's ranks.
    words = ["-m", *QUICK, "launch.nproc=1,2", "data._target_=tests.doubles.DigitsAfterParallelWork"]
    outcome = serve(tmp_path, *words)
    assert outcome.code == 0, outcome.text
    assert outcome.started_processes == ("os.fork",) * 5  # a rank, two ranks, and a forecast for each job
    assert [summary(folder)["world_size"] for folder in jobs(outcome)] == [1, 2]


def test_a_job_that_breaks_our_own_code_shows_a_traceback_and_the_others_run(tmp_path: Path) -> None:
    # A sweeper whose jobs are not known before: each is checked when it starts.
    words = ["-m", *QUICK, "launch.nproc=1", "~hydra.callbacks.refuse", "+data.seed=${seed}"]
    outcome = serve(tmp_path, *words, "data._target_=tests.doubles.BreaksForSeed1", "seed=1,2")
    assert outcome.code == 1
    assert "ZeroDivisionError: a fault for seed 1" in outcome.stderr
    assert "shardlab: 1 job(s) of the sweep did not finish:\n  job 0 (" in outcome.stderr
    assert [(folder / "summary.json").exists() for folder in jobs(outcome)] == [False, True]


def test_a_job_refused_when_it_starts_is_listed_and_the_others_run(tmp_path: Path) -> None:
    words = ["-m", *QUICK, "launch.nproc=1", "~hydra.callbacks.refuse", "trainer.accumulate=0,1"]
    outcome = serve(tmp_path, *words)
    assert outcome.code == 2
    assert "shardlab refused to start job 0 (" in outcome.stderr
    assert outcome.stderr.splitlines()[-1].endswith(
        "refused: trainer.accumulate=0 is not a batch size; choose 1 or more."
    )
    assert summary(jobs(outcome)[1])["status"] == "finished"


@pytest.mark.slow
def test_ctrl_c_ends_the_sweep_with_its_job(tmp_path: Path) -> None:
    words = ["-m", *QUICK, "trainer.max_steps=100000", "trainer.epochs=100000", "seed=1,2"]
    with running(tmp_path, *words) as process:
        os.killpg(process.pid, signal.SIGINT)
        _, stderr = process.communicate(timeout=20)
        assert process.returncode == 130
        assert survivors(process.pid, within_seconds=5) == []
    assert "Traceback" not in stderr
    assert "shardlab: stopped by SIGINT" in stderr
    [only] = jobs(Outcome(130, "", stderr, tmp_path))
    assert summary(only)["status"] == "interrupted"
