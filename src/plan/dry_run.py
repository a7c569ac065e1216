"""What a dry run reports: one step of the real strategy as one rank of a large world, on fake tensors."""

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from torch import nn

from src.batch import MicroBatch
from src.memory import memory
from src.plan.trace import Traced, trace
from src.strategies.base import BuildSpec, OptimizerFactory, Strategy

if TYPE_CHECKING:
    from rich.table import Table

#: What a dry run does not see, for those who read one.
NOT_SEEN = (
    "Traced on the CPU's operators with torch's fake process group: every layer, every parameter's real shard."
    " A model that asks for a tensor's value is told 1, or false, and goes on with that."
    " Not seen: workspaces inside kernels, the buffers of gloo and NCCL, the data set, and how long anything takes."
)


def dry_run(
    strategy: Strategy,
    make_model: Callable[[], nn.Module],
    optimizer: OptimizerFactory,
    spec: BuildSpec,
    make_batch: Callable[[], MicroBatch],
    world_ranks: Sequence[int],
) -> list[Traced]:
    """A traced step of each of `world_ranks`; arguments as for `trace`. Raises what the strategy's own code raises."""
    return [trace(strategy, make_model, optimizer, spec, make_batch, world_rank) for world_rank in world_ranks]


def records(steps: Sequence[Traced]) -> list[dict[str, Any]]:
    """The same in plain types, for files."""
    return [asdict(step) for step in steps]


def memory_table(steps: Sequence[Traced], world_size: int) -> "Table":
    """Bytes of each traced rank: what it keeps, and the most that it holds at once."""
    from rich.table import Table

    table = Table(title=f"a step of {world_size} ranks, traced on fake tensors", title_justify="left")
    for name in (
        "rank",
        "parameters",
        "gradients",
        "optimizer states",
        "between steps",
        "peak",
        "peak in",
        "traced in",
    ):
        table.add_column(name, justify="left" if name == "peak in" else "right")
    for step in steps:
        sizes = (step.parameters, step.gradients, step.optimizer_states, step.at_rest, step.peak)
        cells = [memory(size) for size in sizes]
        table.add_row(str(step.world_rank), *cells, step.peak_in, f"{step.seconds:.1f} s")
    return table


def traffic_table(steps: Sequence[Traced]) -> "Table":
    """Collectives of a step by rank: how many, and the bytes they are about."""
    from rich.table import Table

    table = Table(title="communication of a step", title_justify="left")
    for name in ("rank", "collective", "calls", "MB (10⁶ bytes)"):
        table.add_column(name, justify="left" if name == "collective" else "right")
    for step in steps:
        for name, calls in step.calls.items():
            table.add_row(str(step.world_rank), name, f"{calls:,}", f"{step.traffic[name] / 1e6:,.3f}")
    return table
