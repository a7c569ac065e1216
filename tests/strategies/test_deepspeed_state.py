"""The state of a DeepSpeed engine: its partitions, its two sets of weights, its loss scaler."""

from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from tests.strategies.resuming import KINDS, OPTIMIZERS, Kind, advance, load, microbatches, running, whole
from tests.strategies.test_state import (
    LAST,
    begin_elsewhere,
    carry,
    discard_a_step,
    go_on,
    of_one_process,
    quick,
)
from tests.workers import Pool

pytestmark = pytest.mark.slow  # together a minute; tests/test_resume.py goes on with engines as well

__all__ = ["of_one_process"]  # a fixture

RANKS = {kind: 2 for kind in KINDS if "deepspeed" in kind}


@pytest.mark.parametrize(("kind", "ranks"), quick(RANKS, "deepspeed zero2", "deepspeed zero3 sharded"))
def test_a_round_trip_goes_on_to_the_bit(pool: Pool, of_one_process: Any, kind: str, ranks: int) -> None:
    for shapes_and_steps in pool.run(ranks, go_on, kind, {}):
        assert shapes_and_steps == of_one_process["gpt"], (
            "names, shapes and counts are those of one process, on every rank"
        )


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["deepspeed zero0", "deepspeed zero1", "deepspeed zero2 offload", "deepspeed zero3"])
def test_three_ranks_that_divide_no_size_go_on_to_the_bit(pool: Pool, kind: str) -> None:
    pool.run(3, go_on, kind, {"model": "convolutional", "optimizer": "decay groups"})


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", [name for name in OPTIMIZERS if name != "adamw"])
@pytest.mark.parametrize("kind", ["deepspeed zero0", "deepspeed zero2", "deepspeed zero3 sharded"])
def test_every_optimizer_goes_on_to_the_bit(pool: Pool, kind: str, optimizer: str) -> None:
    pool.run(2, go_on, kind, {"optimizer": optimizer})


@pytest.mark.parametrize(
    "kind",
    [
        "deepspeed zero2",
        "deepspeed zero3 sharded",
        *(pytest.param(f"deepspeed {kind}", marks=pytest.mark.slow) for kind in ("zero0", "zero1", "zero3 offload")),
    ],
)
def test_bf16_goes_on_to_the_bit(pool: Pool, kind: str) -> None:
    # Where forward's own weights were not refreshed, the first loss would be off by 5e-2.
    (shapes, _), _ = pool.run(
        2, go_on, kind, {"model": "convolutional", "optimizer": "decay groups", "precision": "bf16"}
    )
    assert shapes["model.body.1.num_batches_tracked"] == (1,)
    assert "model.frozen.weight" in shapes


@pytest.mark.parametrize(("kind", "ranks"), quick(RANKS, "deepspeed zero2"))
def test_any_stage_goes_on_from_one_process_and_back(pool: Pool, kind: str, ranks: int) -> None:
    pool.run(ranks, carry, "single", kind, {"optimizer": "decay groups"})
    pool.run(ranks, carry, kind, "single", {"optimizer": "decay groups"})


@pytest.mark.parametrize(
    ("source", "target"),
    [
        ("deepspeed zero3 sharded", "tp"),
        ("fsdp zero3", "deepspeed zero2"),
        pytest.param("deepspeed zero1", "pp", marks=pytest.mark.slow),
        pytest.param("deepspeed zero3 offload", "deepspeed zero1", marks=pytest.mark.slow),
        pytest.param("fsdp1 zero2", "deepspeed zero3", marks=pytest.mark.slow),
    ],
)
def test_stages_and_other_strategies_go_on_from_each_other(pool: Pool, source: str, target: str) -> None:
    pool.run(2, carry, source, target, {})


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["adamw", "momentum"])
@pytest.mark.parametrize("kind", ["deepspeed zero0", "deepspeed zero2", "deepspeed zero3"])
def test_a_run_that_never_stepped_begins_elsewhere(pool: Pool, kind: str, optimizer: str) -> None:
    pool.run(2, begin_elsewhere, "single", kind, optimizer)
    pool.run(2, begin_elsewhere, kind, "single", optimizer)


