"""DDP with a compressor inside a worker, and buckets without a process group."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from src.batch import MicroBatch
from src.compression.base import Compression
from src.compression.bf16 import BF16
from src.compression.fp16 import FP16
from src.compression.powersgd import PowerSGD
from src.compression.topk import TopK
from src.models.cnn import CNN
from src.precision import Precision
from src.strategies.base import BuildSpec
from src.strategies.ddp import DDP

CLASSES: dict[str, type[Compression]] = {"topk": TopK, "powersgd": PowerSGD, "fp16": FP16, "bf16": BF16}
SMALL_BUCKETS = 2e-4  # MiB, 52 gradients: several buckets of the models here


def made(name: str | None, arguments: dict[str, Any]) -> Compression | None:
    return None if name is None else CLASSES[name](**arguments)


def linear_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 3))


def convolutional_model() -> nn.Module:
    torch.manual_seed(0)
    return CNN([1, 8, 8], 3)  # channels last: its weights don't lie in the order of their dims


def built(
    world: Any,
    name: str | None,
    arguments: dict[str, Any],
    model: nn.Module | None = None,
    bucket_cap_mb: float = SMALL_BUCKETS,
    max_grad_norm: float | None = 0.5,
    precision: str = "fp32",
    lr: float = 0.1,
    **options: Any,
) -> DDP:
    strategy = DDP(bucket_cap_mb=bucket_cap_mb, **options)
    spec = BuildSpec(world, Precision(precision), max_grad_norm=max_grad_norm, compression=made(name, arguments))
    strategy.build(linear_model() if model is None else model, partial(torch.optim.SGD, lr=lr), spec)
    return strategy


def microbatches(world_rank: int, step: int, count: int = 2, shape: Sequence[int] = (4,)) -> list[MicroBatch]:
    """`count` micro-batches of four samples, different on every rank and at every step."""
    generator = torch.Generator().manual_seed(1000 * step + world_rank)
    return [
        MicroBatch(torch.randn(4, *shape, generator=generator), torch.randint(0, 3, (4,), generator=generator))
        for _ in range(count)
    ]


def weights(strategy: DDP) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in strategy.model.module.named_parameters()}


def advance(world: Any, strategy: DDP, steps: Sequence[int], **batches: Any) -> list[tuple[float, float]]:
    """(loss, gradient norm) of each step, on every rank."""
    found = []
    for step in steps:
        micro = microbatches(world.world_rank, step, **batches)
        targets = sum(batch.targets.numel() for batch in micro) * world.world_size
        loss = strategy.forward_backward(micro, targets)
        report = strategy.optimizer_step(1.0, want_grad_norm=True)
        assert loss is not None
        assert report.grad_norm is not None
        found.append((float(strategy.sum(loss)) / targets, float(report.grad_norm)))
    return found


class LoneBucket:
    """A bucket of one parameter, outside of DDP."""

    def __init__(self, parameter: Tensor, gradient: Tensor) -> None:
        self.parameter, self.gradient = parameter, gradient

    def index(self) -> int:
        return 0

    def is_last(self) -> bool:
        return True

    def buffer(self) -> Tensor:
        return self.gradient

    def parameters(self) -> list[Tensor]:
        return [self.parameter]
