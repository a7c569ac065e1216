"""task=plan task.search=true: what fits of the other ways to train an experiment, and how that is shown."""

from collections.abc import Sequence
from typing import Any

from rich.table import Table

from src.checks.alternatives import RANKS_A_MACHINE, Alternatives
from src.memory import memory
from src.plan.formula import walk
from src.plan.search import MAX_MICRO_BATCH, Assumptions, Candidate, Sizes, candidates
from src.plan.sizes import optimizer_slots
from src.run import Experiment
from src.strategies.base import Setting, Strategy
from src.strategies.footprint import HasFootprint

MAX_SHOWN = 20
GIB = 2**30


def search(
    experiment: Experiment, found: Alternatives, memory_bytes: float, assumptions: Assumptions
) -> tuple[list[Candidate], Candidate | None]:
    """What fits, the fastest first; what comes nearest of the rest."""
    slots = optimizer_slots(experiment.optimizer)

    def sizes(strategy: type[Strategy], setting: Setting, world_rank: int) -> Any:
        return walk(strategy, experiment.make_model, slots, experiment.data, setting, world_rank)

    return candidates(
        found.ways, Sizes(sizes, what_it_computes_with), memory_bytes, assumptions, found.global_batch_size
    )


def what_it_computes_with(strategy: type[Strategy], setting: Setting, world_rank: int) -> Any:
    """Equal for ranks that compute with the same part of the model in the same precision, whatever they share."""
    cutter = next(base for base in strategy.__mro__ if "part" in vars(base))  # the class whose `part` it is
    # The general one leaves a model whole. What others make of it depends on the arguments that they are given.
    arguments = () if cutter is HasFootprint else tuple(map(repr, setting.arguments.items()))
    return cutter, arguments, world_rank, strategy.casts_weights(setting)


def table(found: Sequence[Candidate], memory_bytes: float) -> Table:
    """The fastest of them."""
    made = Table(
        title=f"what fits in {memory_bytes / GIB:g} GiB a device, fastest estimate first"
        f" ({min(len(found), MAX_SHOWN)} of {len(found)})",
        title_justify="left",
    )
    for name in ("#", "strategy", "sharding", "degrees", "micro-batch", "accumulate", "global batch"):
        made.add_column(name, justify="left" if name in ("strategy", "sharding", "degrees") else "right")
    for name in ("peak", "compute s", "traffic s", "samples/s"):
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
            memory(one.footprint.peak.bytes),
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
        f" {RANKS_A_MACHINE} ranks; micro-batches of a power of two, up to {MAX_MICRO_BATCH}; pipelines get enough"
        " micro-batches to idle less than a fifth, and their middle stages are no fuller than their ends."
    )


def nothing_fits(nearest: Candidate | None, memory_bytes: float) -> str:
    """One line with what would be needed."""
    if nearest is None:
        return "No shipped strategy takes this model at this number of ranks and this global batch. Change one of them."
    setting = nearest.setting
    return (
        f"Nothing fits in {memory_bytes / GIB:g} GiB a device: the least is"
        f" {memory(nearest.footprint.peak.bytes)}, by strategy={setting.strategy_name}"
        f" sharding={setting.sharding.level} at a micro-batch of {setting.micro_batch_size}. Use more ranks"
        " (launch.nproc), larger devices, trainer.activation_checkpointing=full, or sharding.offload=all."
    )
