"""Weight decay that spares norms and biases: by the bare model's names, whatever an engine makes of the parameters."""

from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

from src.models.gpt import GPT
from src.strategies.decay import norms_and_biases, sparing
from tests.composing import Result, composed, run_in
from tests.strategies.test_pp import SMALL, assert_equal
from tests.workers import Pool

#: A decay that three steps show: each takes lr x decay = 3 % off what decays.
DECAY = [*SMALL, "model.layers=2", "optimizer.weight_decay=10", "trainer.max_steps=3", "trainer.epochs=1"]
SPARED = [*DECAY, "trainer.decay_norms_and_biases=false"]


@pytest.fixture(scope="module")
def single(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Result:
    run_dir = tmp_path_factory.mktemp("single") / "run"
    return run_in(pool, 1, run_dir, *SPARED, "strategy=single", "trainer.accumulate=1")


def test_norms_and_biases_are_what_has_fewer_than_two_dims() -> None:
    model = GPT(vocab_size=5, sequence_length=4, layers=1, width=8, heads=2)
    decayed = {name for name, _ in model.named_parameters()} - norms_and_biases(model)
    layers = [f"attention.{name}" for name in "qkvo"] + ["mlp.up", "mlp.down"]
    assert decayed == {*(f"blocks.0.{layer}.weight" for layer in layers), *(f"{t}.weight" for t in TABLES)}


TABLES = ("embedding", "positions", "head")


def test_a_group_of_nothing_is_left_out_and_a_factory_without_names_is_itself() -> None:
    norm = nn.LayerNorm(4)
    optimizer = sparing(torch.optim.AdamW, norm.named_parameters, norms_and_biases(norm))(norm.parameters())
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.0]
    assert sparing(torch.optim.AdamW, norm.named_parameters, ()) is torch.optim.AdamW


def test_parameters_that_an_engine_puts_in_place_of_a_models_are_spared_too() -> None:
    norm = nn.LayerNorm(4)
    factory = sparing(partial(torch.optim.AdamW, weight_decay=0.5), norm.named_parameters, {"bias"})
    norm.bias = nn.Parameter(torch.ones(4))  # as reading weights does
    assert [group["weight_decay"] for group in factory(norm.parameters()).param_groups] == [0.5, 0.0]


def test_a_single_process_spares_norms_and_decays_tables(pool: Pool, tmp_path: Path, single: Result) -> None:
    decayed = run_in(pool, 1, tmp_path / "run", *DECAY, "strategy=single", "trainer.accumulate=1")
    gain, gain_decayed = (run.weights["norm.weight"] for run in (single, decayed))
    # Gains begin at 1; three steps of AdamW at lr 0.003 move each by at most about 0.01, decay to 0.97^3 = 0.913.
    assert (gain - 1).abs().max() < 0.02
    assert (gain_decayed - 0.913).abs().max() < 0.02
    # The first step's gradient is the same, so tables agree after it, and nearly after three.
    table, table_decayed = (run.weights["positions.weight"] for run in (single, decayed))
    torch.testing.assert_close(table, table_decayed, rtol=0, atol=0.01)


@pytest.mark.parametrize(
    "split",
    [
        ["strategy=ddp"],
        ["strategy=fsdp"],
        ["strategy=fsdp1", "strategy.min_unit_parameters=1000"],  # flat parameters of many, which are views of one dim
        ["strategy=deepspeed"],
        ["strategy=deepspeed", "sharding=zero3", "strategy.stage3_param_persistence_threshold=0"],
        ["strategy=tp"],
        ["strategy=pp"],
    ],
    ids=" ".join,
)
def test_every_strategy_spares_the_same(pool: Pool, tmp_path: Path, single: Result, split: list[str]) -> None:
    assert_equal(run_in(pool, 2, tmp_path / "run", *SPARED, *split, "trainer.accumulate=3"), single)


@pytest.mark.parametrize(("first", "second"), [("fsdp1", "deepspeed"), ("deepspeed", "fsdp"), ("pp", "fsdp1")])
@pytest.mark.slow
def test_a_run_goes_on_under_another_strategy(
    pool: Pool, tmp_path: Path, single: Result, first: str, second: str
) -> None:
    common = [*SPARED, "trainer.accumulate=3", "checkpoint.every=1"]
    run_in(pool, 2, tmp_path / "first", *common, f"strategy={first}", "trainer.max_steps=2")
    [saved] = (tmp_path / "first" / "checkpoints").glob("step_*2")
    result = run_in(pool, 2, tmp_path / "second", *common, f"strategy={second}", info={"resume": str(saved)})
    assert result.series("loss") == pytest.approx(single.series("loss")[2:], rel=1e-5)
    for name, weight in single.weights.items():
        torch.testing.assert_close(result.weights[name], weight, rtol=0, atol=1e-4, msg=name)


def test_an_optimizer_without_decay_has_nothing_to_spare_from() -> None:
    words = [f"~optimizer.{key}" for key in ("betas", "eps", "weight_decay", "fused")]
    _, [line] = composed("trainer.decay_norms_and_biases=false", "optimizer._target_=torch.optim.Rprop", *words)
    assert "does not take" in line
    assert line.endswith("Use trainer.decay_norms_and_biases=true, or optimizer=adamw, adam or sgd.")
