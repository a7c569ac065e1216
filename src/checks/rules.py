"""The rules that refuse an experiment before anything is started or written, all of them at once.

Each problem is one line: the choice, the reason, the remedy. No rule names a strategy: what a strategy
can't do stands in its `Support`, what only it refuses in its `problems`.
"""

import os
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from types import NoneType
from typing import Any

import torch
import yaml
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

from src.checks.keys import locate, resolve
from src.checks.ranges import at, range_problems
from src.checks.setting import known_setting, num_local_ranks, strategy_class
from src.data.base import Data
from src.errors import Refused, in_words
from src.precision import PRECISIONS
from src.schedule import Schedule
from src.sharding import LEVELS, OFFLOADS
from src.strategies.base import Setting, Strategy, Support
from src.tracking.base import Tracker

#: What a part must be where that is known.
KINDS: dict[str, type] = {"model": torch.nn.Module, "schedule": Schedule, "strategy": Strategy, "tracking": Tracker}
STRATEGIES = Path(__file__).parent.parent.parent / "conf" / "strategy"


def check(cfg: DictConfig) -> tuple[dict[str, Any], list[str]]:
    """The resolved plain configuration, and what is wrong with it.

    cfg: as composed, with or without Hydra's own node.
    """
    config, unknown, broken = resolve(cfg)
    mismatch = _kind_problems(cfg)
    if mismatch:
        # What a model would take from its kind of data is missing as well: noise beside the one cause.
        unknown, broken = (
            [line for line in found if not line.startswith(("model.", "data."))] for found in (unknown, broken)
        )
        return config, mismatch + unknown + broken
    # A key too many does not keep the rules from being read; a missing or wrong one does.
    return config, unknown + (broken or rule_problems(config))


def rule_problems(config: dict[str, Any]) -> list[str]:
    """What is wrong with a configuration whose keys are right."""
    found = range_problems(config)
    try:
        strategy = strategy_class(config)
    except Refused as refused:
        return found + refused.problems
    setting, unknowns = known_setting(config)
    found += unknowns + _support_problems(setting, strategy)
    if not unknowns:
        found += strategy.problems(setting)
    return list(dict.fromkeys(found + _pairing_problems(config)))


def _support_problems(setting: Setting, strategy: type[Strategy]) -> list[str]:
    """The combination against what the strategy declares."""
    supports, name, sharding = strategy.supports, setting.strategy_name, setting.sharding
    found = []
    for package in supports.packages:
        if find_spec(package) is None:
            found.append(
                f"strategy={name} needs the package {package}, which is not installed. Run: pip install {package}"
            )
    if setting.world_size > 1 and not supports.many_processes:
        others = options_that(lambda other: other.many_processes)
        found.append(
            f"launch.nproc={setting.world_size} starts {setting.world_size} processes, but strategy={name}"
            f" {supports.layout}. Use {others}, or launch.nproc=1."
        )
    level, offload = sharding.level, sharding.offload
    if level in LEVELS and level not in supports.sharding:
        others = options_that(lambda other: level in other.sharding)
        found.append(
            f"sharding={level} {LEVELS[level]}, but strategy={name} {supports.layout}."
            f" Use {others}, or sharding={' or '.join(known for known in LEVELS if known in supports.sharding)}."
        )
    if offload in OFFLOADS and offload not in {"none", *supports.offload}:
        choices = " or ".join(["none", *sorted(supports.offload)])
        found.append(
            f"sharding.offload={offload} is nothing that strategy={name} can do. Use sharding.offload={choices}, or"
            f" {options_that(lambda other: offload in other.offload)}."
        )
    if setting.precision in PRECISIONS and setting.precision not in supports.precision:
        choices = ", ".join(p for p in PRECISIONS if p in supports.precision)
        found.append(f"precision={setting.precision} is nothing that strategy={name} can do; use precision={choices}.")
    if setting.precision == "tf32" and setting.device_type == "cpu":
        found.append(
            "precision=tf32 is a mode of NVIDIA GPUs (Ampere and later), and launch.device is cpu. Use precision=fp32."
        )
    return found + _shard_size_problems(setting)


def options_that(can: Callable[[Support], bool]) -> str:
    """The shipped strategies that can do something, as a remedy: "strategy=a or strategy=b"."""
    options = {path.stem: yaml.safe_load(path.read_text()) for path in sorted(STRATEGIES.glob("*.yaml"))}
    # One without a target of its own is a variant of another that is named here.
    targets = {name: node["_target_"] for name, node in options.items() if "_target_" in node}
    *others, last = [f"strategy={name}" for name, target in targets.items() if can(locate(target).supports)]
    return f"{', '.join(others)} or {last}" if others else last


