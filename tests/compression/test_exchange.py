"""Compressed gradients on real ranks: the same bits everywhere, nothing lost, and dense where everything is sent."""

import copy
import math

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from src.compression.topk import TopK
from src.objective import cross_entropy_sum
from src.strategies.base import Axis
from src.strategies.ddp_hook import Hook
from tests.composing import run_in
from tests.compression.building import (
    CLASSES,
    advance,
    built,
    convolutional_model,
    linear_model,
    microbatches,
    weights,
)

LOOSE = {"ratio": 0.1}
KINDS = {
    "topk": ("topk", LOOSE),
    "topk sampled": ("topk", {"ratio": 0.1, "selection": "sampled"}),
    "topk forgetful": ("topk", {"ratio": 0.1, "error_feedback": False}),
    "topk one value": ("topk", {"ratio": 1e-9}),
    "powersgd": ("powersgd", {"warmup_steps": 2, "min_compression_rate": 1}),
    "powersgd forgetful": ("powersgd", {"warmup_steps": 2, "min_compression_rate": 1, "error_feedback": False}),
    "fp16": ("fp16", {}),
    "bf16": ("bf16", {}),
}


def trained(world, name, arguments, steps=10, built_with=None, batches=None):
    strategy = built(world, name, arguments, **(built_with or {}))
    return advance(world, strategy, range(steps), **(batches or {})), weights(strategy)


def trained_convolutions(world, name, arguments):
    return trained(world, name, arguments, 4, {"model": convolutional_model()}, {"shape": (1, 8, 8)})


@pytest.mark.parametrize("selection", ["exact", "sampled"])
@pytest.mark.parametrize(("num_ranks", "count"), [(2, 1), (3, 2)])
def test_a_ratio_of_one_is_dense_training(pool, selection, num_ranks, count):
    arguments = {"ratio": 1.0, "selection": selection}
    found = pool.run(num_ranks, trained, "topk", arguments, 10, None, {"count": count})
    dense = pool.run(num_ranks, trained, None, {}, 10, None, {"count": count})
    for (steps, ours), (expected, theirs) in zip(found, dense, strict=True):
        # The design's parity bars.
        torch.testing.assert_close(torch.tensor(steps), torch.tensor(expected), rtol=1e-5, atol=0)
        for name, weight in theirs.items():
            torch.testing.assert_close(ours[name], weight, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("kind", KINDS)
def test_all_ranks_hold_the_same_bits(pool, kind):
    (steps, first), *others = pool.run(3, trained, *KINDS[kind])
    assert all(math.isfinite(loss) for loss, _ in steps)
    for other_steps, other in others:
        assert other_steps == steps
        for name, weight in first.items():
            assert torch.equal(weight, other[name]), name


@pytest.mark.parametrize("kind", ["topk", "topk sampled", "powersgd", "fp16", "bf16"])
def test_channels_last_weights_train_to_the_same_bits(pool, kind):
    (steps, first), (_, other) = pool.run(2, trained_convolutions, *KINDS[kind])
    assert all(math.isfinite(loss) for loss, _ in steps)
    for name, weight in first.items():
        assert torch.equal(weight, other[name]), name


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("topk", {"gradient_as_bucket_view": False}),
        ("powersgd", {"gradient_as_bucket_view": False}),
        ("fp16", {"static_graph": True}),
        ("bf16", {"static_graph": True}),
        ("fp16", {"find_unused_parameters": True}),
    ],
)
def test_ddps_own_options_change_no_number(pool, kind, options):
    for (steps, ours), (expected, theirs) in zip(
        pool.run(2, trained, *KINDS[kind], 6, options, {"count": 1}),
        pool.run(2, trained, *KINDS[kind], 6, None, {"count": 1}),
        strict=True,
    ):
        assert steps == expected
        assert all(torch.equal(ours[key], theirs[key]) for key in theirs)


def owed_and_paid(world, arguments, convolutional):
    """Over five steps: the dense mean gradients, and what was applied plus what all ranks still keep."""
    model, shape = (convolutional_model(), (1, 8, 8)) if convolutional else (linear_model(), (4,))
    strategy = built(world, "topk", arguments, model, max_grad_norm=None)
    dense: dict[str, torch.Tensor] = {}
    applied: dict[str, torch.Tensor] = {}
    for step in range(5):
        batches = microbatches(world.world_rank, step, shape=shape)
        targets = 8 * world.world_size
        alone = copy.deepcopy(strategy.model.module)
        alone.zero_grad()
        for batch in batches:
            (cross_entropy_sum(alone(batch.inputs), batch.targets) / targets).backward()
        strategy.forward_backward(batches, targets)
        for name, parameter in alone.named_parameters():
            dist.all_reduce(parameter.grad)
            dense[name] = dense.get(name, 0) + parameter.grad
        for name, parameter in strategy.model.module.named_parameters():
            applied[name] = applied.get(name, 0) + parameter.grad
        strategy.optimizer_step(1.0, want_grad_norm=False)
    buckets = len(strategy.compression.residuals.flats)
    for name, kept in strategy.compression.residuals.named().items():
        kept = kept.clone()
        dist.all_reduce(kept)
        applied[name] += kept
    return dense, applied, buckets


