"""Passes that measure and must leave no trace in the training."""

import random
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from src.parallel.data import gradient_reductions
from src.profiling.probe import Probe
from tests.strategies.building import built, microbatches


class Dropping(nn.Module):
    """Everything that a forward changes: batch statistics, and draws of dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.Dropout(0.5), nn.Linear(16, 3))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.layers(inputs)


CASES = [
    ("ddp", "fp32", {}),
    ("ddp", "fp32", {"static_graph": True}),
    ("ddp", "fp16", {"gradient_as_bucket_view": False}),
    ("fsdp", "fp32", {}),
    ("fsdp", "bf16", {}),
    ("fsdp", "fp32", {"sync_each_microbatch": False}),
]


def trained(world: Any, name: str, precision: str, arguments: dict[str, Any], probes: bool) -> dict[str, Any]:
    """Three steps, with samples after the first two or none; everything that a step could have changed."""
    torch.manual_seed(0)
    model = Dropping()
    random.seed(world.world_rank)
    np.random.seed(world.world_rank)
    torch.manual_seed(world.world_rank)
    strategy = built(world, name, model, precision, **arguments)
    probe = Probe(strategy, world)
    count = 1 if arguments.get("static_graph") else 2
    losses = []
    for step in range(3):
        batches = microbatches(world.world_rank, count, scale=1.0 + step)
        losses.append(float(strategy.forward_backward(batches, 8 * count)))
        strategy.optimizer_step(1.0, want_grad_norm=True)
        if probes and step < 2:
            probe.sample(batches, 8 * count)
            assert all(parameter.grad is None for parameter in strategy.trained)
    buffers = [buffer.tolist() for buffer in strategy.model.buffers()]
    weights = strategy.weights()
    return {
        "losses": losses,
        "buffers": buffers,
        "weights": None if weights is None else {name: tensor.tolist() for name, tensor in weights.items()},
        "draws": (random.random(), float(np.random.random()), float(torch.rand(()))),
        "samples": {name: len(samples) for name, samples in probe.seconds.items()},
    }


@pytest.mark.parametrize(("name", "precision", "arguments"), CASES)
def test_a_probe_changes_no_loss_weight_buffer_or_draw(pool, name, precision, arguments):
    plain = pool.run(2, trained, name, precision, arguments, False)
    probed = pool.run(2, trained, name, precision, arguments, True)
    for before, after in zip(plain, probed, strict=True):
        assert after.pop("samples") == {"synchronized": 2, "omitting": 2, "alone": 2}
        del before["samples"]
        assert after == before  # bit for bit


def all_reduced_in_a_probe(world: Any, bucket_cap_mb: float) -> tuple[list[int], list[int]]:
    """Elements of the all-reduces of DDP's own step, and of the synchronisation alone."""
    torch.manual_seed(0)
    strategy = built(world, "ddp", nn.Sequential(*[nn.Linear(600, 600) for _ in range(4)]), bucket_cap_mb=bucket_cap_mb)
    batches = [batch._replace(inputs=torch.randn(4, 600)) for batch in microbatches(world.world_rank, 1)]
    for _ in range(2):  # the second makes the final buckets
        strategy.forward_backward(batches, 8)
        strategy.forget_gradients()
    own: list[int] = []
    strategy.model.register_comm_hook(own, noted_all_reduce)
    strategy.forward_backward(batches, 8)
    alone: list[int] = []
    all_reduce = dist.all_reduce
    call = strategy.synchronization_alone(1)
    try:
        dist.all_reduce = lambda tensor, **options: (alone.append(tensor.numel()), all_reduce(tensor, **options))[1]
        call()
    finally:
        dist.all_reduce = all_reduce
    return own, alone


def noted_all_reduce(noted: list[int], bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    noted.append(bucket.buffer().numel())
    return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(lambda future: future.value()[0])


@pytest.mark.parametrize(("bucket_cap_mb", "count"), [(100, 1), (1, 4)])
def test_synchronisation_alone_sends_what_ddp_sends(pool, bucket_cap_mb, count):
    for own, alone in pool.run(2, all_reduced_in_a_probe, bucket_cap_mb):
        assert own == alone
        assert len(own) == count
        assert sum(own) == 4 * (600 * 600 + 600)


def reduced_by_units(world: Any) -> tuple[list[int], list[int]]:
    """Elements of the reduce-scatters of FSDP2's own backward, and of those alone."""
    torch.manual_seed(0)
    strategy = built(world, "fsdp", Dropping())  # its batch norm is a unit of its own
    batches = microbatches(world.world_rank, 1)
    seen: list[int] = []
    reduce_scatter = dist.reduce_scatter_single

    def noting(output: Tensor, input: Tensor, *rest: Any, **options: Any) -> Any:
        seen.append(input.numel())
        return reduce_scatter(output, input, *rest, **options)

    try:
        dist.reduce_scatter_single = noting
        strategy.forward_backward(batches, 8)
        own = list(seen)
        seen.clear()
        with strategy.unsynchronized():
            strategy.forward_backward(batches, 8)
        assert not seen
        gradient_reductions(strategy.model)()
    finally:
        dist.reduce_scatter_single = reduce_scatter
    return own, seen


def test_reductions_alone_send_what_fsdp_sends(pool):
    for own, alone in pool.run(2, reduced_by_units):
        assert own == alone
        # BatchNorm's 16 + 16; and 16 x 4 + 16 + 4 x 16 + 4 of the rest, 3 rows padded to 4.
        assert sorted(own) == [32, 148]


def test_a_strategy_that_can_leave_out_nothing_is_timed_whole(pool):
    for names in pool.run(2, sampled_whole):
        assert names == {"synchronized": 1, "omitting": 0, "alone": 0}


def sampled_whole(world: Any) -> dict[str, int]:
    strategy = built(world, "fsdp1", Dropping())
    probe = Probe(strategy, world)
    probe.sample(microbatches(world.world_rank, 1), 8)
    return {name: len(samples) for name, samples in probe.seconds.items()}
