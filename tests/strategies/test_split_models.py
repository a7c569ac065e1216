"""Models of one's own under strategies that split them: what they share, what they say of themselves."""

import logging
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from src.models.gpt import GPT
from src.parallel.tensor import whole
from src.precision import Precision
from src.sharding import Sharding
from src.strategies.base import BuildSpec
from src.strategies.fsdp import FSDP2
from src.strategies.pp import PipelineParallel
from src.strategies.tp import TensorParallel
from tests import own_models
from tests.composing import composed, run_in
from tests.strategies.test_tp import built, step, tokens
from tests.workers import Pool, RankError

PP = ["strategy=pp", "trainer.accumulate=4", "launch.nproc=2"]
PP_TP = ["strategy=pp", "trainer.accumulate=4", "launch.nproc=4", "strategy.tp=2"]
TP = ["strategy=tp", "launch.nproc=2"]
SIZES: dict[str, Any] = {"vocab_size": 37, "sequence_length": 8, "layers": 2, "width": 16, "heads": 4}


def problems(model: str, *overrides: str) -> list[str]:
    return composed(
        "model=gpt_tiny", f"model._target_=tests.own_models.{model}", "launch.device=cpu", "tracking=off", *overrides
    )[1]


def only_problem(model: str, *overrides: str) -> str:
    [line] = problems(model, *overrides)
    return line


def own(name: str) -> GPT:
    torch.manual_seed(0)
    model: GPT = getattr(own_models, name)(**SIZES)
    return model


# Tied weights


def test_weights_tied_across_stages_are_refused_by_their_names() -> None:
    line = only_problem("TiedGPT", *PP)
    assert "model TiedGPT shares embedding.weight = head.weight between stages" in line


def test_weights_tied_within_a_stage_are_not_refused() -> None:
    assert problems("TiedInsideABlock", *PP) == []


def build_pipeline(world: Any, name: str) -> None:
    PipelineParallel().build(own(name), partial(torch.optim.SGD, lr=0.1), BuildSpec(world, accumulate=2))


def test_tied_weights_that_the_parent_could_not_see_fail_before_the_first_step(pool: Pool) -> None:
    assert problems("TiedWhereItReadsWeights", *PP) == []
    with pytest.raises(RankError, match=r"a copy of their own of embedding\.weight = head\.weight"):
        pool.run(2, build_pipeline, "TiedWhereItReadsWeights")


@pytest.mark.parametrize("strategy", [TP, PP_TP])
def test_weights_tied_across_split_modules_are_refused_by_their_names(strategy: list[str]) -> None:
    line = problems("TiedGPT", *strategy)[0]
    assert "TiedGPT shares embedding.weight = head.weight, and tensor parallelism would give each its own" in line


def test_a_table_that_one_module_holds_for_two_uses_is_not_refused_by_tensor_parallelism() -> None:
    assert problems("TiedGPT", *TP, "model._target_=src.models.gpt.GPT", "model.tie_embeddings=true") == []


TINY = ["data=synthetic_tokens", "model=gpt_tiny", "model.layers=2", "model.width=16", "model.heads=2"]
TIED = [*TINY, "model._target_=tests.own_models.TiedGPT", "trainer.max_steps=4", "checkpoint.every=2"]


@pytest.mark.parametrize(("strategy", "ranks"), [("single", 1), ("ddp", 2), ("fsdp", 2)])
def test_a_tied_model_is_saved_under_both_names_and_goes_on(
    pool: Pool, tmp_path: Path, strategy: str, ranks: int
) -> None:
    whole_run = run_in(pool, ranks, tmp_path / "whole", f"strategy={strategy}", *TIED)
    checkpoint = tmp_path / "whole" / "checkpoints" / "step_00000002"
    resumed = run_in(pool, ranks, tmp_path / "on", f"strategy={strategy}", *TIED, info={"resume": str(checkpoint)})
    assert torch.equal(whole_run.weights["head.weight"], whole_run.weights["embedding.weight"])
    for name, weight in whole_run.weights.items():
        assert torch.equal(resumed.weights[name], weight), name
    assert resumed.series("loss") == whole_run.series("loss")[2:]
    config, _ = composed(*TIED)
    sizes = {key: value for key, value in config["model"].items() if key != "_target_"}
    own_models.TiedGPT(**sizes).load_state_dict(whole_run.weights, strict=True)


# What a model says of itself


def test_a_model_that_lacks_one_of_two_methods_is_refused_by_the_method() -> None:
    assert "does not say how large its layers are (layer_parameters)" in only_problem("WithoutSizes", *PP)
    for strategy in (TP, PP_TP):
        line = only_problem("WithoutCounts", *strategy)
        assert "WithoutCounts does not say what the number of ranks must divide (tensor_counts)" in line


@pytest.mark.parametrize("strategy", [TP, PP_TP])
def test_a_plan_that_leaves_modules_out_is_refused_with_their_parameters(strategy: list[str]) -> None:
    line = only_problem("LeavesOutItsNorms", *strategy)
    assert "the tensor plan of LeavesOutItsNorms leaves out" in line
    assert "blocks.3.mlp_norm.bias, norm.weight, norm.bias." in line
    assert "src.parallel.tensor.Whole(Replicate())" in line


