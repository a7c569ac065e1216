"""A tracker that reads, with each record of a run, what its host's interface has sent."""

import json
from pathlib import Path
from typing import Any

from src.tracking.base import RunInfo, Tracker

FILE = "link.jsonl"  # in the run folder: {"step", "sent_bytes"}, the interface's own total


class LinkCounter(Tracker):
    """Lives in rank 0, so in its host's namespace. interface: whose counter is read.

    A record is made when the step's exchange is over and before the next begins.
    """

    def __init__(self, interface: str, project: None = None, group: None = None, tags: list[str] | None = None) -> None:
        super().__init__(project, group, tags)
        self.counter = Path(f"/sys/class/net/{interface}/statistics/tx_bytes")
        self.path: Path | None = None

    def start(self, run: RunInfo) -> None:
        self.path = run.run_dir / FILE

    def log(self, record: dict[str, Any]) -> None:
        if record["kind"] == "train":
            assert self.path is not None, "start comes before the first record"
            with self.path.open("a") as lines:
                lines.write(json.dumps({"step": record["step"], "sent_bytes": int(self.counter.read_text())}) + "\n")

    def finish(self, exit_code: int, summary: dict[str, Any]) -> None:
        return None
