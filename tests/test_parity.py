"""Promise 1: how an experiment is split never changes what it learns.

One test walks the product of strategies, shardings, precisions, accumulations and process counts. Each cell
equals the single process within the bar, or is refused, and EXPECTED_REFUSALS says why. The README's table
comes out of it (`make parity-table`).
"""

import itertools
from pathlib import Path

import pytest
import torch

from tests.composing import Result, composed, run_in
from tests.parity_table import check_table
from tests.workers import Pool

SHARDINGS = ["none", "zero1", "zero2", "zero3", "hybrid"]
PRECISIONS = ["fp32", "bf16", "fp16"]
ACCUMULATES = [1, 3]
PROCESSES = [1, 2, 3]

#: What each strategy shards; everything else must be refused. Written down here, not read from the code.
SHARDS = {
    "single": {"none"},
    "ddp": {"none"},
    "fsdp": {"zero2", "zero3", "hybrid"},
    "fsdp1": {"zero2", "zero3", "hybrid"},
    "deepspeed": {"none", "zero1", "zero2", "zero3"},
}

#: 18 samples a step, which every accumulate x processes above divides; 101 samples, which nothing divides,
#: so that the sixth step is short (101 = 5 x 18 + 11) and ten steps reach into the second epoch.
COMMON = [
    "model=mlp",
    "model.hidden=[32]",
    "data.limit=101",
    "trainer.global_batch_size=18",
    "trainer.micro_batch_size=null",
    "trainer.max_steps=10",
    "trainer.epochs=2",
    "trainer.max_grad_norm=0.5",  # below the norms that appear, so that clipping takes part
    "optimizer.lr=0.01",
]

#: The design's bars, relative. In 16 bits the engines round in different places (weights before the step or
#: inside each operation), so only the losses are held to a bar.
LOSS_BAR = {"fp32": 1e-5, "bf16": 2e-2, "fp16": 2e-2}
WEIGHT_BAR = 1e-4
EPOCH_SAMPLES = 101
STRATEGIES = list(SHARDS)


def cell(strategy: str, sharding: str, precision: str, accumulate: int) -> list[str]:
    return [
        f"strategy={strategy}",
        f"sharding={sharding}",
        f"precision={precision}",
        f"trainer.accumulate={accumulate}",
        *COMMON,
    ]


def expected_refusal(strategy: str, sharding: str, precision: str, processes: int) -> str | None:
    """Words that the refusal must hold; None where the cell must run."""
    if strategy == "single" and processes > 1:
        return "strategy=single is one process"
    if sharding not in SHARDS[strategy]:
        return f"sharding={sharding} shards" if sharding != "none" else "sharding=none shards nothing"
    if strategy == "deepspeed" and precision == "fp16":
        return "fp16"  # DeepSpeed has no fp16 on a CPU
    return None


