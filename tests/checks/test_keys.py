"""Keys of a configuration against what reads them: the schema's dataclasses and the targets' signatures."""

from typing import Any, Literal

import pytest
import torch
from omegaconf import OmegaConf

from src.checks.keys import locate, resolve
from src.checks.plain_types import fits, readable
from src.config import Config
from src.errors import did_you_mean
from tests.composing import composed

#: What is told of the class below.
TAKES = "tests.checks.test_keys.Takes"


class Takes:
    """A target for these tests."""

    def __init__(
        self,
        size: int,
        ratio: float = 0.5,
        names: list[str] | None = None,
        mode: Literal["fast", "slow"] = "fast",
        rate: float | torch.Tensor = 0.1,
        part: Any = None,
    ) -> None: ...


def takes_anything(size: int, **rest: object) -> None: ...


def problems_of(**model: Any) -> tuple[list[str], list[str]]:
    """(unknown, broken) of a whole configuration whose model node is `model`."""
    plain, _ = composed("tracking=off", "task=train")
    cfg = OmegaConf.merge(OmegaConf.structured(Config), plain)
    OmegaConf.set_struct(cfg, False)
    cfg.model = {"_target_": TAKES, **model}
    return resolve(cfg)[1:]


def test_a_key_that_the_target_does_not_take_is_unknown_and_the_nearest_is_named() -> None:
    unknown, broken = problems_of(size=1, ratoi=0.1)
    assert unknown == [f"model.ratoi is nothing that {TAKES} takes. Did you mean model.ratio?"]
    assert not broken


def test_a_key_that_the_target_needs_is_missed() -> None:
    assert problems_of()[1] == [f"model.size is missing; {TAKES} needs it. Give it with model.size=..."]
    assert not problems_of(_partial_=True)[1]


def test_a_key_left_open_in_the_yaml_is_missed() -> None:
    assert problems_of(size="???")[1][0] == "model.size has no value; give one with model.size=..."


@pytest.mark.parametrize(
    ("key", "value", "wanted"),
    [
        ("size", "x", "of type int"),
        ("size", True, "of type int"),
        ("size", 1.0, "of type int"),
        ("ratio", "x", "of type float"),
        ("names", [1], "of type list[str] or null"),
        ("names", "x", "of type list[str] or null"),
        ("mode", "medium", "one of 'fast' or 'slow'"),
        ("rate", "x", "of type float"),
    ],
)
def test_a_value_of_the_wrong_type_is_told_with_the_right_one(key: str, value: Any, wanted: str) -> None:
    assert problems_of(**{"size": 1, key: value})[1] == [f"model.{key}={value!r} is not {wanted}."]


def test_values_that_fit_are_not_told() -> None:
    node = {"_target_": "tests.checks.test_keys.takes_anything", "size": 2, "whatever": 1}
    assert problems_of(size=1, ratio=1, names=["a"], mode="slow", rate=1e-3, part=node) == ([], [])


def test_nodes_below_a_node_are_checked_as_well() -> None:
    unknown, broken = problems_of(size=1, part={"_target_": TAKES, "sise": 2})
    assert unknown == [f"model.part.sise is nothing that {TAKES} takes. Did you mean model.part.size?"]
    assert broken == [f"model.part.size is missing; {TAKES} needs it. Give it with model.part.size=..."]


def test_a_target_that_is_nothing_to_call_is_told() -> None:
    assert problems_of(_target_="torch.float32")[1] == [
        "model._target_=torch.float32 is a dtype, which can't be built."
    ]


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("torch.nn.Linearr", "torch.nn has no Linearr. Did you mean torch.nn.Linear?"),
        ("nowhere.Thing", "there is no module nowhere beside train.py or on the PYTHONPATH."),
        ("torch..nn", "'torch..nn' is no dotted path."),
        ("tests.broken_on_import.Model", "RuntimeError: not today"),
        ("tests.needs_a_package.Model", "tests.needs_a_package needs package_of_nobody, which is not installed."),
    ],
)
def test_a_target_that_can_not_be_had_says_which_part_of_it(path: str, message: str) -> None:
    with pytest.raises(ImportError) as caught:
        locate(path)
    assert message in str(caught.value)


def test_locate_finds_classes_methods_and_modules() -> None:
    assert locate("torch.nn.Linear") is torch.nn.Linear
    assert locate("torch.Tensor.add") is torch.Tensor.add
    assert locate("torch.nn") is torch.nn


def test_every_shipped_option_composes_without_an_unknown_key() -> None:
    for group, options in {
        "strategy": ["single", "ddp", "fsdp", "fsdp1"],
        "optimizer": ["adam", "adamw", "sgd"],
        "schedule": ["constant", "linear", "cosine"],
        "tracking": ["wandb", "offline", "off"],
        "model": ["cnn", "mlp"],
    }.items():
        for option in options:
            assert composed(f"{group}={option}", "launch.nproc=1")[1] == []


def test_the_nearest_name_is_suggested_and_otherwise_all_are_listed() -> None:
    assert did_you_mean("acumulate", ["accumulate", "epochs"]) == "Did you mean accumulate?"
    assert did_you_mean("acumulate", ["accumulate"], "trainer.") == "Did you mean trainer.accumulate?"
    assert did_you_mean("xyz", ["b", "a"]) == "Known: a, b."
    assert did_you_mean("xyz", []) == "It takes none."


def test_types_that_a_yaml_can_not_write_say_nothing() -> None:
    assert fits("x", torch.dtype)
    assert fits("x", torch.dtype | torch.device)
    assert readable(int | None) == "of type int or null"