@pytest.mark.parametrize(("kind", "ranks"), quick(RANKS, "deepspeed zero2", "deepspeed zero3 sharded"))
def test_a_discarded_step_leaves_no_trace(pool: Pool, kind: str, ranks: int) -> None:
    pool.run(ranks, discard_a_step, kind, {})


def shares(world: Any, kind: str) -> float:
    """This rank's part of what the state holds."""
    with running(world, kind) as strategy:
        advance(strategy, 0)
        tensors = strategy.state().tensors
        assert all(isinstance(tensor, DTensor) for tensor in tensors.values())
        return sum(t.to_local().numel() for t in tensors.values()) / sum(t.numel() for t in tensors.values())


def test_no_rank_holds_the_whole_model(pool: Pool) -> None:
    assert pool.run(2, shares, "deepspeed zero3 sharded") == pytest.approx([0.5, 0.5], abs=0.01)


def overflow_and_resume(world: Any, level: str) -> list[Any]:
    """The fp16 path that GPUs take, on CPUs with DeepSpeed's veto lifted. Returns the scaler's state by step."""
    from src.strategies.deepspeed_engine import load_deepspeed

    load_deepspeed(world)
    from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

    arguments = {"initial_scale_power": 10, "loss_scale_window": 4, "config": {"fp16": {"hysteresis": 2}}}
    KINDS["deepspeed fp16"] = Kind(KINDS["deepspeed zero2"].make, level, arguments)
    named = {"model": "perceptron", "precision": "fp16"}
    CPU_Accelerator.is_fp16_supported, veto = lambda self: True, CPU_Accelerator.is_fp16_supported
    try:
        with (
            running(world, "deepspeed fp16", **named) as stopped,
            running(world, "deepspeed fp16", seed=1, **named) as resumed,
        ):
            found = []
            for step, scale in enumerate((1.0, 1e6, 1.0)):
                stopped.forward_backward(*microbatches(stopped, step, scale))
                stopped.optimizer_step(1.0, want_grad_norm=False)
                found.append(stopped.state().plain["scaler"])
            state = stopped.state()
            load(resumed, whole(state), state.plain)
            assert resumed.state().plain["scaler"] == found[-1]
            for step in (*LAST, 6, 7):
                assert advance(resumed, step) == advance(stopped, step)
                assert resumed.state().plain == stopped.state().plain
                found.append(resumed.state().plain["scaler"])
            return found
    finally:
        CPU_Accelerator.is_fp16_supported = veto


@pytest.mark.parametrize("level", ["zero2", pytest.param("zero3", marks=pytest.mark.slow)])
def test_the_loss_scale_goes_on(pool: Pool, level: str) -> None:
    found, _ = pool.run(2, overflow_and_resume, level)
    # The first overflow costs a life of two, no halving. Then a window of four steps without another, after which the
    # next step doubles the scale and gives the life back.
    assert [(s["scale"], s["growth_tracker"], s["hysteresis"]) for s in found] == [
        (1024, 1, 2),
        (1024, 0, 1),
        *((1024, count, 1) for count in (1, 2, 3, 4)),
        (2048, 1, 2),
        (2048, 2, 2),
    ]


def test_torchs_scaler_never_waits_beyond_its_interval() -> None:
    from src.strategies.state import put_back_scaler, scaler_state

    scaler = torch.amp.GradScaler("cpu", growth_interval=3)
    # DeepSpeed counts up to its window before it grows; torch grows when the count gets there.
    put_back_scaler({"scale": 64.0, "growth_tracker": 3}, scaler)
    assert scaler_state(scaler) == {"scale": 64.0, "growth_tracker": 2}
