"""BatchNorm's statistics stay fp32 under every precision, in memory and on disk (cases MP-05, MP-06 and DD-07)."""

import pytest
import torch
from torch import nn

from src.batch import MicroBatch
from tests.composing import run_in
from tests.strategies.building import built

STRATEGIES = ["ddp", "fsdp", "fsdp1"]
PRECISIONS = ["fp32", "bf16", "fp16"]


def normalised_images() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3)]
    return nn.Sequential(*layers)


def statistics_after_five_steps(world, name, precision):
    """Of this rank before they are made equal, and as they are saved: (dtype, running mean) each."""
    strategy = built(world, name, normalised_images(), precision)
    generator = torch.Generator().manual_seed(world.world_rank)
    for _ in range(5):
        images = torch.randn(4, 3, 6, 6, generator=generator)
        strategy.forward_backward([MicroBatch(images, torch.tensor([0, 1, 2, 0]))], 4 * world.world_size)
        strategy.optimizer_step(1.0, want_grad_norm=False)
    [mean] = [b for n, b in strategy.model.named_buffers() if n.endswith("running_mean")]
    in_memory = (mean.dtype, mean.tolist())
    weights = strategy.weights()
    return in_memory, None if weights is None else (weights["1.running_mean"].dtype, weights["1.running_mean"].tolist())


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", STRATEGIES)
def test_running_statistics_are_fp32_in_memory_and_on_disk(pool, name, precision):
    results = pool.run(2, statistics_after_five_steps, name, precision)
    (first_type, first), (second_type, second) = (in_memory for in_memory, _ in results)
    saved_type, saved = results[0][1]
    assert {first_type, second_type, saved_type} == {torch.float32}
    assert first != second, "each rank saw its own samples"
    assert saved == pytest.approx([(a + b) / 2 for a, b in zip(first, second, strict=True)], rel=1e-6)
    # The convolution's 16-bit results are rounded by up to 2^-9 of values of about 1; their means are not.
    exact = pool.run(2, statistics_after_five_steps, name, "fp32")[0][1][1]
    assert saved == pytest.approx(exact, abs=2**-9)
    assert torch.tensor(first).bfloat16().tolist() != first


def statistics_of_a_discarded_step(world, name):
    """Before a step that meets NaN, and after it was discarded."""
    strategy = built(world, name, normalised_images())
    targets = torch.tensor([0, 1, 2, 0])
    strategy.forward_backward([MicroBatch(torch.randn(4, 3, 6, 6), targets)], 4 * world.world_size)
    strategy.optimizer_step(1.0, want_grad_norm=False)
    before = [buffer.clone() for buffer in strategy.model.buffers()]
    strategy.remember()
    strategy.forward_backward([MicroBatch(torch.full((4, 3, 6, 6), torch.nan), targets)], 4 * world.world_size)
    strategy.discard()
    return before, list(strategy.model.buffers())


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_discarded_step_leaves_no_trace_in_the_statistics(pool, name):
    for before, after in pool.run(2, statistics_of_a_discarded_step, name):
        assert len(before) == 3
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(before, after, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "precision"),
    # DeepSpeed refuses fp16 on a CPU.
    [*((s, p) for s in STRATEGIES for p in PRECISIONS), ("deepspeed", "fp32"), ("deepspeed", "bf16")],
)
def test_resnet18_trains_under_every_strategy_and_precision_on_a_cpu(pool, tmp_path, strategy, precision):
    command = [f"strategy={strategy}", f"precision={precision}", "model=resnet18", "data=synthetic_images"]
    command += ["data.image_shape=[3,8,8]", "data.num_samples=16", "data.num_test_samples=5"]
    result = run_in(pool, 2, tmp_path / "run", *command, "trainer.micro_batch_size=4", "trainer.max_steps=2")
    assert all(0 < loss < 10 for loss in result.series("loss"))
    assert result.weights["layer4.1.bn2.running_var"].dtype == torch.float32
    assert result.evaluations[-1]["samples"] == 5
