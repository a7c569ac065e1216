"""The other ways to train an experiment, and how they are said."""

import shlex

from src.checks.alternatives import Alternatives, alternatives
from src.checks.trial import on_meta
from src.tasks.plan_search import what_it_computes_with
from tests.composing import composed


def of(*words: str, overrides: tuple[str, ...] = ()) -> Alternatives:
    config, problems = composed("launch.device=cpu", *words)
    assert not problems, problems
    return alternatives(config, on_meta(config["model"]), overrides)


def named(found: Alternatives) -> set[tuple[str, str]]:
    return {(setting.strategy_name, setting.sharding.level) for _, setting in found.ways}


def test_ways_are_those_that_a_run_would_start_with() -> None:
    found = of("model=gpt_tiny", "launch.nproc=4")
    names = named(found)
    assert {("ddp", "none"), ("fsdp", "zero3"), ("fsdp", "zero2"), ("tp", "none"), ("pp", "none")} <= names
    # One process alone; and hybrid sharding shares a copy on each machine of 8, of which there is none whole.
    assert not {name for name in names if name[0] == "single" or name[1] == "hybrid"}
    # Four heads over 8 ranks are no way, nor a model without a tensor plan over any.
    eight = of("model=gpt_tiny", "launch.nproc=8").ways
    assert {setting.arguments["tp"] for _, setting in eight if setting.strategy_name == "tp"} == {2, 4}
    assert "tp" not in {name for name, _ in named(of("model=cnn", "launch.nproc=4"))}
    assert ("fsdp", "hybrid") in named(of("model=gpt_tiny", "launch.nproc=16"))


def test_a_command_keeps_what_was_given_and_can_be_pasted_into_a_shell() -> None:
    given = ("task=plan", "task.search=true", "seed=3", "model.hidden=[8, 8]", "strategy=ddp", "+strategy.x=1")
    found = of(
        "model=mlp", "launch.nproc=2", "trainer.accumulate=null", "trainer.global_batch_size=128", overrides=given
    )
    assert found.global_batch_size == 128
    words = shlex.split(found.command(*found.ways[0]))
    assert words[:4] == ["python", "train.py", "seed=3", "model.hidden=[8, 8]"]
    assert not [word for word in words if word.startswith(("task", "+strategy"))]


def test_what_is_walked_once_is_what_a_rank_computes_with() -> None:
    keys: dict[str, set[object]] = {}
    for strategy, setting in of("model=gpt_tiny", "launch.nproc=4").ways:
        keys.setdefault(setting.strategy_name, set()).add(what_it_computes_with(strategy, setting, 0))
    # DDP and DeepSpeed compute with the whole model; fsdp casts it; tp splits it over 2 and over 4 ranks.
    assert keys["ddp"] <= keys["deepspeed"]
    assert len(keys["fsdp"]) == 1
    assert keys["fsdp"].isdisjoint(keys["ddp"])
    assert len(keys["tp"]) == 2
