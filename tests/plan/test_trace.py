"""One step on fake tensors, against the same step of real ranks, and against arithmetic."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.composing import composed
from tests.workers import Pool

GPT = ["model=gpt_tiny", "trainer.micro_batch_size=2"]
#: More logits than all else, and a head that is a unit of its own for FSDP1.
WORDS = ["model=gpt_tiny", "data=synthetic_tokens", "data.vocab_size=16000", "data.sequence_length=32"]
WORDS += ["model.layers=2", "trainer.micro_batch_size=8"]
#: Bars of the project: the median error, the largest. Of a trace they are met with room to spare.
BAR = 0.03


def measured_peak(world: Any, config: dict[str, Any]) -> int | None:
    """In a rank: the peak of a second step, on the shapes of the data."""
    from src.meter import StepPeak

    experiment = parts(world, config)
    experiment.strategy.build(experiment.make_model(), experiment.optimizer, experiment.spec)
    experiment.strategy.train_mode(True)
    peak = StepPeak(experiment.strategy, world.device)
    for _ in range(2):
        with peak.step():
            take_step(experiment)
    experiment.strategy.close()
    return peak.bytes


def take_step(experiment: Any) -> None:
    spec = experiment.spec
    microbatches = [experiment.data.example(spec.micro_batch_size) for _ in range(spec.accumulate)]
    valid_targets = microbatches[0].targets.numel() * spec.accumulate * experiment.strategy.data.size
    experiment.strategy.forward_backward(microbatches, valid_targets)
    experiment.strategy.optimizer_step(1.0, False)


def parts(world: Any, config: dict[str, Any]) -> Any:
    from src.control import Control
    from src.run import build
    from src.tracking.reporter import SilentReporter

    return build(config, Path("nowhere"), {}, world, SilentReporter(), Control(world, 600.0, None, None))


def traced_peaks(config: dict[str, Any], num_ranks: int) -> dict[int, Any]:
    """In a process without a group: what is expected of each rank that differs."""
    from src.plan.trace import trace
    from src.world import World

    experiment = parts(World(0, num_ranks, 0, num_ranks, is_imagined=True), config)
    spec, data = experiment.spec, experiment.data
    ranks = type(experiment.strategy).different_ranks(num_ranks, experiment.setting.arguments)
    return {
        rank: trace(
            experiment.strategy,
            experiment.make_model,
            experiment.optimizer,
            spec,
            lambda: data.example(spec.micro_batch_size),
            rank,
        )
        for rank in ranks
    }


def experiment_of(num_ranks: int, *words: str) -> dict[str, Any]:
    config, problems = composed(f"launch.nproc={num_ranks}", "launch.device=cpu", *words)
    assert not problems, problems
    return config


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("num_ranks", "words"),
    [
        (1, ["strategy=single", *GPT]),
        (2, ["strategy=ddp"]),
        (2, ["strategy=ddp", "model=mlp", "precision=bf16", "trainer.accumulate=3"]),
        (2, ["strategy=fsdp", *GPT]),
        (2, ["strategy=fsdp", "sharding=zero2", *GPT, "trainer.activation_checkpointing=full"]),
        (2, ["strategy=ddp", *GPT, "trainer.activation_checkpointing=selective"]),
        (2, ["strategy=fsdp1", *GPT]),
        (2, ["strategy=fsdp1", "sharding=zero2", *WORDS]),
        (2, ["strategy=tp", *GPT, "precision=bf16"]),
        (2, ["strategy=tp", *WORDS]),
        (2, ["strategy=pp", *GPT, "trainer.accumulate=2"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else str(value),
)
def test_a_trace_expects_what_real_ranks_need(pool: Pool, num_ranks: int, words: list[str]) -> None:
    config = experiment_of(num_ranks, *words)
    measured = pool.run(num_ranks, measured_peak, config)
    for rank, traced in traced_peaks(config, num_ranks).items():
        assert traced.peak == pytest.approx(measured[rank], rel=BAR)


def test_a_traced_rank_leaves_no_process_group_and_no_patch():
    convert, new_mesh = torch.nn.Module._apply, dist.device_mesh.DeviceMesh.__init__
    traced_peaks(experiment_of(4, "strategy=fsdp", "sharding=hybrid", "sharding.shard_size=2", *GPT), 4)
    assert not dist.is_initialized()
    assert torch.nn.Module._apply is convert
    assert dist.device_mesh.DeviceMesh.__init__ is new_mesh


def test_states_and_traffic_of_a_sharded_step_are_those_of_the_arithmetic():
    (traced,) = traced_peaks(experiment_of(4, "strategy=fsdp", *GPT), 4).values()
    # 874,752 parameters of 4 bytes over 4 ranks; all dims are multiples of 4, so nothing is padded.
    whole = 4 * 874_752
    assert (traced.parameters, traced.gradients) == (whole // 4, whole // 4)
    # Two moments, and a step count of 4 bytes for each of the 68 parameters.
    assert traced.optimizer_states == pytest.approx(whole // 2, abs=4 * 100)
    # Gathered in forward and again in backward, all but the root's own once; gradients leave once.
    assert traced.traffic["reduce_scatter"] == whole
    assert whole < traced.traffic["all_gather"] <= 2 * whole


def test_the_traffic_of_copies_is_the_gradients_once():
    (traced,) = traced_peaks(experiment_of(8, "strategy=ddp", *GPT), 8).values()
    assert traced.traffic == {"all_reduce": 4 * 874_752}


def test_stages_of_a_pipeline_are_traced_each():
    found = traced_peaks(experiment_of(4, "strategy=pp", "strategy.pp=4", *GPT, "trainer.accumulate=4"), 4)
    assert list(found) == [0, 1, 2, 3]
    # A stage between others sends activations on and gradients back, for each of 4 micro-batches:
    # 2 samples x 128 positions x 128 wide x 4 bytes.
    assert found[1].traffic["send"] == 2 * 4 * (2 * 128 * 128 * 4)
    assert found[0].traffic["send"] == found[3].traffic["send"] == found[1].traffic["send"] // 2


def test_the_forecast_of_layers_to_compile_is_of_the_uncompiled_and_says_so() -> None:
    from src.plan.forecast import forecast
    from src.world import World

    def made(*words: str) -> Any:
        experiment = parts(World(0, 2, 0, 2, is_imagined=True), experiment_of(2, *GPT, *words))
        chosen = (experiment.strategy, experiment.make_model, experiment.optimizer, experiment.spec)
        return forecast(*chosen, experiment.setting, experiment.data)

    plain, compiled = made(), made("trainer.compile=true")
    assert compiled.peaks == plain.peaks
    assert (plain.reason, compiled.reason) == (None, "of the layers as they are before trainer.compile")
