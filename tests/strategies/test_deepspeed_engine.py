"""The DeepSpeed engine: what it does to its process, what a broken installation says, and the fp16 path of GPUs."""

import os
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.command import QUICK, REPOSITORY, train
from tests.strategies.building import linear_model, microbatches
from tests.strategies.test_deepspeed import assert_unrounded, built


def moves(world, sharding):
    """How often building the engine moved the model as a whole."""
    model, calls = linear_model(), []
    model.to = lambda *device: calls.append(device)
    built(world, model, sharding).close()
    return len(calls)


def test_stage_3_shards_the_model_before_moving_it_to_the_device(pool):
    assert pool.run(2, moves, "zero3") == [0, 0]
    assert pool.run(2, moves, "zero2") == [1, 1]  # which keeps it whole: the count does see moves


def traces(world, sharding):
    """What an engine changes in its process: (before, while it lives, after close)."""
    import subprocess

    def state():
        return nn.functional.linear, os.environ.get("LOCAL_RANK"), os.environ.get("LOCAL_SIZE")

    def refuse(*command, **options):
        raise AssertionError(f"a step started {command}")

    subprocess.check_output, real = refuse, subprocess.check_output  # numactl, compilers
    kept = {name: os.environ.pop(name, None) for name in ("LOCAL_RANK", "LOCAL_SIZE")}
    before = state()
    strategy = built(world, linear_model(), sharding, precision="bf16")
    strategy.forward_backward(microbatches(world.world_rank, 1), 8)
    strategy.optimizer_step(1.0, want_grad_norm=True)
    strategy.close()
    same = state() == before
    os.environ.update({name: value for name, value in kept.items() if value is not None})
    subprocess.check_output = real
    return same


@pytest.mark.parametrize("sharding", ["zero2", "zero3"])
def test_an_engine_runs_no_other_program_and_leaves_its_process_as_it_was(pool, sharding):
    assert pool.run(2, traces, sharding) == [True, True]


def overflowing_steps(world, sharding, model_name):
    """The fp16 path that GPUs take, on CPUs with DeepSpeed's veto lifted. Step 2's inputs are huge on rank 1 alone.

    Returns for each step (skipped, loss scale, norm), and the weights' change in step 2.
    """
    from src.strategies.deepspeed_engine import load_deepspeed
    from tests.crafted import NormalisedModel

    load_deepspeed(world)
    from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

    CPU_Accelerator.is_fp16_supported, veto = lambda self: True, CPU_Accelerator.is_fp16_supported
    try:
        torch.manual_seed(0)
        model = linear_model() if model_name == "linear" else NormalisedModel()
        strategy = built(world, model, sharding, precision="fp16", initial_scale_power=10, config=NO_HYSTERESIS)
    finally:
        CPU_Accelerator.is_fp16_supported = veto
    strategy.train_mode(True)
    steps, weights = [], []
    for step in (1, 2, 3):
        batches = microbatches(world.world_rank, 2, scale=1e6 if step == 2 and world.world_rank == 1 else 1.0)
        strategy.forward_backward(batches, 16)
        report = strategy.optimizer_step(1.0, want_grad_norm=True)
        steps.append((report.skipped, strategy.extra_metrics()["loss_scale"], float(report.grad_norm)))
        weights.append(strategy.weights())
    strategy.close()
    return steps, weights


#: DeepSpeed waits for a second overflow before it lowers the scale, unless told otherwise.
NO_HYSTERESIS = {"fp16": {"hysteresis": 1}}


def norm_by_hand():
    """The gradient norm of the first step, in one process and fp32."""
    model = linear_model()
    batches = [batch for rank in (0, 1) for batch in microbatches(rank, 2)]
    inputs, targets = torch.cat([b.inputs for b in batches]), torch.cat([b.targets for b in batches])
    nn.functional.cross_entropy(model(inputs), targets).backward()
    return float(nn.utils.get_total_norm([p.grad for p in model.parameters()]))


@pytest.mark.parametrize("sharding", ["none", "zero1", "zero2", "zero3"])
def test_an_fp16_overflow_on_one_rank_skips_the_step_on_all(pool, sharding):
    (steps, weights), (other_steps, _) = pool.run(2, overflowing_steps, sharding, "linear")
    assert [(skipped, scale) for skipped, scale, _ in steps] == [(False, 1024), (True, 512), (False, 512)]
    assert [s[:2] for s in other_steps] == [s[:2] for s in steps]
    # Unscaled, and before clipping to 0.5. fp16 has 11 bits: 5e-4.
    assert steps[0][2] == pytest.approx(norm_by_hand(), rel=5e-3)
    assert all(torch.equal(weights[1][name], weights[0][name]) for name in weights[0])
    assert not torch.equal(weights[2]["0.weight"], weights[1]["0.weight"])
    assert_unrounded(weights[2]["0.weight"], torch.float16, "0.weight")


@pytest.mark.parametrize("sharding", ["none", "zero2", "zero3"])
def test_batch_norm_trains_in_fp16_and_is_saved_in_fp32(pool, sharding):
    (steps, weights), _ = pool.run(2, overflowing_steps, sharding, "normalised")
    assert not steps[0][0]
    assert {weight.dtype for weight in weights[2].values()} == {torch.float32, torch.int64}
    assert all(torch.isfinite(weight).all() for weight in weights[0].values())


def broken_deepspeed(folder: Path) -> str:
    """A PYTHONPATH on which importing deepspeed fails as it does where the CUDA toolkit is missing."""
    package = folder / "path" / "deepspeed"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise OSError('CUDA_HOME does not exist, unable to compile CUDA op(s)')\n")
    return f"{package.parent}:{REPOSITORY}"


def test_a_broken_deepspeed_breaks_no_other_strategy(tmp_path):
    outcome = train(tmp_path, *QUICK, "strategy=ddp", PYTHONPATH=broken_deepspeed(tmp_path))
    assert outcome.code == 0, outcome.text


def test_a_broken_deepspeed_is_named_in_one_line_with_what_is_missing(tmp_path):
    outcome = train(tmp_path, *QUICK, "strategy=deepspeed", PYTHONPATH=broken_deepspeed(tmp_path))
    assert outcome.code == 1
    [last] = [line for line in outcome.stderr.splitlines() if line.startswith("shardlab:")]
    assert "CUDA_HOME does not exist" in last
    assert "strategy=fsdp" in last
