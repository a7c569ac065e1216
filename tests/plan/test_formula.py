"""The formulas' peaks against what the second of two real steps was metered to take, on one and two gloo ranks."""

from functools import partial
from statistics import median
from typing import Any

import pytest
import torch
from torch import nn

from src.checks.keys import locate
from src.data.base import Data
from src.data.synthetic import SyntheticImages, SyntheticTokens
from src.meter import metered
from src.models.cnn import CNN
from src.models.gpt import GPT
from src.models.mlp import MLP
from src.parallel.recompute import recompute_activations
from src.plan.formula import example, fullest, plan
from src.plan.trace import trace
from src.precision import Precision
from src.sharding import Sharding
from src.strategies.base import BuildSpec, Setting, Strategy
from src.world import World

STRATEGIES = {
    "single": "single.Single",
    "ddp": "ddp.DDP",
    "fsdp": "fsdp.FSDP2",
    "fsdp1": "fsdp1.FSDP1",
    "deepspeed": "deepspeed.DeepSpeed",
    "tp": "tp.TensorParallel",
    "pp": "pp.PipelineParallel",
}
IMAGES: Data = SyntheticImages([1, 8, 8], 10, 8, 8)
#: Of each, what makes it and what it reads; "wide" has more weights than activations, "words" more logits than either.
MODELS: dict[str, tuple[Any, Data]] = {
    "mlp": (partial(MLP, [1, 8, 8], [256, 256], 10), IMAGES),
    "cnn": (partial(CNN, [1, 8, 8], 10), IMAGES),
    "gpt": (partial(GPT, 256, 64, 3, 128, 4), SyntheticTokens(256, 64, 8, 8)),
    "wide": (partial(GPT, 256, 16, 3, 256, 4), SyntheticTokens(256, 16, 8, 8)),
    "words": (partial(GPT, 4096, 32, 2, 128, 4), SyntheticTokens(4096, 32, 8, 8)),
    # Whose table and head are units of FSDP1's each, and which has layers for eight stages.
    "many words": (partial(GPT, 16000, 32, 2, 128, 8), SyntheticTokens(16000, 32, 8, 8)),
    "deep words": (partial(GPT, 8000, 32, 8, 128, 8), SyntheticTokens(8000, 32, 8, 8)),
}

#: ranks, strategy, sharding, model, micro-batch, and what else differs from fp32 without accumulation.
Case = tuple[int, str, str, str, int, dict[str, Any]]
BF16: dict[str, Any] = {"precision": "bf16"}
CASES: list[Case] = [
    (1, "single", "none", "gpt", 4, {}),
    (1, "single", "none", "words", 4, BF16),
    (1, "single", "none", "gpt", 4, {"mode": "full", "accumulate": 2}),
    (1, "single", "none", "gpt", 4, {"mode": "selective"}),
    (2, "ddp", "none", "gpt", 4, {}),
    (2, "ddp", "none", "cnn", 1, {"accumulate": 2}),
    (2, "ddp", "none", "mlp", 8, {"arguments": {"gradient_as_bucket_view": False}}),
    (2, "fsdp", "zero3", "wide", 1, {}),
    (2, "fsdp", "zero3", "gpt", 4, BF16),
    (2, "fsdp", "zero3", "gpt", 4, {"mode": "selective"}),
    (2, "fsdp", "zero2", "wide", 1, {"accumulate": 2}),
    (2, "fsdp", "zero3", "wide", 1, {"accumulate": 2, "arguments": {"sync_each_microbatch": False}}),
    (2, "fsdp1", "zero3", "wide", 1, {}),
    (2, "fsdp1", "zero2", "gpt", 4, BF16),
    (2, "tp", "none", "gpt", 4, {"arguments": {"tp": 2}}),
    (2, "tp", "none", "wide", 1, {**BF16, "arguments": {"tp": 2}}),
    (2, "pp", "none", "gpt", 2, {"accumulate": 4, "arguments": {"pp": 2}}),
    (2, "pp", "none", "wide", 1, {"accumulate": 4, "arguments": {"pp": 2, "schedule": "gpipe"}}),
]
DEEPSPEED: list[Case] = [
    (2, "deepspeed", "none", "wide", 1, {}),
    (2, "deepspeed", "zero1", "mlp", 8, {}),
    (2, "deepspeed", "zero1", "wide", 1, BF16),
    (2, "deepspeed", "zero2", "gpt", 4, {}),
    (2, "deepspeed", "zero2", "gpt", 4, {"accumulate": 2, "mode": "full"}),
    (2, "deepspeed", "zero2", "cnn", 8, {}),
    (2, "deepspeed", "zero2", "wide", 1, {"arguments": {"reduce_bucket_size": 1e6}}),
    (2, "deepspeed", "zero3", "wide", 1, {}),
    (2, "deepspeed", "zero3", "gpt", 4, BF16),
    (2, "deepspeed", "zero3", "words", 8, {}),
    (2, "deepspeed", "zero3", "cnn", 8, {}),
    (1, "deepspeed", "zero3", "gpt", 4, {}),
]
#: Of worlds that a trace can imagine, where the head outweighs the layers.
IMAGINED: list[Case] = [
    (2, "fsdp", "zero3", "words", 8, {}),
    (2, "fsdp", "zero3", "many words", 1, BF16),
    (2, "fsdp", "zero3", "many words", 1, {"accumulate": 2}),
    (2, "fsdp", "zero2", "words", 8, BF16),
    (8, "fsdp", "zero3", "many words", 8, {}),
    (2, "fsdp1", "zero3", "many words", 8, {}),
    (2, "fsdp1", "zero3", "many words", 1, {}),
    (2, "fsdp1", "zero2", "many words", 8, BF16),
    (8, "tp", "none", "many words", 8, {"arguments": {"tp": 8}}),
    (8, "tp", "none", "many words", 1, {**BF16, "arguments": {"tp": 8}}),
    (8, "tp", "none", "many words", 8, {"arguments": {"tp": 8, "sequence_parallel": True}}),
    (2, "pp", "none", "deep words", 2, {"accumulate": 4, "arguments": {"pp": 2, "schedule": "gpipe"}}),
    (4, "pp", "none", "deep words", 2, {"accumulate": 8, "arguments": {"pp": 4, "schedule": "interleaved_1f1b"}}),
]


