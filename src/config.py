"""The typed schema that every composed configuration is merged into.

Only types live here; the values, their units and their consequences stand in `conf/`.
No import of torch: `train.py --cfg job` and `--help` must answer at once.
"""

from dataclasses import dataclass, field
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING


@dataclass
class Sharding:
    level: str = MISSING
    shard_size: int | None = MISSING
    offload: str = MISSING


@dataclass
class Precision:
    name: str = MISSING


@dataclass
class Launch:
    nproc: Any = MISSING  # a positive integer, or "auto"
    device: str = MISSING
    max_restarts: int = MISSING
    timeout_seconds: float = MISSING


@dataclass
class Trainer:
    epochs: int = MISSING
    max_steps: int | None = MISSING
    micro_batch_size: Any = MISSING  # a positive integer, null, or "auto"
    accumulate: int | None = MISSING
    global_batch_size: int | None = MISSING
    max_grad_norm: float | None = MISSING
    decay_norms_and_biases: bool = MISSING
    log_every: int = MISSING
    eval_every: int | None = MISSING
    profile_every: int | None = MISSING
    activation_checkpointing: str = MISSING
    compile: bool = MISSING
    deterministic: bool = MISSING
    on_nonfinite: str = MISSING


# `async` is a word of Python's: neither a class body nor a generated __init__ or __repr__ can hold it.
Checkpoint: Any = dataclass(init=False, repr=False, eq=False)(
    type(
        "Checkpoint",
        (),
        {
            "__annotations__": {
                "every": int | None,
                "keep": int,
                "async": bool,
                "monitor": str | None,
                "resume": str | None,
            },
            **dict.fromkeys(["every", "keep", "async", "monitor", "resume"], MISSING),
        },
    )
)


@dataclass
class Config:
    """The root. A `Dict` is a node with a `_target_`: its keys are checked against the target's signature."""

    seed: int = MISSING
    name: str | None = MISSING
    task: dict[str, Any] = field(default_factory=dict)
    strategy: dict[str, Any] = field(default_factory=dict)
    sharding: Sharding = field(default_factory=Sharding)
    precision: Precision = field(default_factory=Precision)
    model: dict[str, Any] = field(default_factory=dict)
    data: dict[str, Any] = field(default_factory=dict)
    optimizer: dict[str, Any] = field(default_factory=dict)
    schedule: dict[str, Any] = field(default_factory=dict)
    compression: dict[str, Any] = field(default_factory=dict)
    tracking: dict[str, Any] = field(default_factory=dict)
    trainer: Trainer = field(default_factory=Trainer)
    launch: Launch = field(default_factory=Launch)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)  # type: ignore[valid-type]


#: Groups whose node must carry a `_target_`.
TARGET_GROUPS: list[str] = ["task", "strategy", "model", "data", "optimizer", "schedule", "tracking"]


def register() -> None:
    """Make the schema known to Hydra as `schema`, the first entry of config.yaml's defaults."""
    ConfigStore.instance().store(name="schema", node=Config)
