"""Strategies that stop, and others that go on from their state, without a store on disk between them."""

import json
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from src.batch import MicroBatch
from src.models.gpt import GPT
from src.precision import Precision
from src.sharding import Sharding
from src.strategies.base import BuildSpec, Strategy
from src.strategies.ddp import DDP
from src.strategies.deepspeed import DeepSpeed
from src.strategies.fsdp import FSDP2
from src.strategies.fsdp1 import FSDP1
from src.strategies.pp import PipelineParallel
from src.strategies.run_state import State
from src.strategies.single import Single
from src.strategies.tp import TensorParallel

SAMPLES, ACCUMULATE, LENGTH, VOCABULARY = 8, 2, 8, 37


@dataclass(frozen=True)
class Kind:
    """A strategy as a command line would choose it."""

    make: Callable[..., Strategy]
    level: str = "none"
    arguments: dict[str, Any] = field(default_factory=dict)
    offload: str = "none"
    shard_size: int | None = None


SMALL_UNITS = {"min_unit_parameters": 500}  # so that FSDP1 makes several
KINDS = {
    "single": Kind(Single),
    "ddp": Kind(DDP),
    "fsdp zero2": Kind(FSDP2, "zero2"),
    "fsdp zero3": Kind(FSDP2, "zero3"),
    "fsdp hybrid": Kind(FSDP2, "hybrid", shard_size=2),
    "fsdp offload": Kind(FSDP2, "zero3", offload="all"),
    "fsdp1 zero2": Kind(FSDP1, "zero2", SMALL_UNITS),
    "fsdp1 zero3": Kind(FSDP1, "zero3", SMALL_UNITS),
    "fsdp1 hybrid": Kind(FSDP1, "hybrid", SMALL_UNITS, shard_size=2),
    "deepspeed zero0": Kind(DeepSpeed),
    "deepspeed zero1": Kind(DeepSpeed, "zero1"),
    "deepspeed zero2": Kind(DeepSpeed, "zero2"),
    "deepspeed zero3": Kind(DeepSpeed, "zero3"),
    "deepspeed zero3 sharded": Kind(DeepSpeed, "zero3", {"stage3_param_persistence_threshold": 0}),
    "deepspeed zero2 offload": Kind(DeepSpeed, "zero2", offload="optimizer"),
    "deepspeed zero3 offload": Kind(DeepSpeed, "zero3", offload="all"),
    "tp": Kind(TensorParallel),
    "tp sequence": Kind(TensorParallel, arguments={"sequence_parallel": True}),
    "tp zero2": Kind(TensorParallel, "zero2"),
    "tp zero3": Kind(TensorParallel, "zero3"),
    "tp hybrid": Kind(TensorParallel, "hybrid", shard_size=1),
    "pp": Kind(PipelineParallel),
    "pp of two stages": Kind(PipelineParallel, arguments={"schedule": "interleaved_1f1b"}),
    "pp zero2": Kind(PipelineParallel, "zero2"),
    "pp zero3": Kind(PipelineParallel, "zero3", {"schedule": "interleaved_1f1b"}),
    "pp tp": Kind(PipelineParallel, arguments={"tp": 2, "sequence_parallel": True}),
}


