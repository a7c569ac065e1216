"""The arithmetic of a pipeline: which layers a stage gets, how many micro-batches a schedule takes, how long it idles.

Plain numbers only, so that the checks can ask before anything is built; the stages themselves are in `stages`.

    2 ranks, 4 micro-batches, GPipe (Huang et al. 2019):      1F1B (Narayanan et al. 2019, "PipeDream"):
        rank 0  F0 F1 F2 F3 .. .. B0 B1 B2 B3                     F0 F1 .. B0 F2 B1 F3 B2 .. B3
        rank 1  .. F0 F1 F2 F3 B0 B1 B2 B3 ..                     .. F0 B0 F1 B1 F2 B2 F3 B3 ..
"""

from bisect import bisect_left
from itertools import accumulate, pairwise
from typing import Literal, Protocol

ScheduleName = Literal["gpipe", "1f1b", "interleaved_1f1b", "zero_bubble"]

#: Schedules that can give a rank several stages, and how many they get where nobody says.
SEVERAL_STAGES: dict[str, int] = {"interleaved_1f1b": 2, "zero_bubble": 1}


class Cuttable(Protocol):
    """What a model carries so that it can be cut into stages."""

    def layer_parameters(self) -> list[int]:
        """Parameters of each layer, those of what comes before and after counted with the first and the last."""

    def keep_layers(self, layers: range) -> None:
        """Drop all but some consecutive layers, and the ends that don't belong to them; names stay."""


def usual_stages(schedule: str) -> int:
    """Stages a rank where nobody says."""
    return SEVERAL_STAGES.get(schedule, 1)


def split_evenly(counts: list[int], parts: int) -> list[range]:
    """Consecutive layers for each of `parts` stages, at least one each; the largest part's sum is as small as can be.

    counts: what each layer weighs. parts: 1 ... len(counts).
    """
    sums = [0, *accumulate(counts)]
    # best[i]: the smallest possible largest sum of layers 0 ... i-1 over the parts so far, and where the last begins.
    best: list[tuple[int, list[int]]] = [(sums[i], [0]) for i in range(len(counts) + 1)]
    for part in range(1, parts):
        best = [
            min(
                ((max(best[j][0], sums[i] - sums[j]), [*best[j][1], j]) for j in range(part, i)),
                default=(sums[-1] + 1, []),  # too few layers for so many parts
            )
            for i in range(len(counts) + 1)
        ]
    return split_at(best[-1][1][1:], len(counts))


def split_at(points: list[int], layers: int) -> list[range]:
    """Layers 0 ... layers-1, cut before each of `points`, which go up."""
    return [range(start, stop) for start, stop in pairwise([0, *points, layers])]


def stage_layers(counts: list[int], stages: int, points: list[int] | None) -> list[range]:
    """The layers of each stage: cut before `points`, or evenly. counts: parameters of each layer."""
    return split_evenly(counts, stages) if points is None else split_at(points, len(counts))


def stages_of_rank(num_ranks: int, stages_per_rank: int, pipeline_rank: int) -> list[int]:
    """The stages of one rank: they go round, so that each hop is to the next rank."""
    return list(range(pipeline_rank, num_ranks * stages_per_rank, num_ranks))


def takes_microbatches(schedule: str, count: int, num_ranks: int) -> bool:
    """Whether `schedule` can run a step of `count` micro-batches over `num_ranks` pipeline ranks."""
    if schedule == "gpipe":
        return count >= 1
    if schedule == "1f1b":
        return count >= num_ranks
    # The interleaved ones go in rounds of about num_ranks micro-batches, which must be of one size.
    return count >= 1 and count % max(1, count // num_ranks) == 0


def nearest_counts(schedule: str, count: int, num_ranks: int) -> list[int]:
    """The nearest number of micro-batches below and above `count` that `schedule` takes."""
    taken = [n for n in range(1, 2 * (count + num_ranks) + 1) if takes_microbatches(schedule, n, num_ranks)]
    place = bisect_left(taken, count)
    return taken[max(0, place - 1) : place + 1]


def predicted_bubble(schedule: str, num_microbatches: int, num_ranks: int, stages_per_rank: int = 1) -> float | None:
    """The share of a step in which a rank idles, 0 ... 1, of stages that take equally long and send in no time.

    A rank works m micro-batches long and waits while the first one comes down to the last stage and the last one's
    gradient comes back up: (p - 1) / (m + p - 1). With v stages a rank each hop takes 1/v as long (Narayanan et al.
    2021, "Efficient Large-Scale Language Model Training on GPU Clusters", section 2.2). zero_bubble puts off the
    gradients of the weights, a third of the work, and fills two thirds of the wait with them (Qi et al. 2023, "Zero
    Bubble Pipeline Parallelism", ZB-H1).
    None for the schedules of several stages with fewer micro-batches than ranks: too few to fill a round.
    """
    if schedule in SEVERAL_STAGES and num_microbatches < num_ranks:
        return None
    work = num_microbatches * stages_per_rank * (3 if schedule == "zero_bubble" else 1)
    return (num_ranks - 1) / (work + num_ranks - 1)
