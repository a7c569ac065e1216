"""Accumulation: one normalisation over micro-batches and ranks, one exchange of gradients a step."""

import pytest
import torch
from torch import nn

from src.batch import BatchPlan, BatchSizes
from tests.composing import run_in
from tests.strategies.building import built, linear_model, microbatches

TOKENS = [
    "model=mlp",
    "model._target_=tests.crafted.TokenModel",
    "data._target_=tests.crafted.MaskedTokens",
    "trainer.micro_batch_size=null",
    "trainer.global_batch_size=8",
    "trainer.max_steps=6",
    "optimizer=sgd",
]
SPLITS = [(1, "single", 4), (2, "ddp", 1), (2, "ddp", 2), (2, "fsdp", 4), (2, "fsdp1", 2), (2, "deepspeed", 2)]


def assert_same_training(result, reference):
    assert result.series("loss") == pytest.approx(reference.series("loss"), rel=1e-5)
    assert result.series("grad_norm") == pytest.approx(reference.series("grad_norm"), rel=1e-5)
    for name, weight in reference.weights.items():
        torch.testing.assert_close(result.weights[name], weight, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("ranks", "strategy", "accumulate"), SPLITS)
def test_targets_of_unequal_number_weigh_the_same_however_the_batch_is_split(
    pool, tmp_path, ranks, strategy, accumulate
):
    # Sample i has i % 7 valid targets: a mean of micro-batch means, or of rank means, would be another loss.
    reference = run_in(pool, 1, tmp_path / "whole", "strategy=single", "trainer.accumulate=1", *TOKENS)
    result = run_in(
        pool, ranks, tmp_path / "split", f"strategy={strategy}", f"trainer.accumulate={accumulate}", *TOKENS
    )
    assert_same_training(result, reference)
    assert [e["samples"] for e in result.evaluations] == [23] * len(result.evaluations)
    assert [e["perplexity"] for e in result.evaluations] == pytest.approx(
        [e["perplexity"] for e in reference.evaluations], rel=1e-5
    )


@pytest.mark.parametrize(("strategy", "accumulate"), [("ddp", 1), ("ddp", 2), ("fsdp", 1), ("fsdp1", 2)])
def test_a_rank_without_valid_targets_adds_nothing_and_hangs_nobody(pool, tmp_path, strategy, accumulate):
    sizes = BatchSizes(8 // (2 * accumulate), accumulate, 2)
    second = list(BatchPlan(23, 8, seed=0).epoch(0))[1]
    masked = [int(i) for request in second.requests(sizes, data_rank=1) for i in request.ids]
    crafted = [*TOKENS, f"+data.masked={masked}"]
    reference = run_in(pool, 1, tmp_path / "whole", "strategy=single", "trainer.accumulate=1", *crafted)
    result = run_in(pool, 2, tmp_path / "split", f"strategy={strategy}", f"trainer.accumulate={accumulate}", *crafted)
    assert_same_training(result, reference)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_step_without_any_valid_target_has_zero_loss_and_keeps_the_weights_finite(pool, tmp_path, strategy):
    third = list(BatchPlan(23, 8, seed=0).epoch(0))[2]
    crafted = [*TOKENS, f"+data.masked={[int(i) for i in third.sample_ids]}", "trainer.accumulate=1"]
    result = run_in(pool, 2, tmp_path / "run", f"strategy={strategy}", *crafted)
    assert result.series("loss")[2] == 0.0
    assert result.series("grad_norm")[2] == 0.0
    assert all(torch.isfinite(weight).all() for weight in result.weights.values())


def count_exchanges(world, num_microbatches):
    """Gradient buckets that DDP hands to its hook in one step."""
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

    strategy = built(world, "ddp", linear_model())
    calls = []

    def hook(group, bucket):
        calls.append(bucket.index())
        return allreduce_hook(group, bucket)

    strategy.model.register_comm_hook(None, hook)
    strategy.forward_backward(microbatches(world.world_rank, num_microbatches), 8 * num_microbatches)
    return calls


@pytest.mark.parametrize("num_microbatches", [1, 4])
def test_ddp_exchanges_each_bucket_once_a_step(pool, num_microbatches):
    # The model fits one 25 MiB bucket; no_sync around backward alone would exchange at every micro-batch.
    assert pool.run(2, count_exchanges, num_microbatches) == [[0], [0]]


def norm_and_weights(world, name, arguments):
    strategy = built(world, name, linear_model(), **arguments)
    strategy.forward_backward(microbatches(world.world_rank, 3), 24)
    report = strategy.optimizer_step(1.0, want_grad_norm=True)
    return float(report.grad_norm), strategy.weights()


def norm_and_weights_by_hand():
    """One process, all 24 samples at once, plain torch."""
    model = linear_model()
    batches = [batch for rank in (0, 1) for batch in microbatches(rank, 3)]
    inputs, targets = torch.cat([b.inputs for b in batches]), torch.cat([b.targets for b in batches])
    nn.functional.cross_entropy(model(inputs), targets).backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    return float(norm), model.state_dict()


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("ddp", {}),
        ("fsdp", {"sync_each_microbatch": True}),
        ("fsdp", {"sync_each_microbatch": False}),
        ("fsdp1", {"sync_each_microbatch": True}),
        ("fsdp1", {"sync_each_microbatch": False}),
    ],
)
def test_every_rank_sees_the_global_norm_and_takes_the_big_batchs_step(pool, name, arguments):
    norm, weights = norm_and_weights_by_hand()
    (norm_0, weights_0), (norm_1, weights_1) = pool.run(2, norm_and_weights, name, arguments)
    assert norm_0 == norm_1 == pytest.approx(norm, rel=1e-5)
    assert weights_1 is None
    for key, weight in weights.items():
        torch.testing.assert_close(weights_0[key], weight, rtol=0, atol=1e-6)


def test_the_epochs_loss_is_the_mean_over_all_its_samples(pool, tmp_path):
    result = run_in(
        pool, 2, tmp_path / "run", "strategy=ddp", "model=mlp", "data.limit=101", "trainer.micro_batch_size=9",
        "trainer.epochs=1",
    )  # fmt: skip
    sizes = [len(batch.sample_ids) for batch in BatchPlan(101, 18, seed=0).epoch(0)]
    by_hand = sum(loss * size for loss, size in zip(result.series("loss"), sizes, strict=True)) / 101
    assert result.summary["train_loss"] == pytest.approx(by_hand, rel=1e-6)
