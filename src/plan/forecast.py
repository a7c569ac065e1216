"""The peak of a step before it is taken, by whichever way can say it, and how far it was off afterwards."""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from torch import nn

from src.batch import MicroBatch
from src.data.base import Data
from src.plan.formula import example, plan
from src.plan.trace import trace
from src.strategies.base import BuildSpec, OptimizerFactory, Setting, Strategy

FORECAST = "forecast.json"  # in the run folder
LOCK = f"{FORECAST}.lock"  # beside it; held while somebody makes it, and the kernel lets go of it at their end
LATE = "it was not ready by the end of the run"
CRASHED = "the processes that make it ended without a word (killed, or the disk was full)"

#: Worlds up to this size are traced; the cost grows with the ranks.
MAX_TRACED_RANKS = 16


@dataclass(frozen=True)
class Forecast:
    """peaks: bytes by world rank, of ranks that hold as much as any other. method: "trace" or "formula".

    reason: why there is none, why it is not a trace, or what else is to know.
    """

    peaks: dict[int, int]
    method: str | None
    reason: str | None = None

    @property
    def peak(self) -> int | None:
        """Of the fullest rank."""
        return max(self.peaks.values(), default=None)

    @classmethod
    def failed(cls, error: BaseException) -> "Forecast":
        """None could be made."""
        first_line = (str(error).splitlines() or [""])[0]
        return cls({}, None, f"{type(error).__name__}: {first_line}")

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def publish(self, run_dir: Path) -> None:
        """Into the run folder, whole or not at all."""
        partial = run_dir / f"{FORECAST}.partial"
        partial.write_text(json.dumps(self.as_dict()))
        partial.replace(run_dir / FORECAST)

    @classmethod
    def read(cls, run_dir: Path, patience_seconds: float = 0.0) -> "Forecast":
        """The run's; one that only says why, where it is not there after a patience of so many seconds."""
        path = run_dir / FORECAST
        is_over = path.exists() or is_free(run_dir / LOCK, patience_seconds)
        if not path.exists():
            return cls({}, None, CRASHED if is_over else LATE)
        found = json.loads(path.read_text())
        return cls({int(rank): peak for rank, peak in found["peaks"].items()}, found["method"], found["reason"])


def is_free(lock: Path, patience_seconds: float) -> bool:
    """Whether whoever held the lock is gone, within so many seconds. False where nobody ever did."""
    if not lock.exists():
        return False
    try:
        with FileLock(lock, timeout=patience_seconds):
            return True
    except Timeout:
        return False


def forecast(
    strategy: Strategy,
    make_model: Callable[[], nn.Module],
    optimizer: OptimizerFactory,
    spec: BuildSpec,
    setting: Setting,
    data: Data,
) -> Forecast:
    """A trace, where the strategy's engine runs on fake tensors and the world is small; else what the formulas say."""
    kind = type(strategy)
    reason = why_no_trace(kind, spec.world.world_size)
    if reason is not None:
        plans = plan(kind, make_model, optimizer, data, setting)
        return Forecast({each.world_rank: each.footprint.peak.bytes for each in plans}, "formula", reason)
    ranks = kind.different_ranks(spec.world.world_size, setting.arguments)

    def make_batch() -> MicroBatch:
        return example(data, spec.micro_batch_size)

    def peak_of(world_rank: int) -> int:
        return trace(strategy, make_model, optimizer, spec, make_batch, world_rank).peak

    to_know = "of the layers as they are before trainer.compile" if spec.compile else None
    return Forecast({world_rank: peak_of(world_rank) for world_rank in ranks}, "trace", to_know)


def why_no_trace(strategy: type[Strategy], world_size: int) -> str | None:
    """Why a forecast is made by formula; None where it is not."""
    if not strategy.supports.can_be_traced:
        return "its engine does not run on fake tensors"
    if world_size > MAX_TRACED_RANKS:
        return f"a trace of {world_size} ranks takes long; task=plan task.dry_run=true makes one"
    return None


def compared(made: Forecast, measured: Sequence[int | None]) -> dict[str, Any]:
    """Forecast and measurement, for summary.json. measured: bytes a rank, None where a rank took no step.

    error: of the fullest rank, relative to what was measured; positive where too much was expected.
    """
    predicted = made.peak
    peaks = [peak for peak in measured if peak is not None]
    error = None if predicted is None or not peaks else (predicted - max(peaks)) / max(peaks)
    return {
        "predicted_bytes": predicted,
        "measured_bytes": list(measured),
        "error": None if error is None else round(error, 4),
        "method": made.method,
        "reason": made.reason,
    }
