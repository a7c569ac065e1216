"""Rank 0's reporter: our own files are sure, the tracker is a guest."""

import json
import logging
import math
from pathlib import Path
from typing import Any

import pytest

from src.tracking.base import NoTracker, RunInfo, Tracker
from src.tracking.reporter import Reporter

STEP = {
    "step": 1,
    "epoch": 0,
    "samples": 8,
    "loss": 2.0,
    "grad_norm": None,
    "step_seconds": 0.1,
    "samples_per_second": 80.0,
}


class Watching(NoTracker):
    """Remembers what it is told, and what summary.json said when it was closed. raises_in: a method that fails."""

    def __init__(self, run_dir: Path, raises_in: str = "") -> None:
        super().__init__()
        self.run_dir, self.raises_in = run_dir, raises_in
        self.told: list[str] = []
        self.summary_at_finish: dict[str, Any] = {}

    def _hear(self, method: str) -> None:
        self.told.append(method)
        if method == self.raises_in:
            raise OSError(f"{method}: no space left for the tracker")

    def start(self, run: RunInfo) -> None:
        self._hear("start")

    def log(self, record: dict[str, Any]) -> None:
        self._hear("log")

    def finish(self, exit_code: int, summary: dict[str, Any]) -> None:
        self.summary_at_finish = json.loads((self.run_dir / "summary.json").read_text())
        self._hear(f"finish {exit_code}")


def reporter(run_dir: Path, tracker: Tracker) -> Reporter:
    return Reporter(run_dir, tracker, RunInfo(run_dir, "name", {}))


@pytest.mark.parametrize("method", ["start", "log", "finish 0"])
def test_a_tracker_that_fails_is_told_nothing_more_and_the_run_ends_well(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, method: str
) -> None:
    tracker = Watching(tmp_path, raises_in=method)
    run = reporter(tmp_path, tracker)
    for step in (1, 2, 3):
        run.train({**STEP, "step": step})
    run.close("finished", None, 0)
    assert tracker.told[-1] == method  # nothing after it
    assert len([record for record in caplog.records if record.levelno == logging.WARNING]) == 1
    assert json.loads((tmp_path / "summary.json").read_text())["steps"] == 3
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 3


def test_the_summary_is_whole_before_the_tracker_is_closed(tmp_path: Path) -> None:
    tracker = Watching(tmp_path)
    run = reporter(tmp_path, tracker)
    run.train(STEP)
    run.close("failed", "rank 0: ValueError: boom", 1)
    assert tracker.told == ["start", "log", "finish 1"]
    assert tracker.summary_at_finish["status"] == "failed"
    assert tracker.summary_at_finish["error"] == "rank 0: ValueError: boom"
    assert tracker.summary_at_finish["steps"] == 1


def test_a_metrics_file_that_cannot_be_written_stops_the_run(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    run = reporter(tmp_path, NoTracker())
    with pytest.raises(OSError, match="No space left"):
        run.train(STEP)
    with pytest.raises(OSError, match="No space left"):
        run.metrics.close()


def test_a_loss_that_is_not_finite_is_warned_of_once_and_written_as_null(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = reporter(tmp_path, NoTracker())
    for step in (1, 2):
        run.train({**STEP, "step": step, "loss": math.nan})
    run.close("interrupted", "stopped by signal 2", 130)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["loss"] for line in lines] == [None, None]
    assert [line["non_finite"] for line in lines] == [{"loss": "nan"}] * 2
    assert [record.message for record in caplog.records if record.levelno == logging.WARNING] == [
        "step 1: the loss is nan; metrics.jsonl says null"
    ]


def test_an_interrupted_run_says_where_it_stopped(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    run = reporter(tmp_path, NoTracker())
    run.begin(40)
    run.train({**STEP, "step": 7})
    run.close("interrupted", "stopped by signal 2", 130)
    assert caplog.records[-1].message.startswith("interrupted after step 7 of 40, ")
    assert str(tmp_path) in caplog.records[-1].message
