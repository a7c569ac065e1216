"""The range of every value that has one, each checked on its own."""

import math
from collections.abc import Iterator
from typing import Any

from src.errors import did_you_mean
from src.parallel.recompute import MODES
from src.precision import PRECISIONS
from src.sharding import LEVELS, OFFLOADS
from src.snapshots import MONITORS

CHOICES = {
    "sharding.level": LEVELS,
    "sharding.offload": OFFLOADS,
    "precision.name": PRECISIONS,
    "trainer.on_nonfinite": ("stop", "skip"),
    "trainer.activation_checkpointing": MODES,
}

MAX_BATCH_SIZE = 1_000_000_000  # samples; numpy can't count slots far beyond, and no memory holds them
MAX_TIMEOUT_SECONDS = 1_000_000_000  # 31 years; not much more overflows what c10d counts in


#: The least that a count can be.
AT_LEAST_ONE = (
    "trainer.epochs",
    "trainer.max_steps",
    "trainer.log_every",
    "trainer.eval_every",
    "data.limit",
    "checkpoint.every",
    "checkpoint.keep",
    "trainer.profile_every",
)


def range_problems(config: dict[str, Any]) -> list[str]:
    """Values out of range, one line each. A micro-batch that is no number becomes 1, so that the rest can be read."""
    found = [
        f"{shown} is no finite number; choose one, or null where there may be none." for shown in non_finite(config)
    ]
    return found + count_problems(config) + batch_problems(config) + limit_problems(config)


def count_problems(config: dict[str, Any]) -> list[str]:
    """Counts of none or less, where that means nothing."""
    found = []
    for key in AT_LEAST_ONE:
        value = at(config, key)
        if value is not None and value < 1:
            empty = " leaves an empty data set" if key == "data.limit" else " is less than one"
            found.append(f"{key}={value}{empty}; choose 1 or more.")
    for key, remedy in (("launch.max_restarts", ""), ("data.num_workers", ", or null")):
        value = at(config, key)
        if value is not None and value < 0:
            found.append(f"{key}={value} is negative; choose 0 or more{remedy}.")
    return found


def batch_problems(config: dict[str, Any]) -> list[str]:
    """Sizes of batches, each on its own."""
    found = []
    micro = at(config, "trainer.micro_batch_size")
    if micro is not None and (not isinstance(micro, int) or isinstance(micro, bool)):
        found.append(f"trainer.micro_batch_size={micro} is no number of samples; choose 1 or more, auto, or null.")
        config["trainer"]["micro_batch_size"] = 1
    for key in ("trainer.micro_batch_size", "trainer.accumulate", "trainer.global_batch_size"):
        value = at(config, key)
        if value is not None and value > MAX_BATCH_SIZE:
            found.append(f"{key}={value} is more than {MAX_BATCH_SIZE}; choose a smaller one.")
    return found


def limit_problems(config: dict[str, Any]) -> list[str]:
    """Amounts with a bound, and choices."""
    found = []
    for key in ("trainer.max_grad_norm", "launch.timeout_seconds"):
        value = at(config, key)
        if value is not None and value <= 0:
            found.append(f"{key}={value} must be more than 0{'; null: no clipping' if 'norm' in key else ''}.")
    if MAX_TIMEOUT_SECONDS < config["launch"]["timeout_seconds"] < math.inf:
        found.append(
            f"launch.timeout_seconds={config['launch']['timeout_seconds']} is more than {MAX_TIMEOUT_SECONDS}."
        )
    if not 0 <= config["seed"] < 2**32:
        found.append(f"seed={config['seed']} is out of range; choose 0 to {2**32 - 1}.")
    for key, known in CHOICES.items():
        if at(config, key) not in known:
            found.append(f"{key}={at(config, key)} is unknown. {did_you_mean(str(at(config, key)), known)}")
    monitor = config["checkpoint"]["monitor"]
    if monitor is not None and monitor not in MONITORS:
        found.append(f"checkpoint.monitor={monitor} is unknown. {did_you_mean(str(monitor), MONITORS)}")
    return found


def at(config: dict[str, Any], dotted_key: str) -> Any:
    """The value at a dotted key; None where the node has no such key."""
    value: Any = config
    for part in dotted_key.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value


def non_finite(value: Any, path: str = "") -> Iterator[str]:
    """The dotted keys of all NaNs and infinities in a configuration."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from non_finite(item, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from non_finite(item, f"{path}[{index}]")
    elif isinstance(value, float) and not math.isfinite(value):
        yield f"{path}={value}"
