"""What rank 0 does with every measurement: the run's files, the tracker, the terminal. Other ranks have SilentReporter."""

import logging
import time
from pathlib import Path
from typing import Any

from src.tracking.base import RunInfo, Tracker
from src.tracking.console import Progress, final_table
from src.tracking.files import MetricsFile, write_summary

log = logging.getLogger(__name__)


class SilentReporter:
    """For the ranks that report nothing: takes everything and writes nothing."""

    def begin(self, total_steps: int) -> None:
        """Training starts. total_steps: optimizer steps to expect."""

    def train(self, record: dict[str, Any]) -> None:
        """A logged step."""

    def evaluated(self, record: dict[str, Any]) -> None:
        """An evaluation."""

    def epoch_ended(self, record: dict[str, Any]) -> None:
        """An epoch's mean training loss."""

    def update(self, **facts: Any) -> None:
        """Facts for summary.json, as they become known."""

    def close(self, status: str, error: str | None, exit_code: int) -> None:
        """The run is over. status: finished, failed or interrupted."""


class Reporter(SilentReporter):
    """Rank 0's. summary: what summary.json will hold, filled in as the run goes."""

    def __init__(self, run_dir: Path, tracker: Tracker, run: RunInfo) -> None:
        self.run_dir = run_dir
        self.tracker = tracker
        self.metrics = MetricsFile(run_dir)
        self.progress = Progress()
        self.started = time.perf_counter()
        self.summary: dict[str, Any] = dict.fromkeys(SUMMARY_KEYS)
        tracker.start(run)

    def begin(self, total_steps: int) -> None:
        self.progress.begin(total_steps)

    def train(self, record: dict[str, Any]) -> None:
        self._write({"kind": "train", **record})
        self.update(steps=record["step"], samples=record["samples"])
        self.progress.step(record)

    def evaluated(self, record: dict[str, Any]) -> None:
        self._write({"kind": "eval", **record})
        self.update(eval={key: value for key, value in record.items() if key != "step"})
        self.progress.evaluated(record)

    def epoch_ended(self, record: dict[str, Any]) -> None:
        self._write({"kind": "epoch", **record})
        self.update(train_loss=record["loss"])
        self.progress.epoch_ended(record)

    def _write(self, record: dict[str, Any]) -> None:
        self.metrics.write(record)
        self.tracker.log(record)

    def update(self, **facts: Any) -> None:
        self.summary.update(facts)

    def close(self, status: str, error: str | None, exit_code: int) -> None:
        self.progress.close()
        self.metrics.close()
        self.update(status=status, error=error, seconds=round(time.perf_counter() - self.started, 3))
        # Before the tracker, which may take its time: whatever happens there, the run's own record is whole.
        self.update(wandb=self.tracker.identity())
        write_summary(self.run_dir, self.summary)
        self.tracker.finish(exit_code, self.summary)
        self.update(wandb=self.tracker.identity())
        write_summary(self.run_dir, self.summary)
        if status == "finished":
            final_table(self.summary, self.run_dir, self.tracker.commands())
        else:
            log.info("%s after step %s: %s", status, self.summary["steps"] or 0, error)


SUMMARY_KEYS = (
    "status",
    "error",
    "world_size",
    "data_parallel_size",
    "parameters",
    "steps",
    "samples",
    "train_loss",
    "eval",
    "seconds",
    "samples_per_second",
    "peak_memory_bytes",
    "wandb",
    "checkpoint",
)
