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


#: 12 samples a step, of 25: two whole steps, and one of a single sample left out by max_steps.
IMAGES = [
    *["model=resnet18", "data=synthetic_images", "data.image_shape=[3,8,8]", "data.num_samples=25"],
    *["data.num_test_samples=6", "trainer.global_batch_size=12", "trainer.micro_batch_size=null"],
    *["trainer.accumulate=1", "trainer.max_steps=2", "optimizer=sgd", "optimizer.lr=0.001"],
]


@pytest.mark.parametrize(
    "words",
    [
        "strategy=ddp",
        "strategy=ddp trainer.activation_checkpointing=full",
        "strategy=fsdp",
        "strategy=fsdp trainer.activation_checkpointing=selective",
        "strategy=fsdp1 strategy.min_unit_parameters=100000",
    ],
)
@pytest.mark.slow
def test_resnet18_with_synchronised_statistics_learns_what_one_process_does(pool, tmp_path, words):
    reference = run_in(pool, 1, tmp_path / "single", *IMAGES, "strategy=single")
    alone = run_in(pool, 2, tmp_path / "alone", *IMAGES, words.split()[0])
    result = run_in(pool, 2, tmp_path / "run", *IMAGES, *words.split(), "strategy.sync_batchnorm=true")
    assert result.series("loss") == pytest.approx(reference.series("loss"), rel=1e-5)
    # The last BatchNorms are over 12 numbers a channel, and carry the rounding of convolutions of 6 samples instead of
    # 12 on: of the norm (not of the loss) it made 1.2e-4 in the second step at lr 0.01.
    assert result.series("grad_norm")[0] == pytest.approx(reference.series("grad_norm")[0], rel=1e-4)
    assert list(result.weights) == list(reference.weights)
    for name, weight in reference.weights.items():
        torch.testing.assert_close(result.weights[name], weight, rtol=0, atol=1e-4, msg=name)
    assert result.weights["bn1.num_batches_tracked"] == 2, "recomputing counts no batch twice"
    # By each rank's own six samples it learns something else.
    assert alone.series("loss")[0] != pytest.approx(reference.series("loss")[0], rel=1e-3)


def synchronised_step(world, name):
    """Two steps on this rank's part of batches of eight; the loss summed over ranks, and the weights on rank 0."""
    arguments = {} if name == "single" else {"sync_batchnorm": True}
    strategy = built(world, name, normalised_images(), **arguments)
    generator = torch.Generator().manual_seed(0)
    for _ in range(2):
        images = torch.randn(8, 3, 6, 6, generator=generator)
        targets = torch.randint(0, 3, (8,), generator=generator)
        size, place = 8 // world.world_size, world.world_rank
        own = slice(size * place, size * (place + 1))
        loss = strategy.forward_backward([MicroBatch(images[own], targets[own])], 8)
        strategy.optimizer_step(1.0, want_grad_norm=False)
    return {"loss": float(strategy.sum(loss)), "weights": strategy.weights()}


@pytest.mark.parametrize("name", STRATEGIES)
def test_batch_norm_is_synchronised_before_it_is_wrapped(pool, name):  # pytorch#43685
    expected = pool.run(1, synchronised_step, "single")[0]
    for found in pool.run(2, synchronised_step, name):
        assert found["loss"] == pytest.approx(expected["loss"], rel=1e-5)
        for key, tensor in expected["weights"].items():
            if found["weights"] is not None:
                torch.testing.assert_close(found["weights"][key], tensor, rtol=1e-5, atol=1e-6, msg=key)
