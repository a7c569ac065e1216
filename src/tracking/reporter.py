"""What rank 0 does with every measurement: the run's files, the tracker, the terminal. Other ranks are silent."""

import logging
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from src.logs import ONLY_IN_RANK_LOG
from src.tracking.base import RunInfo, Tracker
from src.tracking.console import closing_line, evaluation_words, final_table
from src.tracking.files import MetricsFile, empty_summary, write_summary
from src.tracking.progress import Progress, make_progress

log = logging.getLogger(__name__)


class SilentReporter:
    """For the ranks that report nothing: takes everything and writes nothing."""

    def begin(self, total_steps: int) -> None:
        """Training starts. total_steps: optimizer steps to expect."""

    def resumed(self, record: dict[str, Any]) -> None:
        """The run goes on from a checkpoint, of whose step and samples `record` tells; later records give way."""

    def train(self, record: dict[str, Any]) -> None:
        """A logged step."""

    def evaluated(self, record: dict[str, Any]) -> None:
        """An evaluation."""

    def epoch_ended(self, record: dict[str, Any]) -> None:
        """An epoch's mean training loss."""

    def record(self, kind: str, record: dict[str, Any]) -> None:
        """A line of metrics.jsonl of another kind, such as a row of a benchmark's; to the tracker as well."""

    def update(self, **facts: Any) -> None:
        """Facts for summary.json, as they become known."""

    def close(self, status: str, error: str | None, exit_code: int) -> None:
        """The run is over. status: finished, failed or interrupted."""


class Reporter(SilentReporter):
    """Rank 0's. summary: what summary.json will hold, filled in as the run goes.

    The run's own files must be written: where they can't, OSError ends the run. The tracker may fail.
    """

    def __init__(self, run_dir: Path, tracker: Tracker, run: RunInfo) -> None:
        self.run_dir = run_dir
        self.tracker = tracker
        self.tracker_works = True
        self.metrics = MetricsFile(run_dir)
        self.progress: Progress | None = None
        self.total_steps: int | None = None
        self.warned_of_loss = False
        self.started = time.perf_counter()
        self.summary: dict[str, Any] = empty_summary()
        self._tell(tracker.start, run)

    def begin(self, total_steps: int) -> None:
        self.total_steps = total_steps
        self.progress = make_progress(total_steps)

    def resumed(self, record: dict[str, Any]) -> None:
        self.metrics.write({"kind": "resume", **record})
        self.update(steps=record["step"], samples=record["samples"])

    def train(self, record: dict[str, Any]) -> None:
        self._write({"kind": "train", **record})
        self.update(steps=record["step"], samples=record["samples"])
        if not math.isfinite(record["loss"]) and not self.warned_of_loss:
            self.warned_of_loss = True
            log.warning("step %d: the loss is %s; metrics.jsonl says null", record["step"], record["loss"])
        if self.progress is not None:
            self.progress.step(record)

    def evaluated(self, record: dict[str, Any]) -> None:
        self._write({"kind": "eval", **record})
        self.update(eval={key: value for key, value in record.items() if key != "step"})
        log.info("step %d  test %s", record["step"], evaluation_words(record))

    def epoch_ended(self, record: dict[str, Any]) -> None:
        self._write({"kind": "epoch", **record})
        self.update(train_loss=record["loss"])
        log.info(
            "epoch %d ended  mean train loss %.4f  (%d samples)", record["epoch"] + 1, record["loss"], record["samples"]
        )

    def record(self, kind: str, record: dict[str, Any]) -> None:
        self._write({"kind": kind, **record})

    def _write(self, record: dict[str, Any]) -> None:
        self.metrics.write(record)
        self._tell(self.tracker.log, record)

    def _tell(self, method: Callable[..., Any], *arguments: Any) -> Any:
        """Call the tracker, which is told nothing more, and asked nothing, once it has raised: None from then on."""
        if not self.tracker_works:
            return None
        try:
            return method(*arguments)
        except Exception:
            self.tracker_works = False
            log.warning("the tracker failed and is told nothing more; the training goes on", exc_info=True)
            return None

    def update(self, **facts: Any) -> None:
        self.summary.update(facts)

    def close(self, status: str, error: str | None, exit_code: int) -> None:
        if self.progress is not None:
            self.progress.close()
        self.update(
            status=status,
            error=error,
            seconds=round(time.perf_counter() - self.started, 3),
            wandb=self._tell(self.tracker.identity),
        )
        # Before the tracker, which may take its time: whatever happens there, the run's own record is whole.
        write_summary(self.run_dir, self.summary)
        self.metrics.close()
        self._tell(self.tracker.finish, exit_code, self.summary)
        if self.tracker_works:
            self.update(wandb=self._tell(self.tracker.identity))
        write_summary(self.run_dir, self.summary)
        if status == "finished":
            commands = self._tell(self.tracker.commands) or []
            try:
                final_table(self.summary, self.run_dir, commands)
            except (OSError, SystemExit) as gone:  # rich leaves by SystemExit where a pipe's reader has
                log.info("the final table could not be shown: %r", gone, extra=ONLY_IN_RANK_LOG)
        else:
            # Whose fault a failure was, the launcher knows, and says last.
            where = ONLY_IN_RANK_LOG if status == "failed" else None
            log.info(closing_line(self.summary, self.total_steps, self.run_dir), extra=where)
