"""Building a strategy inside a worker, without a configuration."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from src.batch import MicroBatch
from src.precision import Precision
from src.sharding import Sharding
from src.strategies.base import BuildSpec, Strategy
from src.strategies.ddp import DDP
from src.strategies.fsdp import FSDP2
from src.strategies.fsdp1 import FSDP1
from src.strategies.single import Single

SHARDED = {"single": "none", "ddp": "none", "fsdp": "zero3", "fsdp1": "zero3"}
CLASSES: dict[str, Callable[..., Strategy]] = {"single": Single, "ddp": DDP, "fsdp": FSDP2, "fsdp1": FSDP1}


def built(world: Any, name: str, model: nn.Module, precision: str = "fp32", **arguments: Any) -> Any:
    """The strategy, with SGD at 0.1 and gradients clipped to 0.5."""
    strategy = CLASSES[name](**arguments)
    spec = BuildSpec(world, Precision(precision), Sharding(SHARDED[name]), micro_batch_size=4, max_grad_norm=0.5)
    strategy.build(model, partial(torch.optim.SGD, lr=0.1), spec)
    return strategy


def linear_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 3))


def microbatches(world_rank: int, count: int, scale: float = 1.0) -> list[MicroBatch]:
    """`count` micro-batches of four samples, different on every rank."""
    generator = torch.Generator().manual_seed(100 + world_rank)
    return [
        MicroBatch(scale * torch.randn(4, 4, generator=generator), torch.randint(0, 3, (4,), generator=generator))
        for _ in range(count)
    ]
