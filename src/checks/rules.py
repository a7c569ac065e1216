"""The rules that refuse an experiment before anything is started or written, all of them at once.

Each problem is one line: the choice, the reason, the remedy. No rule names a strategy: what a strategy
can't do stands in its `Support`, what only it refuses in its `problems`.
"""

from importlib.util import find_spec
from typing import Any

from omegaconf import DictConfig, OmegaConf

from src.checks.auto_batch import settle_micro_batch
from src.checks.keys import locate, resolve
from src.checks.pairs import decay_problems, pairing_problems
from src.checks.positions import position_problems
from src.checks.ranges import at, range_problems
from src.checks.remedies import models_with, options_that
from src.checks.setting import known_setting, strategy_class, task_class
from src.checks.trial import on_meta
from src.errors import Refused
from src.evaluation import metric_of
from src.parallel.compiled import compiler_problems
from src.precision import PRECISIONS, Precision
from src.sharding import LEVELS, OFFLOADS
from src.snapshots import MONITORS
from src.strategies.base import Setting, Strategy, Support
from src.task import Task


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
    return config, unknown + (broken or settle_micro_batch(config) + rule_problems(config))


def rule_problems(config: dict[str, Any]) -> list[str]:
    """What is wrong with a configuration whose keys are right."""
    found = range_problems(config)
    try:
        strategy, task = strategy_class(config), task_class(config)
    except Refused as refused:
        return found + refused.problems
    setting, unknowns = known_setting(config)
    found += unknowns + _support_problems(setting, strategy)
    found += _compression_problems(setting, strategy.supports, config["compression"])
    if not unknowns:
        found += strategy.problems(setting)
        found += _resume_problems(task, config)
        found += task.problems({k: v for k, v in config["task"].items() if not k.startswith("_")}, setting)
        found += _trace_problems(setting, strategy, at(config, "task.dry_run"))
        found += _profile_problems(setting, strategy, config["trainer"]["profile_every"])
        found += _model_problems(setting, strategy, config)
        found += _compile_problems(setting, strategy)
    found += decay_problems(config) + pairing_problems(config) + position_problems(config)
    return list(dict.fromkeys(found + _monitor_problems(config)))


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


def _compression_problems(setting: Setting, supports: Support, arguments: dict[str, Any]) -> list[str]:
    """A compressor against the strategy, the precision, and what it says of its own arguments."""
    compressor = setting.compressor
    if compressor is None:
        return []
    name, found = compressor.option(), compressor.problems(arguments)
    if not supports.compresses:
        found.append(
            f"compression={name} stands between gradients and the all-reduce of a strategy that lets it, but"
            f" strategy={setting.strategy_name} {supports.layout}. Use {options_that(lambda other: other.compresses)},"
            " or compression=none."
        )
    if (
        setting.precision in PRECISIONS
        and Precision(setting.precision).needs_scaler
        and not compressor.bears_loss_scale
    ):
        found.append(
            f"compression={name} keeps {compressor.keeps} for the next step, but precision={setting.precision} scales"
            " each step's loss anew and skips steps that overflow. Use precision=bf16, or a compression that keeps"
            " nothing."
        )
    return found


def _model_problems(setting: Setting, strategy: type[Strategy], config: dict[str, Any]) -> list[str]:
    """The model's structure against what the strategy asks of it; built without memory, and only where it asks."""
    carries, compressor = strategy.supports.model_carries, setting.compressor
    if not carries and (compressor is None or compressor.most_values is None):
        return []
    try:
        model = on_meta(config["model"])
    except Refused:
        return []  # said by `prepare`
    if model is None:
        return []
    name = setting.strategy_name
    lacking = {method: words for method, words in carries.items() if not hasattr(model, method)}
    if not lacking:
        return strategy.model_problems(model, setting)
    said = " and ".join(f"{words} ({method})" for method, words in lacking.items())
    return [
        f"model {config['model']['_target_']} does not say {said}, which strategy={name} needs."
        f" Use {models_with(*carries)}, or another strategy."
    ]


