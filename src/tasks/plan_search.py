"""task=plan task.search=true: every shipped strategy, sharding and degree that this experiment could use."""

import copy
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import yaml
from omegaconf import OmegaConf
from rich.table import Table
from torch import nn

from src.checks.rules import STRATEGIES, options_that
from src.checks.setting import known_setting, strategy_class
from src.plan.formula import walk
from src.plan.search import Assumptions, Candidate, Sizes, candidates, degrees_of
from src.plan.sizes import optimizer_slots
from src.run import Experiment
from src.sharding import LEVELS
from src.strategies.base import Setting, Strategy

MAX_SHOWN = 20
GIB = 2**30
#: What a command line says of it anew.
REPLACED = (
    "task",
    "strategy",
    "sharding",
    "trainer.micro_batch_size",
    "trainer.accumulate",
    "trainer.global_batch_size",
)
#: Ranks of a machine, which share one copy under hybrid sharding.
RANKS_A_MACHINE = 8


def search(
    experiment: Experiment, memory_bytes: float, assumptions: Assumptions
) -> tuple[list[Candidate], Candidate | None]:
    """What fits, the fastest first; what comes nearest of the rest."""
    config = yaml.safe_load((experiment.run_dir / "config.yaml").read_text())
    with torch.device("meta"):
        model = experiment.make_model()
    slots = optimizer_slots(experiment.optimizer)

    def sizes(strategy: type[Strategy], setting: Setting, world_rank: int) -> Any:
        return walk(strategy, experiment.make_model, slots, experiment.data, setting, world_rank)

    def key(strategy: type[Strategy], setting: Setting, world_rank: int) -> Any:
        degrees = tuple(setting.arguments.get(name) for name in strategy.degrees)
        # Strategies that make no part of their own compute with the whole model, in one of two ways.
        own = strategy if "part" in {name for base in strategy.__mro__[:-3] for name in vars(base)} else None
        return own, degrees, world_rank, strategy.casts_weights(setting)

    return candidates(
        list(settings(config, model)),
        Sizes(sizes, key),
        memory_bytes,
        assumptions,
        config["trainer"]["global_batch_size"],
    )


def settings(config: Mapping[str, Any], model: nn.Module) -> Iterator[tuple[type[Strategy], Setting]]:
    """Of all that the strategies accept for this model. model: on the meta device."""
    world_size = known_setting(dict(config))[0].world_size
    for path in sorted(STRATEGIES.glob("*.yaml")):
        node = OmegaConf.to_container(OmegaConf.load(path))
        assert isinstance(node, dict)
        if "_target_" not in node:
            continue
        arguments = {str(name): value for name, value in node.items() if name != "defaults"}
        strategy = strategy_class({"strategy": arguments})
        levels = [level for level in LEVELS if level in strategy.supports.sharding]
        for degrees in degrees_of(strategy, world_size):
            if degrees and all(degree == 1 for degree in degrees.values()) and world_size > 1:
                continue  # another strategy's way
            for level in levels:
                setting = setting_of(config, strategy, {**arguments, **degrees}, level)
                if setting is not None and accepts(strategy, setting, model):
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


def accepts(strategy: type[Strategy], setting: Setting, model: nn.Module) -> bool:
    """Whether a run of it would start here, but for packages to install."""
    supports = strategy.supports
    return (
        (setting.world_size == 1 or supports.many_processes)
        and setting.precision in supports.precision
        and setting.sharding.offload in {"none", *supports.offload}
        and (setting.sharding.level == "none" or setting.data_parallel_size > 1)
        and (setting.sharding.shard_size is None or divides(setting.sharding.shard_size, setting.data_parallel_size))
        and all(hasattr(model, method) for method in supports.model_carries)
        and not strategy.problems(setting)
        and not strategy.model_problems(model, setting)
    )


def divides(shard_size: int, ranks: int) -> bool:
    """Whether there is more than one copy of that many shards."""
    return ranks > shard_size and ranks % shard_size == 0