def assert_equal(result: Result, reference: Result, precision: str, where: str) -> None:
    """The same data, losses, norms and weights."""
    assert result.series("batch_hash") == reference.series("batch_hash"), where
    assert result.series("samples") == reference.series("samples"), where
    assert result.series("samples")[5] == EPOCH_SAMPLES, "the first epoch counts every sample once"
    bar = LOSS_BAR[precision]
    assert result.series("loss") == pytest.approx(reference.series("loss"), rel=bar), where
    assert [e["loss"] for e in result.epochs] == pytest.approx([e["loss"] for e in reference.epochs], rel=bar), where
    assert [e["samples"] for e in result.evaluations] == [300, 300], where
    if precision == "fp32":
        assert result.series("grad_norm") == pytest.approx(reference.series("grad_norm"), rel=bar), where
        assert result.weights.keys() == reference.weights.keys(), where
        for name, weight in reference.weights.items():
            torch.testing.assert_close(result.weights[name], weight, rtol=0, atol=WEIGHT_BAR, msg=f"{where}: {name}")
        for ours, theirs in zip(result.evaluations, reference.evaluations, strict=True):
            assert ours["accuracy"] == pytest.approx(theirs["accuracy"], abs=1e-9), where


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_every_combination_equals_the_single_process_or_is_refused(
    pool: Pool, tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    references = {p: run_in(pool, 1, tmp_path / p, *cell("single", "none", p, 1)) for p in PRECISIONS}
    for precision in PRECISIONS:  # 16-bit arithmetic learns what fp32 does
        assert references[precision].series("loss") == pytest.approx(references["fp32"].series("loss"), rel=2e-2)
    outcome: dict[tuple[str, str, str], str] = {}
    # Processes outermost: each world's ranks are started once.
    for number, (processes, strategy, sharding, precision, accumulate) in enumerate(
        itertools.product(PROCESSES, STRATEGIES, SHARDINGS, PRECISIONS, ACCUMULATES)
    ):
        overrides = cell(strategy, sharding, precision, accumulate)
        where = f"{processes} x {' '.join(overrides[:4])}"
        _, problems = composed(f"launch.nproc={processes}", "launch.device=cpu", "tracking=off", *overrides)
        words = expected_refusal(strategy, sharding, precision, processes)
        if words is not None:
            assert any(words in line for line in problems), f"{where}: {problems}"
            outcome.setdefault((strategy, sharding, precision), "refused")
            continue
        assert not problems, f"{where}: {problems}"
        result = run_in(pool, processes, tmp_path / str(number), *overrides)
        assert_equal(result, references[precision], precision, where)
        outcome[strategy, sharding, precision] = "equal"
    check_table("parity", render(outcome), write=pytestconfig.getoption("--write-parity-table"))


def render(outcome: dict[tuple[str, str, str], str]) -> str:
    """The README's table: a row a strategy, a column a sharding, the precisions that are equal in each cell."""
    lines = [f"| | {' | '.join(f'`{s}`' for s in SHARDINGS)} |", "|---" * (len(SHARDINGS) + 1) + "|"]
    for strategy in STRATEGIES:
        cells = []
        for sharding in SHARDINGS:
            equal = [p for p in PRECISIONS if outcome[strategy, sharding, p] == "equal"]
            cells.append(", ".join(equal) or "-")
        lines.append(f"| `{strategy}` | {' | '.join(cells)} |")
    return "\n".join(lines)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "fsdp1"])
def test_two_ranks_equal_one_process_with_accumulation_and_a_short_last_window(pool, tmp_path, strategy):
    sharding = "none" if strategy == "ddp" else "zero3"
    reference = run_in(pool, 1, tmp_path / "single", *cell("single", "none", "fp32", 1))
    result = run_in(pool, 2, tmp_path / strategy, *cell(strategy, sharding, "fp32", 3))
    assert_equal(result, reference, "fp32", strategy)


@pytest.mark.parametrize("strategy", ["fsdp", "fsdp1"])
@pytest.mark.slow
def test_hybrid_sharding_in_two_groups_of_two_equals_one_process(pool, tmp_path, strategy):
    # 4 ranks; 20 = 5 x 4 samples a step
    common = [*cell(strategy, "hybrid", "fp32", 1), "trainer.global_batch_size=20"]
    reference = run_in(pool, 1, tmp_path / "single", *common, "strategy=single", "sharding=none")
    result = run_in(pool, 4, tmp_path / strategy, *common, "sharding.shard_size=2")
    assert result.series("loss") == pytest.approx(reference.series("loss"), rel=1e-5)
    assert result.series("grad_norm") == pytest.approx(reference.series("grad_norm"), rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "fsdp1", "deepspeed"])
def test_other_optimizers_and_no_clipping_are_equal_too(pool, tmp_path, strategy, optimizer):
    common = [*COMMON, f"optimizer={optimizer}", "trainer.max_grad_norm=null", "trainer.accumulate=3"]
    reference = run_in(pool, 1, tmp_path / "single", "strategy=single", *common)
    result = run_in(pool, 2, tmp_path / strategy, f"strategy={strategy}", *common)
    assert_equal(result, reference, "fp32", strategy)