def parts(case: Case) -> tuple[type[Strategy], Any, Data, Setting]:
    ranks, name, level, model, micro_batch_size, more = case
    strategy: type[Strategy] = locate(f"src.strategies.{STRATEGIES[name]}")
    arguments, mode = more.get("arguments", {}), more.get("mode", "none")
    make, data = MODELS[model]
    setting = Setting(
        strategy_name=name,
        arguments=arguments,
        world_size=ranks,
        data_parallel_size=strategy.data_parallel_size(ranks, arguments),
        device_type="cpu",
        precision=more.get("precision", "fp32"),
        sharding=Sharding(level),
        micro_batch_size=micro_batch_size,
        accumulate=more.get("accumulate", 1),
        max_grad_norm=None,
        activation_checkpointing=mode,
    )
    return strategy, lambda: made(make, mode), data, setting


def made(make: Any, mode: str) -> nn.Module:
    torch.manual_seed(0)
    return recompute_activations(make(), mode)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, fused=True)


def peak_of_a_step(world: World, case: Case) -> float:
    """The median of three, after a first that makes the states: now and then a thread of the backend holds a gradient a
    moment longer."""
    kind, make_model, data, setting = parts(case)
    strategy = kind(**setting.arguments)
    sizes = (setting.micro_batch_size, setting.accumulate)
    strategy.build(make_model(), adamw, BuildSpec(world, Precision(setting.precision), setting.sharding, *sizes))
    strategy.train_mode(True)
    meter, peaks = None, []
    for _ in range(4):
        with metered(strategy, meter=meter) as meter:
            microbatches = [example(data, setting.micro_batch_size) for _ in range(setting.accumulate)]
            targets = microbatches[0].targets.numel() * setting.accumulate * strategy.data.size
            strategy.forward_backward(microbatches, targets)
            strategy.optimizer_step(1.0, want_grad_norm=False)
            del microbatches
        peaks.append(meter.peak)
    strategy.close()
    return median(peaks[1:])


def error(pool: Any, case: Case) -> float:
    """Of the fullest rank, relative to what was measured."""
    measured: float = max(pool.run(case[0], peak_of_a_step, case))
    kind, make_model, data, setting = parts(case)
    predicted = fullest(plan(kind, make_model, adamw, data, setting)).footprint.peak.bytes
    print(f"{case}: measured {measured:,}, predicted {predicted:,}, {predicted / measured - 1:+.2%}")
    return abs(predicted / measured - 1)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_peaks_are_within_eight_per_cent_and_half_of_them_within_three(pool: Any) -> None:
    errors = [error(pool, case) for case in CASES]
    assert max(errors) <= 0.08
    assert median(errors) <= 0.03


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_deepspeed_which_nothing_can_trace_is_within_twelve(pool: Any) -> None:
    errors = [error(pool, case) for case in DEEPSPEED]
    assert max(errors) <= 0.12
    assert median(errors) <= 0.03


@pytest.mark.parametrize("case", IMAGINED, ids=str)
def test_a_large_head_is_counted_once_and_only_while_it_is_there(case: Case) -> None:
    kind, make_model, data, setting = parts(case)
    spec = BuildSpec(
        World(0, case[0], 0, case[0], is_imagined=True),
        Precision(setting.precision),
        setting.sharding,
        setting.micro_batch_size,
        setting.accumulate,
    )
    for planned in plan(kind, make_model, adamw, data, setting):
        strategy = kind(**setting.arguments)
        traced = trace(
            strategy, make_model, adamw, spec, lambda: example(data, setting.micro_batch_size), planned.world_rank
        )
        # The project's bar.
        assert planned.footprint.peak.bytes == pytest.approx(traced.peak, rel=0.08)


def test_a_data_parallel_rank_is_predicted_to_a_tenth_of_a_per_cent(pool: Any) -> None:
    assert error(pool, (2, "ddp", "none", "mlp", 8, {})) < 0.001
