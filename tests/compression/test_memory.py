"""What a compressor holds and sends, expected before a step and measured in it."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.memory import expected_peak, measured_peak, parts
from src.compression.base import Compression
from src.compression.bf16 import BF16
from src.compression.needs import Needs
from src.compression.powersgd import PowerSGD
from src.compression.topk import TopK
from src.plan.formula import plan
from src.plan.trace import trace
from src.world import World
from tests.command import QUICK, summary, train
from tests.composing import composed
from tests.workers import Pool

RANKS = 2
BAR = 0.08  # of the project, for the largest error
WIDE = "model=mlp model.hidden=[1536,640] optimizer=sgd"  # weights outweigh what else a step holds
TOPK, POWERSGD = "compression=topk", "compression=powersgd compression.warmup_steps=3"
CASES = [
    f"model=mlp {TOPK}",
    f"{WIDE} {TOPK}",
    f"{WIDE} {TOPK} compression.ratio=0.5",
    f"{WIDE} {TOPK} compression.selection=sampled",
    f"{WIDE} {TOPK} compression.error_feedback=false strategy.bucket_cap_mb=1",
    f"{WIDE} {TOPK} trainer.accumulate=2",
    f"model=mlp {POWERSGD}",
    f"{WIDE} {POWERSGD}",
    f"{WIDE} {POWERSGD} compression.matrix_rank=8 strategy.gradient_as_bucket_view=false",
    f"model=cnn {POWERSGD} compression.error_feedback=false",
    f"{WIDE} compression=fp16",
]


def config_of(words: str, ranks: int = RANKS) -> dict[str, Any]:
    config, problems = composed(f"launch.nproc={ranks}", "launch.device=cpu", *words.split())
    assert not problems, problems
    return config


def planned(config: dict[str, Any], ranks: int = RANKS) -> Any:
    """The footprint by formula."""
    made = parts(World(0, ranks, 0, ranks, is_imagined=True), config)
    [found] = plan(type(made.strategy), made.make_model, made.optimizer, made.data, made.setting)
    return found.footprint


@pytest.mark.parametrize("words", CASES)
def test_trace_and_formula_expect_what_real_ranks_need(pool: Pool, words: str) -> None:
    config = config_of(words)
    measured = max(pool.run(RANKS, measured_peak, config))
    traced, method = expected_peak(config, RANKS)
    assert method == "trace"
    assert traced == pytest.approx(measured, rel=BAR)
    assert planned(config).peak.bytes == pytest.approx(measured, rel=BAR)


@pytest.mark.parametrize("words", [TOPK, POWERSGD, "compression=bf16"])
def test_a_plan_counts_what_a_traced_step_sends(words: str) -> None:
    config = config_of(f"model=mlp {words}", 8)
    made = parts(World(0, 8, 0, 8, is_imagined=True), config)
    step = trace(
        made.strategy, made.make_model, made.optimizer, made.spec,
        lambda: made.data.example(made.spec.micro_batch_size),
    )  # fmt: skip
    assert {name: part.bytes for name, part in planned(config, 8).traffic.items()} == step.traffic


#: A matrix of 1000 x 50 and a bias of 1000: 51,000 gradients, among 4 ranks.
SHAPES, NUMEL = [(1000, 50), (1000,)], 51_000
#: Top-K of 1 %: 510 values of 4 bytes and indices of 8 beside all magnitudes; 510 x (4 + 4) sent by each of 4 ranks.
BY_HAND: list[tuple[Compression, Needs]] = [
    (TopK(0.01), Needs(4 * NUMEL, 0, 4 * NUMEL + 12 * 510, 4 * 510 * 8)),
    # Nothing kept. A fifth: what all four send, 5 x 10,200 x 8 with one's own, is more than magnitudes and choice.
    (TopK(0.2, error_feedback=False), Needs(0, 0, 5 * 10_200 * 8, 4 * 10_200 * 8)),
    # Two masks of a byte a value instead of magnitudes. What is gathered is more than the work of choosing.
    (TopK(0.01, selection="sampled"), Needs(4 * NUMEL, 2 * NUMEL, 5 * 510 * 8, 4 * 510 * 8)),
    # P and Q of rank 2: 2 x (1000 + 50). The bias goes whole. A copy of the bucket, and what the products miss of it.
    (PowerSGD(2), Needs(4 * (NUMEL + 2100), 0, 4 * (2 * NUMEL + 1000), 4 * (2100 + 1000))),
    # (1000 + 50) x 30 would shrink 50,000 by less than 2, so all goes whole.
    (PowerSGD(30, error_feedback=False), Needs(0, 0, 4 * NUMEL, 4 * NUMEL)),
    (BF16(), Needs(work=2 * NUMEL, sent=2 * NUMEL)),
]


@pytest.mark.parametrize(("compression", "expected"), BY_HAND)
def test_needs_are_those_of_the_arithmetic(compression: Compression, expected: Needs) -> None:
    assert compression.needs(SHAPES, 4) == expected


def test_a_run_measures_a_step_past_the_warm_up(tmp_path: Path) -> None:
    words = [*QUICK, "model=mlp", "trainer.max_steps=6", "compression=powersgd", "compression.warmup_steps=3"]
    outcome = train(tmp_path, *words)
    assert outcome.code == 0, outcome.text
    memory = summary(outcome.run_dir())["memory"]
    expected = expected_peak(composed(*words)[0], RANKS)[0]  # the run itself may end before its own is there
    assert max(memory["measured_bytes"]) == pytest.approx(expected, rel=BAR)
    # A dense step holds no residuals, 4 bytes a parameter: so it was none.
    dense = expected_peak(composed(*QUICK, "model=mlp")[0], RANKS)[0]
    assert max(memory["measured_bytes"]) > dense + 4 * summary(outcome.run_dir())["parameters"]


def test_a_run_that_ends_in_its_warm_up_measures_nothing(tmp_path: Path) -> None:
    outcome = train(tmp_path, *QUICK, "model=mlp", "compression=powersgd")
    assert outcome.code == 0, outcome.text
    assert "not measured: no step was taken past the warm-up" in outcome.text
    assert summary(outcome.run_dir())["memory"]["error"] is None


def test_a_plan_shows_traffic_and_the_density_at_which_it_breaks_even(tmp_path: Path) -> None:
    outcome = train(tmp_path, "task=plan", "launch.device=cpu", "launch.nproc=4", "model=mlp", "compression=topk")
    assert outcome.code == 0, outcome.text
    [found] = json.loads((outcome.run_dir() / "plan.json").read_text())["ranks"]
    # 85,002 gradients: 850 values and indices of each of 4 ranks.
    assert found["traffic_bytes"] == {"all_gather": 4 * 850 * 8}
    assert "residuals" in found["formulas"]["communication_buffers"]
    # 8 / (4 ranks x (4 + 4)), in cells that break lines where they like.
    assert "0.25" in outcome.stdout