def _shard_size_problems(setting: Setting) -> list[str]:
    size, world_size = setting.sharding.shard_size, setting.world_size
    if setting.sharding.level != "hybrid":
        if size is not None:
            return [
                f"sharding.shard_size={size} means something for sharding=hybrid only. Use sharding.shard_size=null."
            ]
        return []
    if size is not None and (size < 1 or world_size % size):
        divisors = ", ".join(str(n) for n in range(1, world_size + 1) if world_size % n == 0)
        return [f"sharding.shard_size={size} does not divide the {world_size} ranks. Choose it from {divisors}."]
    return []


def _kind_problems(cfg: DictConfig) -> list[str]:
    """A model for images with data of tokens, or the other way round. Needs nothing resolved but the two targets."""
    targets = [OmegaConf.select(cfg, f"{key}._target_", throw_on_resolution_failure=False) for key in ("model", "data")]
    try:
        model, data = (locate(str(target)) for target in targets)
    except ImportError:
        return []  # said by `resolve`
    takes, gives = getattr(model, "inputs", None), getattr(data, "kind", None)
    told = OmegaConf.select(cfg, "data.kind", throw_on_resolution_failure=False)  # of data of the user's own
    gives = gives or (told if told in ("images", "tokens") else None)
    if takes is None or gives is None or takes == gives:
        return []
    return [
        f"model {targets[0]} takes {takes}, but data {targets[1]} gives {gives}."
        f" Choose a model for {gives}, or data of {takes}."
    ]


def _pairing_problems(config: dict[str, Any]) -> list[str]:
    """Data of a size that the model does not reach."""
    found = []
    for key, what in (("vocab_size", "tokens"), ("sequence_length", "tokens a sample")):
        reach, size = at(config, f"model.{key}"), at(config, f"data.{key}")
        if reach is not None and size is not None and size > reach:
            found.append(
                f"data.{key}={size} {what} are more than model.{key}={reach}."
                f" Use model.{key}={size} or more, or data.{key}={reach} or less."
            )
    return found


def prepare(config: dict[str, Any]) -> None:
    """Fetch the data once, and build what costs little, so that a bad value is refused rather than fails.

    Raises Refused. The parent calls this before any rank starts.
    """
    found = []
    for key in ("schedule", "strategy", "tracking", "task", "model", "optimizer"):
        try:
            with torch.device("meta" if key == "model" else "cpu"):  # a model's shapes without its memory
                built: Any = _build(key, config[key])
            if (kind := KINDS.get(key)) is not None and not isinstance(built, kind | NoneType):
                what = f"a {type(built).__name__}, where a {kind.__name__} belongs"
                found.append(f"{key} ({config[key]['_target_']}) builds {what}. Correct {key}._target_.")
            elif key == "optimizer":
                _try_optimizer(built)
            elif key == "model" and built is not None:
                found += _memory_problems(built, config)
        except Refused as refused:
            found += refused.problems
    if found:
        raise Refused(*found)
    data = _build("data", config["data"])
    if not isinstance(data, Data):
        raise Refused(f"data ({config['data']['_target_']}) builds a {type(data).__name__}; see src/data/base.py.")
    data.prepare()


def _memory_problems(model: torch.nn.Module, config: dict[str, Any]) -> list[str]:
    """A model whose bare weights, drawn once a rank in the host's memory, can't fit this machine, whatever shards them.

    model: on meta. Says nothing of what training takes beyond the weights.
    """
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    ranks = num_local_ranks(config)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if weights * ranks <= memory:
        return []
    return [
        f"model {config['model']['_target_']} has {sum(p.numel() for p in model.parameters()):,} parameters:"
        f" {weights / 2**30:.0f} GiB of weights for each of {ranks} rank(s), on a machine of {memory / 2**30:.0f} GiB."
        " Use a smaller model, fewer ranks a machine (launch.nproc), or a larger machine."
    ]


def _try_optimizer(optimizer: Callable[..., Any]) -> None:
    # The first optimizer of a process imports torch._dynamo (2 s). Here the ranks inherit it.
    try:
        optimizer([torch.nn.Parameter(torch.zeros(1))])
    except Exception as error:  # whatever a constructor makes of values that it did not expect
        raise Refused(f"optimizer can't be built: {in_words(error)}. Correct the optimizer's values.") from error


def _build(key: str, node: dict[str, Any]) -> Any:
    try:
        return instantiate(node, _convert_="all")
    except Exception as error:
        cause = error.__cause__ or error
        if isinstance(cause, Refused):
            raise cause from error
        if key == "model" and not isinstance(cause, ValueError | TypeError):
            return None  # what can't be built without memory (it reads a tensor's values) the ranks build for real
        raise Refused(f"{key} ({node['_target_']}) can't be built: {in_words(cause)}") from error
