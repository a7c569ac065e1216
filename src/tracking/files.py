"""The run's own record, always written: metrics.jsonl line by line, summary.json at the end."""

import json
from pathlib import Path
from typing import Any


class MetricsFile:
    """One JSON object a line, flushed as written, so that a run that dies leaves all it measured."""

    def __init__(self, run_dir: Path) -> None:
        self.stream = (run_dir / "metrics.jsonl").open("a")

    def write(self, record: dict[str, Any]) -> None:
        self.stream.write(json.dumps(record) + "\n")
        self.stream.flush()

    def close(self) -> None:
        self.stream.close()


def write_summary(run_dir: Path, summary: dict[str, Any]) -> None:
    """summary.json, whole or not at all."""
    temporary = run_dir / "summary.json.partial"
    temporary.write_text(json.dumps(summary, indent=2) + "\n")
    temporary.replace(run_dir / "summary.json")
