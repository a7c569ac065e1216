"""What a profile found, for a reader and for a program; with how it was found."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from src.profiling.breakdown import Breakdown, Samples, of_timings
from src.profiling.probe import overlap_of
from src.profiling.trace import KernelTimes
from src.strategies.base import Support

if TYPE_CHECKING:
    from rich.table import Table


@dataclass(frozen=True)
class Finding:
    """method: what gave the numbers. hidden: how much communication was, in words. facts: further numbers.

    beside_compute: the communication that is counted with compute, in words, where there is any.
    """

    breakdown: Breakdown
    method: str
    hidden: str
    facts: dict[str, float | None]
    beside_compute: str | None = None

    @property
    def record(self) -> dict[str, Any]:
        """As JSON has it; None for what was not measured, or not apart from compute."""
        parts = self.breakdown
        return {
            "step_seconds": parts.step_seconds,
            "compute_seconds": parts.compute_seconds,
            "exposed_comm_seconds": parts.communication_seconds,
            "data_seconds": parts.data_seconds,
            "idle_seconds": parts.idle_seconds,
            **self.facts,
            "method": self.method,
            "hidden": self.hidden,
        }

    def table(self) -> "Table":
        from rich.table import Table

        parts = self.breakdown
        rows = {
            "compute" if self.beside_compute is None else f"compute, and {self.beside_compute}": parts.compute_seconds,
            "communication that nothing hides": parts.communication_seconds,
            "waiting for data": parts.data_seconds,
            "idle": parts.idle_seconds,
            "step": parts.step_seconds,
        }
        made = Table(title="where the step went (mean over the ranks)", title_justify="left")
        made.add_column("part")
        made.add_column("ms", justify="right")
        made.add_column("share", justify="right")
        for name, seconds in rows.items():
            if seconds is not None:
                made.add_row(name, f"{1e3 * seconds:.2f}", f"{seconds / parts.step_seconds:.1%}")
        return made

    def lines(self) -> list[str]:
        return [f"communication hidden: {self.hidden}", f"method: {self.method}"]


def from_timings(seconds: Mapping[str, Samples], strategy_name: str, supports: Support) -> Finding:
    """seconds: of several ranks or one, as `of_timings` takes them; with "alone" where there is "omitting"."""
    count = f"medians of {len(seconds['data'])} samples"
    if "omitting" in seconds:
        return _with_and_without(seconds, supports, count)
    alone = len(seconds["data"][0]) == 1
    cannot = (
        "there is one rank, and nobody to communicate with"
        if alone
        else f"strategy={strategy_name} can't leave out its communication, and on CPUs there are no kernels to look at"
    )
    return Finding(
        of_timings(seconds, None),
        f"timings; {count}",
        f"not measured ({cannot})",
        {},
        None if alone else "communication",
    )


def _with_and_without(seconds: Mapping[str, Samples], supports: Support, count: str) -> Finding:
    overlap = overlap_of(seconds)
    alone, exposed = overlap.communication, overlap.exposed
    inseparable = [] if exposed.is_measurable else [supports.omits]
    beside = [words for words in (*inseparable, supports.omits_not) if words is not None]
    return Finding(
        of_timings(seconds, overlap),
        f"the step with and without {supports.omits}, and these alone; {count}, ± twice their standard error",
        overlap.in_words(),
        {
            "exposed_comm_noise_seconds": exposed.noise_seconds,
            "comm_seconds": alone.seconds if alone.is_measurable else None,
            "comm_noise_seconds": alone.noise_seconds,
            "hidden_comm_seconds": overlap.hidden_seconds,
            "hidden_comm_fraction": overlap.hidden_fraction,
            "hidden_comm_noise_fraction": overlap.noise_fraction,
        },
        " and ".join(beside) or None,
    )


def from_kernels(ranks: list[KernelTimes]) -> Finding:
    """Of every rank's trace, in the mean over them."""
    mean = KernelTimes(*(sum(column) / len(ranks) for column in zip(*ranks, strict=True)))
    fraction = mean.hidden / mean.communication if mean.communication > 0 else None
    if fraction is None:
        words = "not measured (no communication kernel ran)"
    else:
        words = f"{fraction:.0%} ({1e3 * mean.hidden:.2f} of {1e3 * mean.communication:.2f} ms)"
    return Finding(
        Breakdown(mean.compute, mean.exposed, mean.data, mean.idle),
        "GPU kernels' intervals under torch's profiler, which slows the host; copies count as compute",
        words,
        {
            "comm_seconds": mean.communication,
            "hidden_comm_seconds": mean.hidden,
            "hidden_comm_fraction": fraction,
        },
    )