def command(found: Candidate, run_dir: Path, given: Sequence[str] | None = None) -> str:
    """The command line that trains like this. given: the user's own overrides; None: of the run folder."""
    overrides = yaml.safe_load((run_dir / ".hydra" / "overrides.yaml").read_text()) if given is None else given
    kept = [word for word in overrides if not replaced(word)]
    setting, arguments = found.setting, found.setting.arguments
    words = [f"strategy={setting.strategy_name}", f"sharding={setting.sharding.level}"]
    if setting.sharding.shard_size is not None:
        words.append(f"sharding.shard_size={setting.sharding.shard_size}")
    if setting.sharding.offload != "none":
        words.append(f"sharding.offload={setting.sharding.offload}")
    words += [f"strategy.{name}={arguments[name]}" for name in found.strategy.degrees]
    words += [
        f"trainer.micro_batch_size={setting.micro_batch_size}",
        f"trainer.accumulate={setting.accumulate}",
        "trainer.global_batch_size=null",
    ]
    return " ".join(["python train.py", *kept, *words])


def replaced(override: str) -> bool:
    name = override.lstrip("+~").split("=")[0]
    return any(name == key or name.startswith(f"{key}.") for key in REPLACED)


def table(found: Sequence[Candidate], memory_bytes: float) -> Table:
    """The fastest of them."""
    made = Table(
        title=f"what fits in {memory_bytes / GIB:g} GiB a device, fastest estimate first"
        f" ({min(len(found), MAX_SHOWN)} of {len(found)})",
        title_justify="left",
    )
    for name in ("#", "strategy", "sharding", "degrees", "micro-batch", "accumulate", "global batch"):
        made.add_column(name, justify="left" if name in ("strategy", "sharding", "degrees") else "right")
    for name in ("peak GiB", "compute s", "traffic s", "samples/s"):
        made.add_column(name, justify="right")
    for number, one in enumerate(found[:MAX_SHOWN], 1):
        setting = one.setting
        degrees = " ".join(f"{name}={setting.arguments[name]}" for name in one.strategy.degrees) or "-"
        batch = setting.micro_batch_size * setting.accumulate * setting.data_parallel_size
        made.add_row(
            str(number),
            setting.strategy_name,
            setting.sharding.level,
            degrees,
            str(setting.micro_batch_size),
            str(setting.accumulate),
            str(batch),
            f"{one.footprint.peak.bytes / GIB:.2f}",
            f"{one.compute_seconds:.3g}",
            f"{one.traffic_seconds:.3g}",
            f"{one.samples_per_second:.4g}",
        )
    return made


def assumed(assumptions: Assumptions) -> str:
    """The numbers behind the estimates."""
    return (
        f"Assumed: {assumptions.peak_tflops:g} TFLOP/s a device (task.peak_tflops), of which training reaches"
        f" {assumptions.efficiency:.0%} (task.efficiency); {assumptions.bandwidth_gb:g} GB/s a rank"
        " (task.bandwidth_gb, 10⁹ bytes); traffic after arithmetic, nothing hidden; machines of"
        f" {RANKS_A_MACHINE} ranks; pipelines get enough micro-batches to idle less than a fifth, and their middle"
        " stages are no fuller than their ends."
    )


def nothing_fits(nearest: Candidate | None, memory_bytes: float) -> str:
    """One line with what would be needed."""
    if nearest is None:
        return "No shipped strategy takes this model at this number of ranks and this global batch. Change one of them."
    setting = nearest.setting
    return (
        f"Nothing fits in {memory_bytes / GIB:g} GiB a device: the least is"
        f" {nearest.footprint.peak.bytes / GIB:.4g} GiB, by strategy={setting.strategy_name}"
        f" sharding={setting.sharding.level} at a micro-batch of {setting.micro_batch_size}. Use more ranks"
        " (launch.nproc), larger devices, trainer.activation_checkpointing=full, or sharding.offload=all."
    )


def trace_problems(setting: Setting) -> list[str]:
    """A shipped strategy whose engine does not run on fake tensors."""
    name = setting.strategy_name
    path = STRATEGIES / f"{name}.yaml"
    if not path.exists():
        return []
    strategy = strategy_class({"strategy": yaml.safe_load(path.read_text())})
    if strategy.supports.can_be_traced:
        return []
    return [
        f"task.dry_run=true takes a step on fake tensors, on which the engine of strategy={name} does not run."
        f" Use task.dry_run=false, which plans by formulas, or {options_that(lambda other: other.can_be_traced)}."
    ]
