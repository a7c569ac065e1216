"""Promise 1 for the other axes: splitting layers (tp), the stack of layers (pp) and their products with data ranks.

Each row of ROWS is one way to split gpt_tiny over 2, 4 or 8 ranks; over data=text it must equal the single process
within the design's bars, or be refused for the reason that the row gives. The README's table comes out of it
(`make parity-table`).
"""

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from tests.composing import Result, composed, run_in
from tests.parity_table import check_table
from tests.workers import Pool

#: 12 samples a step, which accumulate x data ranks divides everywhere below; 41 samples, which nothing divides, so the
#: fourth step is short (41 = 3 x 12 + 5) and ten steps reach into the third epoch.
EPOCH_SAMPLES, GLOBAL_BATCH = 41, 12
COMMON = [
    "model=gpt_tiny",
    "data.sequence_length=32",
    f"data.limit={EPOCH_SAMPLES}",
    f"trainer.global_batch_size={GLOBAL_BATCH}",
    "trainer.micro_batch_size=null",
    "trainer.max_steps=10",
    "trainer.epochs=3",
    "trainer.max_grad_norm=1.0",  # below the norms that appear, so that clipping takes part
]
#: The design's bars, relative; weights absolute.
LOSS_BAR = {"fp32": 1e-5, "bf16": 2e-2, "fp16": 2e-2}
WEIGHT_BAR = 1e-4


@dataclass(frozen=True)
class Row:
    """One way to split. refused: (an accumulate, words that its refusal must hold). model: of its reference as well."""

    name: str
    ranks: int
    overrides: str
    accumulates: tuple[int, ...] = (1, 3)
    refused: tuple[tuple[int, str], ...] = ()
    model: tuple[str, ...] = ()