def decay_groups(parameters: Any, **others: Any) -> torch.optim.Optimizer:
    """AdamW that decays every other parameter."""
    every = list(parameters)
    groups = [{"params": every[::2], "weight_decay": 0.1}, {"params": every[1::2], "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=3e-3, eps=1e-5, **others)


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    # A large eps: AdamW makes full steps of gradients that are rounding noise.
    "adamw": partial(torch.optim.AdamW, lr=3e-3, eps=1e-5, weight_decay=0.1),
    "fused adamw": partial(torch.optim.AdamW, lr=3e-3, eps=1e-5, weight_decay=0.1, fused=True),
    "decay groups": decay_groups,
    "fused decay groups": partial(decay_groups, fused=True),
    "amsgrad": partial(torch.optim.Adam, lr=3e-3, eps=1e-5, amsgrad=True),
    "sgd": partial(torch.optim.SGD, lr=0.05),
    "momentum": partial(torch.optim.SGD, lr=0.05, momentum=0.9, dampening=0.5),
}


def gpt(seed: int, layers: int = 2) -> nn.Module:
    torch.manual_seed(seed)
    return GPT(vocab_size=VOCABULARY, sequence_length=LENGTH, layers=layers, width=16, heads=4)


def perceptron(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Flatten(), nn.Linear(3 * 6 * 6, 16), nn.ReLU(), nn.Linear(16, 3))


class Convolutional(nn.Module):
    """A ResNet's parts over images of 3 x 6 x 6, and three parameters that don't train."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        layers = [nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
        self.body = nn.Sequential(*layers)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.head = nn.Linear(4, 3)
        self.register_buffer("scratch", torch.zeros(2), persistent=False)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.head(self.body(images) + self.frozen(self.body(images)))
        return logits


MODELS: dict[str, Callable[[int], nn.Module]] = {
    "gpt": gpt,
    "gpt of four layers": partial(gpt, layers=4),
    "perceptron": perceptron,
    "convolutional": Convolutional,
}


def sized(*kinds: str) -> dict[str, str]:
    """The model to build: a GPT with a layer for every stage of these kinds."""
    several = any("schedule" in KINDS[kind].arguments for kind in kinds)
    return {"model": "gpt of four layers" if several else "gpt"}


def samples(model: str, step: int, count: int) -> tuple[Tensor, Tensor]:
    """The global batch of a step."""
    generator = torch.Generator().manual_seed(1000 + step)
    if "gpt" in model:
        tokens = torch.randint(0, VOCABULARY, (2, count, LENGTH), generator=generator)
        return tokens[0], tokens[1]
    images = torch.randn(count, 3, 6, 6, generator=generator)
    return images, torch.randint(0, 3, (count,), generator=generator)


@contextmanager
def running(
    world: Any, kind: str, model: str = "gpt", optimizer: str = "adamw", precision: str = "fp32", seed: int = 0
):  # type: ignore[no-untyped-def]
    """The strategy, built with the weights of `seed`."""
    chosen = KINDS[kind]
    strategy = chosen.make(**chosen.arguments)
    data_ranks = 1 if kind == "single" else chosen.make.data_parallel_size(world.world_size, chosen.arguments)
    spec = BuildSpec(
        world,
        Precision(precision),
        Sharding(chosen.level, chosen.shard_size, chosen.offload),
        micro_batch_size=SAMPLES // ACCUMULATE // data_ranks,
        accumulate=ACCUMULATE,
        max_grad_norm=1.0,
    )
    strategy.build(MODELS[model](seed), OPTIMIZERS[optimizer], spec)
    strategy.model_name = model
    strategy.train_mode(True)
    try:
        yield strategy
    finally:
        strategy.close()


def microbatches(strategy: Any, step: int, scale: float = 1.0) -> tuple[list[MicroBatch], int]:
    """This data rank's, and the step's targets."""
    alone = isinstance(strategy, Single)
    rank, size = (0, 1) if alone else (strategy.data.rank, strategy.data.size)
    inputs, targets = samples(strategy.model_name, step, SAMPLES)
    if inputs.is_floating_point():
        inputs = inputs * scale
    count = 1 if strategy.model_name == "convolutional" else ACCUMULATE  # batch norm's statistics are of one
    parts = zip(inputs.chunk(size)[rank].chunk(count), targets.chunk(size)[rank].chunk(count), strict=True)
    return [MicroBatch(*part) for part in parts], targets.numel()


def advance(strategy: Any, *steps: int) -> list[float]:
    """Optimizer steps by number; their mean losses, on every rank."""
    losses = []
    for step in steps:
        batches, targets = microbatches(strategy, step)
        loss = strategy.forward_backward(batches, targets)
        strategy.optimizer_step(1 / (1 + step), want_grad_norm=False)
        loss = torch.zeros(()) if loss is None else loss
        losses.append(float(loss if isinstance(strategy, Single) else strategy.sum(loss)) / targets)
    return losses


def evaluate(strategy: Any) -> None:
    """As between two steps of a run."""
    strategy.train_mode(False)
    strategy.evaluate(microbatches(strategy, 0)[0][0])
    strategy.train_mode(True)


def whole(state: State) -> dict[str, Tensor]:
    """Every tensor of every rank, gathered."""
    return of_all_ranks(
        {n: (t.full_tensor() if isinstance(t, DTensor) else t).detach().clone() for n, t in state.tensors.items()}
    )


def of_all_ranks(own: dict[str, Any]) -> dict[str, Any]:
    """What the ranks hold, by name."""
    of_ranks: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(of_ranks, own)
    return {name: value for rank in of_ranks for name, value in rank.items()}


def load(strategy: Any, tensors: dict[str, Tensor], plain: dict[str, Any]) -> None:
    """As from a checkpoint: fill what the strategy says it has, then hand it back."""
    state = strategy.state()
    with torch.no_grad():
        for name, tensor in state.tensors.items():
            assert tensor.ndim > 0, name
            assert tensors[name].shape == tensor.shape, name
            if isinstance(tensor, DTensor):
                part = distribute_tensor(tensors[name], tensor.device_mesh, tensor.placements, src_data_rank=None)
                tensor.to_local().copy_(part.to_local())
            else:
                tensor.copy_(tensors[name])
    strategy.load_state(State(state.tensors, json.loads(json.dumps(plain))))


def assert_equal(ours: State, theirs: State) -> None:
    """To the bit, on this rank."""
    assert ours.plain == theirs.plain
    assert ours.tensors.keys() == theirs.tensors.keys()
    for name, tensor in ours.tensors.items():
        other = theirs.tensors[name]
        if isinstance(tensor, DTensor):
            tensor, other = tensor.to_local(), other.to_local()
        assert torch.equal(tensor, other), name
