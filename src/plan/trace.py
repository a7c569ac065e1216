"""One step of the real strategy, traced: as one rank of a world of any size, on tensors that have no memory."""

import copy
import gc
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import nn

from src.batch import MicroBatch
from src.meter import StorageMeter, metered, storage_bytes, tensors_of
from src.plan.imagined import Traffic, imagined
from src.strategies.base import BuildSpec, OptimizerFactory, Strategy


@dataclass(frozen=True)
class Traced:
    """Of one rank, in bytes, in a step after the first.

    peak: of all tensors alive at once. parameters, gradients, optimizer_states: of this rank's; at_rest: all between
    two steps. peak_in: "forward and backward" or "optimizer step". calls, traffic: collectives of the step, and the
    bytes they were about, by name. seconds: that the trace took.
    """

    world_rank: int
    peak: int
    peak_in: str
    at_rest: int
    parameters: int
    gradients: int
    optimizer_states: int
    calls: dict[str, int]
    traffic: dict[str, int]
    seconds: float


def trace(
    strategy: Strategy,
    make_model: Callable[[], nn.Module],
    optimizer: OptimizerFactory,
    spec: BuildSpec,
    make_batch: Callable[[], MicroBatch],
    world_rank: int = 0,
) -> Traced:
    """Build a copy of `strategy`, which is not built yet, for one rank of spec.world, and take two steps.

    make_batch: a micro-batch's shapes; called under a fake tensor mode. Raises whatever the strategy's code raises in
    such a world, so a mistake shows before a queue of GPUs does.
    """
    started = time.perf_counter()
    strategy = copy.deepcopy(strategy).imagined()
    world = replace(spec.world, world_rank=world_rank, local_rank=world_rank % spec.world.local_size)
    world = replace(world, device=torch.device("cpu"))
    compression = None if spec.compression is None else spec.compression.imagined()
    with imagined(world):
        strategy.build(make_model(), optimizer, replace(spec, world=world, compression=compression))
        strategy.train_mode(True)
        with metered(strategy) as meter:  # the first step also makes the optimizer's states and an engine's buffers
            take_step(strategy, spec, make_batch, meter)
        gc.collect()  # what stood in for other ranks hangs in cycles, and has been seen
        traffic = Traffic()
        with metered(strategy, traffic.see, meter):
            gradients, in_backward = take_step(strategy, spec, make_batch, meter)
        traced = summed_up(strategy, world_rank, meter, traffic, gradients, in_backward, time.perf_counter() - started)
        strategy.close()
        return traced


def summed_up(
    strategy: Strategy,
    world_rank: int,
    meter: StorageMeter,
    traffic: Traffic,
    gradients: int,
    in_backward: int,
    seconds: float,
) -> Traced:
    """After the metered step. gradients: bytes of them. in_backward: the peak before the optimizer's part."""
    parameters = [p for group in strategy.optimizer.param_groups for p in group["params"]]
    return Traced(
        world_rank=world_rank,
        peak=meter.peak,
        peak_in="forward and backward" if meter.peak == in_backward else "optimizer step",
        at_rest=meter.current,
        parameters=storage_bytes(parameters),
        gradients=gradients,
        optimizer_states=storage_bytes(list(tensors_of(list(strategy.optimizer.state.values())))),
        calls=dict(sorted(traffic.calls.items())),
        traffic=dict(sorted(traffic.bytes.items())),
        seconds=seconds,
    )


def take_step(
    strategy: Strategy, spec: BuildSpec, make_batch: Callable[[], MicroBatch], meter: StorageMeter
) -> tuple[int, int]:
    """A whole step; the bytes of the gradients before the optimizer's, and the peak until then."""
    microbatches = [make_batch() for _ in range(spec.accumulate)]
    valid_targets = microbatches[0].targets.numel() * spec.accumulate * strategy.data.size
    strategy.forward_backward(microbatches, valid_targets)
    gradients = storage_bytes([p.grad for group in strategy.optimizer.param_groups for p in group["params"]])
    before_update = meter.peak
    strategy.optimizer_step(1.0, want_grad_norm=False)
    return gradients, before_update