@pytest.mark.parametrize("convolutional", [False, True])
@pytest.mark.parametrize("selection", ["exact", "sampled"])
def test_residuals_stay_with_their_parameters_through_small_buckets(pool, selection, convolutional):
    for dense, applied, buckets in pool.run(2, owed_and_paid, LOOSE | {"selection": selection}, convolutional):
        assert buckets > 1
        for name, gradient in dense.items():
            # Sums of five steps of fp32, in another order.
            torch.testing.assert_close(applied[name], gradient, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", ["topk", "powersgd"])
def test_warm_up_steps_are_dense_to_the_bit(pool, name):
    arguments = {"warmup_steps": 3}
    for (steps, ours), (expected, theirs) in zip(
        pool.run(2, trained, name, arguments, 3), pool.run(2, trained, None, {}, 3), strict=True
    ):
        assert steps == expected
        assert all(torch.equal(ours[key], theirs[key]) for key in theirs)
    (steps, _), _ = pool.run(2, trained, name, arguments, 5)
    (expected, _), _ = pool.run(2, trained, None, {}, 5)
    assert steps[4] != expected[4]


def clipped(world):
    strategy = built(world, "topk", {"ratio": 0.05}, max_grad_norm=1e-3, lr=1.0)
    before = weights(strategy)
    strategy.forward_backward(microbatches(world.world_rank, 0), 16)
    applied = torch.cat([p.grad.flatten() for p in strategy.trained]).norm()
    report = strategy.optimizer_step(1.0, want_grad_norm=True)
    moved = torch.cat([(before[n] - w).flatten() for n, w in weights(strategy).items()]).norm()
    return float(applied), float(report.grad_norm), float(moved)


def test_the_norm_that_is_clipped_is_of_what_is_applied(pool):
    for applied, reported, moved in pool.run(2, clipped):
        assert reported == pytest.approx(applied, rel=1e-6)
        assert moved == pytest.approx(1e-3, rel=1e-3)  # SGD at 1.0, clipped to 1e-3


@pytest.mark.parametrize("name", CLASSES)
def test_under_bf16_autocast_it_learns_about_the_same(pool, name):
    exact = {"topk": {"ratio": 1.0}, "powersgd": {"matrix_rank": 16, "warmup_steps": 2}}.get(name, {})
    (ours, _), _ = pool.run(2, trained, name, exact, 4, {"precision": "bf16"})
    (dense, _), _ = pool.run(2, trained, None, {}, 4, {"precision": "bf16"})
    # The design's bar for 16 bits.
    torch.testing.assert_close(torch.tensor(ours)[:, 0], torch.tensor(dense)[:, 0], rtol=2e-2, atol=0)


@pytest.mark.parametrize("name", ["fp16", "bf16"])
def test_a_loss_scale_passes_through_sixteen_bits(pool, name):
    (ours, first), (_, other) = pool.run(2, trained, name, {}, 4, {"precision": "fp16"})
    (dense, _), _ = pool.run(2, trained, None, {}, 4, {"precision": "fp16"})
    torch.testing.assert_close(torch.tensor(ours)[:, 0], torch.tensor(dense)[:, 0], rtol=2e-2, atol=0)
    assert all(torch.equal(first[key], other[key]) for key in first)


class Tug(nn.Module):
    """Two weights in one bucket. The first is pulled by 1 to and fro, the second by 0.1 of its distance from 1."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2))

    def forward(self, step: int) -> torch.Tensor:
        return (-1) ** step * self.weight[0] + 0.05 * (self.weight[1] - 1) ** 2


def tugged(world, error_feedback):
    """The weights after 400 steps of which each sends one of the two gradients."""
    topk = TopK(0.5, error_feedback=error_feedback)
    model = DistributedDataParallel(Tug())
    Hook(topk).register(model, Axis(world.world_rank, world.world_size))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(400):
        model(step).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.module.weight.detach().clone()


def test_what_is_never_among_the_largest_stalls_without_error_feedback_and_learns_with_it(pool):
    # The second gradient is at most 0.1 and the first is 1 at every step: nothing of the second is ever sent.
    for stalled in pool.run(2, tugged, False):
        assert stalled[1] == 0
    # Kept, it adds up to 1 and is sent, the slower the nearer it comes: to w after sum over jumps of 0.1 of
    # 10 / (1 - w) steps, 193 for 0.9. A jump more or less is 0.1.
    for learnt in pool.run(2, tugged, True):
        assert abs(float(learnt[1]) - 1) <= 0.2


def test_a_run_of_many_small_buckets_is_the_dense_one_where_all_is_sent(pool, tmp_path):
    # DD-05: buckets are made anew after the first step, and a residual kept by bucket would no longer fit.
    words = ["model=cnn", "trainer.max_steps=5", "strategy.bucket_cap_mb=0.01", "data.limit=320"]
    dense = run_in(pool, 2, tmp_path / "dense", *words)
    whole = run_in(pool, 2, tmp_path / "whole", *words, "compression=topk", "compression.ratio=1.0")
    some = run_in(pool, 2, tmp_path / "some", *words, "compression=topk", "compression.ratio=0.1")
    for key in ("loss", "grad_norm"):
        torch.testing.assert_close(whole.series(key), dense.series(key), rtol=1e-5, atol=0)  # the design's bars
    for name, weight in dense.weights.items():
        torch.testing.assert_close(whole.weights[name], weight, rtol=1e-4, atol=1e-7)
    assert len(some.train) == 5
    assert all(record["residual_norm"] > 0 for record in some.train)
    assert all(record["residual_norm"] == 0 for record in whole.train)