@pytest.mark.parametrize("strategy", [TP, PP_TP])
def test_a_plan_that_names_no_module_is_refused_with_the_nearest(strategy: list[str]) -> None:
    line = only_problem("Misspells", *strategy)
    words = "the tensor plan of Misspells names 'blocks.*.mlp.donw', which is no module of it. Use 'blocks.*.mlp.down'."
    assert line == words


def test_a_style_reaches_all_modules_below_the_one_it_is_for() -> None:
    assert problems("WholeMLP", *TP) == []


def test_the_plan_of_a_stage_may_name_what_other_stages_hold(pool: Pool) -> None:
    assert problems("PlansForTheWhole", *PP_TP) == []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pool.run(4, build_split_pipeline, "PlansForTheWhole")


def build_split_pipeline(world: Any, name: str) -> None:
    spec = BuildSpec(world, accumulate=2)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*plan key.*")
        PipelineParallel(tp=2).build(own(name), partial(torch.optim.SGD, lr=0.1), spec)


def misspelt(world: Any) -> None:
    built(world, TensorParallel(2), own("Misspells"))


def test_a_plan_that_the_parent_could_not_check_fails_in_the_ranks(pool: Pool) -> None:
    with pytest.raises(RankError, match=r"names 'blocks\.\*\.mlp\.donw', which is no module of it"):
        pool.run(2, misspelt)


def whole_batchnorm(world: Any) -> None:
    built(world, TensorParallel(2), own_models.BatchNormed(image_shape=[1, 8, 8], hidden=8, num_classes=10))


def test_floating_point_buffers_that_a_plan_distributes_are_an_error_that_names_them(pool: Pool) -> None:
    with pytest.raises(RankError, match=r"makes the buffers norm\.running_mean, norm\.running_var DTensors"):
        pool.run(2, whole_batchnorm)


@pytest.mark.parametrize("key", ["vocab_size", "sequence_length", "layers", "width", "heads", "kv_heads"])
def test_a_gpt_without_any_of_something_is_refused(key: str) -> None:
    with pytest.raises(ValueError, match=rf"model\.{key}=0 is less; choose 1 or more"):
        GPT(**{**SIZES, key: 0})


def test_sequences_split_over_one_rank_are_refused_by_both_strategies() -> None:
    words = "strategy.sequence_parallel=true splits sequences over strategy.tp ranks, and strategy.tp=1."
    for strategy in (PP, ["strategy=tp", "strategy.tp=1", "launch.nproc=2"]):
        line = only_problem(
            "TiedInsideABlock", "model._target_=src.models.gpt.GPT", "strategy.sequence_parallel=true", *strategy
        )
        assert line.startswith(words)


# What torch would print


def train_without_a_word(world: Any, sharding: str, precision: str) -> None:
    """Raises for anything that torch says while a model on two axes is trained, evaluated and gathered."""
    said: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("torch.distributed.tensor")
    logger.addHandler(handler)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            strategy = built(world, TensorParallel(2), own("GPT"), precision, sharding)
            for number in range(2):
                step(strategy, tokens(number))
            strategy.evaluate(tokens(7))
            strategy.weights()
            strategy.state()
    finally:
        logger.removeHandler(handler)
    assert said == []


@pytest.mark.parametrize(("sharding", "precision"), [("zero3", "fp32"), ("none", "fp16"), ("zero3", "fp16")])
def test_torch_says_nothing_while_a_model_on_two_axes_trains(pool: Pool, sharding: str, precision: str) -> None:
    pool.run(4, train_without_a_word, sharding, precision)


def fully_sharded_in_fp16(world: Any, level: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        strategy = FSDP2()
        sharding = Sharding(level, shard_size=2 if level == "hybrid" else None)
        spec = BuildSpec(world, Precision("fp16"), sharding, max_grad_norm=1.0)
        strategy.build(own("GPT"), partial(torch.optim.AdamW, lr=1e-2), spec)
        step(strategy, tokens(0))


@pytest.mark.parametrize("level", ["zero3", "hybrid"])
def test_torch_says_nothing_of_the_scaler_of_a_sharded_model(pool: Pool, level: str) -> None:
    pool.run(4, fully_sharded_in_fp16, level)


def compare_with_full_tensors(world: Any, level: str, tp: int) -> None:
    strategy = TensorParallel(tp)
    sharding = Sharding(level, shard_size=2 if level == "hybrid" else None)
    strategy.build(own("GPT"), partial(torch.optim.SGD, lr=0.1), BuildSpec(world, Precision("fp32"), sharding))
    bare = dict(own("GPT").named_parameters())
    for name, parameter in strategy.model.named_parameters():
        assert isinstance(parameter, DTensor)
        assert torch.equal(whole(parameter.detach()), bare[name]), name


@pytest.mark.parametrize(
    ("level", "ranks"), [("zero3", 4), ("none", 4), pytest.param("hybrid", 8, marks=pytest.mark.slow)]
)
def test_a_weight_gathered_axis_by_axis_is_the_whole_one(pool: Pool, level: str, ranks: int) -> None:
    pool.run(ranks, compare_with_full_tensors, level, 2)
