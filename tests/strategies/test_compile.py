"""Compiled layers learn what uncompiled ones do, and change no name (FareedKhan-dev/train-llm-from-scratch#36)."""

from pathlib import Path

import pytest
import torch
from torch import nn

from src.models.gpt import GPT
from src.parallel.compiled import compile_units
from src.parallel.recompute import MODES, recompute_activations
from tests.composing import Result, composed, run_in
from tests.strategies.test_pp import SMALL, assert_equal
from tests.workers import Pool

TINY = [*SMALL, "model.layers=2", "trainer.max_steps=4", "trainer.epochs=1"]
COMPILED = [*TINY, "trainer.compile=true", "trainer.accumulate=3"]


@pytest.fixture(scope="module")
def single(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Result:
    return run_in(pool, 1, tmp_path_factory.mktemp("single") / "run", *TINY, "strategy=single", "trainer.accumulate=1")


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("strategy", "mode"),
    [*((strategy, mode) for strategy in ("single", "ddp", "fsdp") for mode in MODES), ("fsdp1", "none")],
)
def test_compiled_layers_learn_what_others_do(
    pool: Pool, tmp_path: Path, single: Result, strategy: str, mode: str
) -> None:
    words = [f"strategy={strategy}", f"trainer.activation_checkpointing={mode}"]
    result = run_in(pool, 1 if strategy == "single" else 2, tmp_path / "run", *COMPILED, *words, timeout_seconds=800)
    assert_equal(result, single)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_checkpoint_of_compiled_layers_goes_on_without(pool: Pool, tmp_path: Path, single: Result) -> None:
    words = ["strategy=ddp", "checkpoint.every=1", "trainer.max_steps=2"]
    first = run_in(pool, 2, tmp_path / "first", *COMPILED, *words, timeout_seconds=800)
    assert list(first.weights) == list(single.weights), "no _orig_mod., no module."
    [saved] = (tmp_path / "first" / "checkpoints").glob("step_*2")
    rest = [*TINY, "strategy=fsdp", "trainer.accumulate=3"]
    result = run_in(pool, 2, tmp_path / "second", *rest, info={"resume": str(saved)})
    assert result.series("loss") == pytest.approx(single.series("loss")[2:], rel=1e-5)


def test_names_stay_those_of_the_bare_model() -> None:
    model = GPT(vocab_size=5, sequence_length=4, layers=2, width=8, heads=2)
    names, modules = list(model.state_dict()), [name for name, _ in model.named_modules()]
    compile_units(recompute_activations(model, "full"), torch.device("cpu"))
    assert list(model.state_dict()) == names
    assert [name for name, _ in model.named_modules()] == modules


def test_a_recomputed_layer_with_batch_norm_is_refused_by_name() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    compile_units(model, torch.device("cpu"))
    with pytest.raises(ValueError, match="the buffers of BatchNorm1d in a Sequential"):
        compile_units(recompute_activations(model, "full"), torch.device("cpu"))


def test_what_ends_the_graph_inside_a_layer_is_refused() -> None:
    words = ["strategy=fsdp1", "trainer.compile=true", "launch.device=cpu"]
    assert composed(*words)[1] == []
    [line] = composed(*words, "trainer.activation_checkpointing=selective")[1]
    assert line.endswith("Use strategy=fsdp, trainer.compile=false, or trainer.activation_checkpointing=none.")


def test_without_units_the_model_is_compiled_as_one() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    compile_units(model, torch.device("cpu"))
    assert model._compiled_call_impl is not None
    assert model[0]._compiled_call_impl is None