def _shard_size_problems(setting: Setting) -> list[str]:
    size, ranks = setting.sharding.shard_size, setting.data_parallel_size
    if setting.sharding.level != "hybrid":
        if size is not None:
            return [
                f"sharding.shard_size={size} means something for sharding=hybrid only. Use sharding.shard_size=null."
            ]
        return []
    if size is not None and (size < 1 or ranks % size):
        divisors = ", ".join(str(n) for n in range(1, ranks + 1) if ranks % n == 0)
        return [f"sharding.shard_size={size} does not divide the {ranks} data ranks. Choose it from {divisors}."]
    return []


def _kind_problems(cfg: DictConfig) -> list[str]:
    """A model for images with data of tokens, or the other way round. Needs nothing resolved but the two targets."""
    targets = [OmegaConf.select(cfg, f"{key}._target_", throw_on_resolution_failure=False) for key in ("model", "data")]
    try:
        model, data = (locate(str(target)) for target in targets)
    except ImportError:
        return []  # said by `resolve`
    takes = getattr(model, "inputs", None)
    gives = _kind_of(data, OmegaConf.select(cfg, "data.kind", throw_on_resolution_failure=False))
    if takes is None or gives is None or takes == gives:
        return []
    return [
        f"model {targets[0]} takes {takes}, but data {targets[1]} gives {gives}."
        f" Choose a model for {gives}, or data of {takes}."
    ]


def _kind_of(data: Any, told: Any) -> str | None:
    """What a data set gives, as far as that is known. data: its class. told: its key `kind`, of data of one's own."""
    return getattr(data, "kind", None) or (told if told in ("images", "tokens") else None)


def _profile_problems(setting: Setting, strategy: type[Strategy], every: int | None) -> list[str]:
    """Measuring what communication adds to a step, where there is none or it can't be left out."""
    if every is None:
        return []
    choice = f"trainer.profile_every={every} compares steps with those without communication between data ranks, but"
    if strategy.supports.omits is None:
        others = options_that(lambda other: other.omits is not None)
        return [f"{choice} strategy={setting.strategy_name} can leave out none. Use {others}, or profile_every=null."]
    if setting.data_parallel_size == 1:
        return [f"{choice} there is only one. Use trainer.profile_every=null, or more ranks."]
    return []


def _trace_problems(setting: Setting, strategy: type[Strategy], is_traced: bool | None) -> list[str]:
    """A strategy whose engine does not run on fake tensors, which a task's dry run takes a step on."""
    if not is_traced or strategy.supports.can_be_traced:
        return []
    return [
        "task.dry_run=true takes a step on fake tensors, on which the engine of"
        f" strategy={setting.strategy_name} does not run. Use task.dry_run=false, which plans by formulas, or"
        f" {options_that(lambda other: other.can_be_traced)}."
    ]


def _compile_problems(setting: Setting, strategy: type[Strategy]) -> list[str]:
    """Compiling where it has not been shown to learn the same, or can't be done."""
    if not setting.compile:
        return []
    if not strategy.supports.compiles:
        return [
            f"trainer.compile=true is not held to equal uncompiled layers under strategy={setting.strategy_name}."
            f" Use {options_that(lambda other: other.compiles)}, or trainer.compile=false."
        ]
    return compiler_problems(setting.device_type)


def _monitor_problems(config: dict[str, Any]) -> list[str]:
    """A value to keep the best checkpoint by that an evaluation on these data does not give."""
    monitor, kind = (
        at(config, "checkpoint.monitor"),
        _kind_of(locate(config["data"]["_target_"]), at(config, "data.kind")),
    )
    if monitor not in MONITORS or kind is None or monitor in ("loss", metric_of(kind)):
        return []
    return [
        f"checkpoint.monitor={monitor}: an evaluation on {kind} gives loss and {metric_of(kind)}."
        f" Use checkpoint.monitor=loss or checkpoint.monitor={metric_of(kind)}."
    ]


def _resume_problems(task: type[Task], config: dict[str, Any]) -> list[str]:
    resume = config["checkpoint"]["resume"]
    if resume is None or task.trains:
        return []
    name = config["task"]["_target_"].split(".")[-2]
    return [f"checkpoint.resume={resume} goes on with a training run, and task={name} is none. Leave it out."]
