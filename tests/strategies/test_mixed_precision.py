"""fp16 with a scaler, bf16 without one."""

import pytest
import torch

from src.batch import BatchPlan
from tests.composing import run_in
from tests.strategies.building import built, linear_model, microbatches

IMAGES = ["model=mlp", "model.hidden=[16]", "trainer.micro_batch_size=null", "trainer.global_batch_size=8"]


def has_scaler(world, name, precision):
    return built(world, name, linear_model(), precision).scaler is not None


@pytest.mark.parametrize("name", ["ddp", "fsdp", "fsdp1"])
def test_only_fp16_has_a_scaler(pool, name):
    assert [pool.run(1, has_scaler, name, precision)[0] for precision in ("fp32", "bf16", "fp16")] == [
        False,
        False,
        True,
    ]


def overflow_on_rank_one(world, name):
    """(skipped, loss scale) of three steps; in the second, rank 1's inputs exceed fp16. And the final weights."""
    strategy = built(world, name, linear_model(), "fp16")
    reports = []
    for step in range(3):
        scale = 1e6 if step == 1 and world.world_rank == 1 else 1.0
        strategy.forward_backward(microbatches(world.world_rank, 2, scale), 16)
        report = strategy.optimizer_step(1.0, want_grad_norm=True)
        reports.append((report.skipped, strategy.extra_metrics()["loss_scale"]))
    local = [p.detach() for p in strategy.model.parameters()]
    return reports, all(bool(torch.isfinite(getattr(p, "_local_tensor", p)).all()) for p in local)


@pytest.mark.parametrize("name", ["ddp", "fsdp", "fsdp1"])
def test_an_overflow_on_one_rank_is_skipped_by_all(pool, name):
    (reports_0, finite_0), (reports_1, finite_1) = pool.run(2, overflow_on_rank_one, name)
    # torch's scaler starts at 2^16 and halves on overflow
    assert reports_0 == reports_1 == [(False, 65536.0), (True, 32768.0), (False, 32768.0)]
    assert finite_0
    assert finite_1


@pytest.mark.parametrize(("ranks", "strategy"), [(1, "single"), (2, "ddp"), (2, "fsdp")])
def test_a_skipped_step_does_not_advance_the_schedule(pool, tmp_path, ranks, strategy):
    first = [int(i) for i in next(BatchPlan(24, 8, seed=0).epoch(0)).sample_ids]
    result = run_in(
        pool, ranks, tmp_path / "run", f"strategy={strategy}", "precision=fp16", *IMAGES,
        "data._target_=tests.crafted.OverflowingImages", f"+data.huge={first}", "schedule=linear",
        "schedule.warmup_steps=4", "optimizer.lr=0.4", "trainer.max_steps=3",
    )  # fmt: skip
    # Only step 1 overflows; updates 0 and 1 warm up by a quarter of lr each.
    assert result.series("skipped_steps") == [1, 1, 1]
    assert result.series("lr") == pytest.approx([0.1, 0.1, 0.2])


@pytest.mark.parametrize(("ranks", "strategy"), [(1, "single"), (2, "ddp"), (2, "fsdp"), (2, "fsdp1")])
def test_clipping_sees_unscaled_gradients(pool, tmp_path, ranks, strategy):
    # Clipped while scaled by 2^16, every norm would be 65536 times what fp32's is.
    common = [*IMAGES, "trainer.max_steps=3", "trainer.max_grad_norm=1.0", "trainer.accumulate=2"]
    reference = run_in(pool, 1, tmp_path / "fp32", "strategy=single", *common)
    result = run_in(pool, ranks, tmp_path / "fp16", f"strategy={strategy}", "precision=fp16", *common)
    assert result.series("grad_norm") == pytest.approx(reference.series("grad_norm"), rel=0.02)
    assert result.series("loss") == pytest.approx(reference.series("loss"), rel=0.02)
