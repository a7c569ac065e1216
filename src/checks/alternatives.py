"""The other ways to train one experiment: every shipped strategy, sharding and degree that its configuration allows."""

import copy
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from omegaconf import OmegaConf
from torch import nn

from src.checks.acceptance import accepts
from src.checks.remedies import STRATEGIES
from src.checks.setting import known_setting, strategy_class
from src.plan.search import degrees_of
from src.sharding import LEVELS
from src.strategies.base import Setting, Strategy

#: Ranks of a machine, which share one copy under hybrid sharding.
RANKS_A_MACHINE = 8
#: What the command line of an alternative says anew.
REPLACED = (
    "task",
    "strategy",
    "sharding",
    "trainer.micro_batch_size",
    "trainer.accumulate",
    "trainer.global_batch_size",
)


@dataclass(frozen=True)
class Alternatives:
    """ways: that a run would start with, at a micro-batch of one sample. global_batch_size: that all of them keep, in
    samples; None: theirs to choose. overrides: the user's own, without what an alternative chooses.
    """

    ways: Sequence[tuple[type[Strategy], Setting]]
    global_batch_size: int | None
    overrides: Sequence[str]

    def command(self, strategy: type[Strategy], setting: Setting) -> str:
        """The command line that trains like this."""
        words = [f"strategy={setting.strategy_name}", f"sharding={setting.sharding.level}"]
        if setting.sharding.shard_size is not None:
            words.append(f"sharding.shard_size={setting.sharding.shard_size}")
        if setting.sharding.offload != "none":
            words.append(f"sharding.offload={setting.sharding.offload}")
        words += [f"strategy.{name}={setting.arguments[name]}" for name in strategy.degrees]
        words += [
            f"trainer.micro_batch_size={setting.micro_batch_size}",
            f"trainer.accumulate={setting.accumulate}",
            "trainer.global_batch_size=null",
        ]
        return shlex.join(["python", "train.py", *self.overrides, *words])


def alternatives(config: Mapping[str, Any], model: nn.Module, overrides: Sequence[str]) -> Alternatives:
    """To what `config` describes. model: its own, on the meta device. overrides: as the user typed them."""
    return Alternatives(
        list(ways(config, model)),
        config["trainer"]["global_batch_size"],
        [word for word in overrides if not is_replaced(word)],
    )


def ways(config: Mapping[str, Any], model: nn.Module) -> Iterator[tuple[type[Strategy], Setting]]:
    """Of all that the strategies accept for this model, one of each kind."""
    world_size = known_setting(dict(config))[0].world_size
    for path in sorted(STRATEGIES.glob("*.yaml")):
        node = OmegaConf.to_container(OmegaConf.load(path))  # its 5e7 is a number, YAML's own is not
        assert isinstance(node, dict)
        if "_target_" not in node:
            continue  # a variant of another
        arguments = {str(name): value for name, value in node.items() if name != "defaults"}
        strategy = strategy_class({"strategy": arguments})
        for degrees in degrees_of(strategy, world_size):
            if degrees and all(degree == 1 for degree in degrees.values()) and world_size > 1:
                continue  # another strategy's way
            for level in (level for level in LEVELS if level in strategy.supports.sharding):
                setting = setting_of(config, strategy, {**arguments, **degrees}, level)
                if setting is not None and shares_something(setting) and accepts(strategy, setting, model):
                    yield strategy, setting


def setting_of(
    config: Mapping[str, Any], strategy: type[Strategy], arguments: dict[str, Any], level: str
) -> Setting | None:
    """None where it can't be worked out, such as for degrees that don't divide."""
    changed = copy.deepcopy(dict(config))
    changed["strategy"] = arguments
    shard_size = RANKS_A_MACHINE if level == "hybrid" else None
    changed["sharding"] = {**changed["sharding"], "level": level, "shard_size": shard_size}
    accumulate = max(changed["trainer"]["accumulate"] or 1, strategy.wanted_accumulate(arguments))
    changed["trainer"] |= {"micro_batch_size": 1, "accumulate": accumulate, "global_batch_size": None}
    found, unknowns = known_setting(changed)
    return None if unknowns else found


def shares_something(setting: Setting) -> bool:
    """Whether sharding means something here: ranks to share with and, of hybrid sharding, more than one copy."""
    ranks, shard_size = setting.data_parallel_size, setting.sharding.shard_size
    return (setting.sharding.level == "none" or ranks > 1) and (shard_size is None or ranks > shard_size)


def is_replaced(override: str) -> bool:
    name = override.lstrip("+~").split("=")[0]
    return any(name == key or name.startswith(f"{key}.") for key in REPLACED)