ROWS = [
    Row("tp=2", 2, "strategy=tp strategy.tp=2"),
    Row("tp=2, sequence parallel", 2, "strategy=tp strategy.tp=2 strategy.sequence_parallel=true"),
    Row("tp=4", 4, "strategy=tp strategy.tp=4"),
    Row("tp=4, sequence parallel", 4, "strategy=tp strategy.tp=4 strategy.sequence_parallel=true"),
    Row("dp=2 x tp=2", 4, "strategy=tp strategy.tp=2"),
    Row("fsdp=2 x tp=2", 4, "strategy=tp strategy.tp=2 sharding=zero3"),
    Row("fsdp=2 x tp=2, sequence parallel", 4, "strategy=tp sharding=zero3 strategy.sequence_parallel=true"),
    Row("pp=2, gpipe", 2, "strategy=pp strategy.schedule=gpipe"),
    Row("pp=2, 1f1b", 2, "strategy=pp strategy.schedule=1f1b", (3,), ((1, "strategy.schedule=1f1b"),)),
    Row("pp=2, interleaved_1f1b", 2, "strategy=pp strategy.schedule=interleaved_1f1b"),
    Row("pp=2, zero_bubble", 2, "strategy=pp strategy.schedule=zero_bubble"),
    Row("pp=4, gpipe", 4, "strategy=pp strategy.pp=4 strategy.schedule=gpipe"),
    Row("pp=4, 1f1b", 4, "strategy=pp strategy.pp=4 strategy.schedule=1f1b", (6,), ((3, "strategy.schedule=1f1b"),)),
    Row(
        "pp=4, interleaved_1f1b",
        4,
        "strategy=pp strategy.pp=4 strategy.schedule=interleaved_1f1b",
        # Two stages a rank need eight layers; at the default learning rate they take a step that rounding decides.
        model=("model.layers=8", "optimizer.lr=3e-4"),
    ),
    Row("pp=4, zero_bubble", 4, "strategy=pp strategy.pp=4 strategy.schedule=zero_bubble"),
    Row("dp=2 x pp=2", 4, "strategy=pp strategy.schedule=gpipe"),
    Row("fsdp=2 x pp=2", 4, "strategy=pp strategy.schedule=1f1b sharding=zero3", (3,)),
    Row("pp=2 x tp=2", 4, "strategy=pp strategy.tp=2 strategy.schedule=gpipe"),
    Row("dp=2 x pp=2 x tp=2", 8, "strategy=pp strategy.tp=2 strategy.sequence_parallel=true", (3,)),
    Row("hybrid 2x2", 4, "strategy=fsdp sharding=hybrid sharding.shard_size=2"),
]
BY_NAME = {row.name: row for row in ROWS}


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text of 60 windows of 32 bytes: 41 to train on, one to test on."""
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_bytes((Path(__file__).parent.parent / "README.md").read_bytes()[: 32 * 60 + 1])
    return path


def overrides(row: Row, accumulate: int, precision: str, text: Path) -> list[str]:
    split = [f"precision={precision}", f"trainer.accumulate={accumulate}", *row.overrides.split()]
    return [*COMMON, *row.model, f"data.root={text}", *split]


def reference(pool: Pool, run_dir: Path, text: Path, precision: str, model: tuple[str, ...]) -> Result:
    row = Row("single", 1, "strategy=single", model=model)
    return run_in(pool, 1, run_dir, *overrides(row, 1, precision, text))


def assert_equal(result: Result, expected: Result, precision: str, where: str) -> None:
    """The same data, losses, norms, weights and evaluations."""
    assert result.series("batch_hash") == expected.series("batch_hash"), where
    assert result.series("samples") == expected.series("samples"), where
    assert result.series("samples")[3] == EPOCH_SAMPLES, "the first epoch counts every sample once"
    bar = LOSS_BAR[precision]
    assert result.series("loss") == pytest.approx(expected.series("loss"), rel=bar), where
    assert [e["loss"] for e in result.epochs] == pytest.approx([e["loss"] for e in expected.epochs], rel=bar), where
    assert [e["samples"] for e in result.evaluations] == [e["samples"] for e in expected.evaluations], where
    perplexities = [e["perplexity"] for e in expected.evaluations]
    assert [e["perplexity"] for e in result.evaluations] == pytest.approx(perplexities, rel=10 * bar), where
    assert result.weights.keys() == expected.weights.keys(), where
    if precision == "fp32":
        assert result.series("grad_norm") == pytest.approx(expected.series("grad_norm"), rel=bar), where
        for name, weight in expected.weights.items():
            torch.testing.assert_close(result.weights[name], weight, rtol=0, atol=WEIGHT_BAR, msg=f"{where}: {name}")


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_every_split_equals_the_single_process(
    pool: Pool, tmp_path: Path, text: Path, pytestconfig: pytest.Config
) -> None:
    expected = {
        (precision, model): reference(pool, tmp_path / f"single-{precision}-{len(model)}", text, precision, model)
        for precision in LOSS_BAR
        for model in {row.model for row in ROWS}
    }
    for number, row in enumerate(sorted(ROWS, key=lambda row: row.ranks)):
        for precision in LOSS_BAR:
            for accumulate in row.accumulates if precision == "fp32" else row.accumulates[-1:]:
                where = f"{row.name}, accumulate={accumulate}, {precision}"
                split = overrides(row, accumulate, precision, text)
                result = run_in(pool, row.ranks, tmp_path / f"{number}-{precision}-{accumulate}", *split)
                assert_equal(result, expected[precision, row.model], precision, where)
    check_table("products", render(), write=pytestconfig.getoption("--write-parity-table"))


def render() -> str:
    """The README's table of what was just found equal."""
    lines = ["| split | ranks | options | equal in |", "|---|---|---|---|"]
    for row in ROWS:
        options = " ".join(option for option in row.overrides.split())
        lines.append(f"| {row.name} | {row.ranks} | `{options}` | {', '.join(LOSS_BAR)} |")
    return "\n".join(lines)


def test_too_few_microbatches_are_refused_with_the_reason(text: Path) -> None:
    for row in ROWS:
        for accumulate, words in row.refused:
            _, problems = composed(
                f"launch.nproc={row.ranks}", "launch.device=cpu", *overrides(row, accumulate, "fp32", text)
            )
            assert any(words in line for line in problems), f"{row.name}: {problems}"
