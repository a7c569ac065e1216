"""The run's own record, always written: metrics.jsonl line by line, summary.json at the end."""

import json
import math
from pathlib import Path
from typing import Any

#: Every summary.json has these, and scripts may rely on them.
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
    "memory",
    "wandb",
    "checkpoint",
)


class MetricsFile:
    """One JSON object a line, flushed as written, so that a run that dies leaves all it measured.

    A disk that takes no more raises OSError: a run without its record is not worth its time.
    """

    def __init__(self, run_dir: Path) -> None:
        self.stream = (run_dir / "metrics.jsonl").open("a")

    def write(self, record: dict[str, Any]) -> None:
        self.stream.write(json.dumps(strict(record), allow_nan=False) + "\n")
        self.stream.flush()

    def close(self) -> None:
        self.stream.close()


def strict(record: dict[str, Any]) -> dict[str, Any]:
    """`record` as JSON can say it, which has no NaN and no infinity.

    {"loss": nan} -> {"loss": null, "non_finite": {"loss": "nan"}}: every reader of JSON can read the line, the
    column stays one of numbers, and a loss that was not finite differs from one that was not measured (null alone).
    Names of nested numbers are dotted: {"eval.loss": "inf"}.
    """
    found: dict[str, str] = {}
    plain = _replaced(record, "", found)
    return {**plain, "non_finite": found} if found else plain


def _replaced(value: Any, name: str, found: dict[str, str]) -> Any:
    """`value` with null for non-finite numbers, which are noted in `found` by dotted name."""
    if isinstance(value, dict):
        return {key: _replaced(item, f"{name}.{key}" if name else str(key), found) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_replaced(item, f"{name}.{index}", found) for index, item in enumerate(value)]
    if isinstance(value, float) and not math.isfinite(value):
        found[name] = str(value)
        return None
    return value


def empty_summary() -> dict[str, Any]:
    return dict.fromkeys(SUMMARY_KEYS)


def write_summary(run_dir: Path, summary: dict[str, Any]) -> None:
    """summary.json, whole or not at all, with null for what is not known (a killed rank 0 told nobody)."""
    temporary = run_dir / "summary.json.partial"
    try:
        temporary.write_text(json.dumps(strict(empty_summary() | summary), indent=2, allow_nan=False) + "\n")
        temporary.replace(run_dir / "summary.json")
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
