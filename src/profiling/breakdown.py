"""Where a step went: computing, communicating with nothing beside it, waiting for data, idle."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import fmean, median

from src.profiling.overlap import Overlap


@dataclass(frozen=True)
class Breakdown:
    """Seconds a step, which they add up to.

    communication: what nothing hides; None where it could not be told from compute, which then holds it as well.
    """

    compute_seconds: float
    communication_seconds: float | None
    data_seconds: float
    idle_seconds: float

    @property
    def step_seconds(self) -> float:
        return self.compute_seconds + (self.communication_seconds or 0.0) + self.data_seconds + self.idle_seconds


Samples = list[list[float]]  # seconds by sample, then rank


def of_timings(seconds: Mapping[str, Samples], overlap: Overlap | None) -> Breakdown:
    """From timings of a step's parts, in which ranks begin together; a part takes as long as its slowest rank.

    seconds: "data": fetching; "synchronized" and, where there is an overlap, "omitting": forward and backward with and
    without communication; "optimizer": its step. Idle is what a rank waits for slower ones, in the mean over the ranks.
    """
    exposed = overlap.exposed.seconds if overlap is not None and overlap.exposed.is_measurable else None
    passes = seconds["synchronized"] if exposed is None else seconds["omitting"]
    return Breakdown(
        compute_seconds=_middle(passes, fmean) + _middle(seconds["optimizer"], fmean),
        communication_seconds=exposed,
        data_seconds=_middle(seconds["data"], fmean),
        idle_seconds=sum(_middle(part, _waiting) for part in (seconds["data"], passes, seconds["optimizer"])),
    )


def _waiting(ranks: list[float]) -> float:
    return max(ranks) - fmean(ranks)


def _middle(samples: Samples, of_ranks: Callable[[list[float]], float]) -> float:
    return median(of_ranks(ranks) for ranks in samples)
