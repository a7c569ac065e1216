"""How long a collective takes: each call from its start until its work is done, and the slowest rank counts."""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from src.bench.bandwidth import algorithm_bandwidth, bus_bandwidth
from src.bench.collectives import COLLECTIVES, DTYPES, Collective
from src.memory import synchronize
from src.world import World

Clock = Callable[[], float]


@dataclass(frozen=True)
class Effort:
    """How often a collective is called: to warm up, and timed. dtype: one of collectives.DTYPES."""

    warmup: int = 5
    iterations: int = 50
    dtype: str = "fp32"


@dataclass(frozen=True)
class Measured:
    """One operation at one size. num_bytes: what was asked for, rounded down to equal parts of whole elements.

    mean_seconds, fastest_seconds, slowest_seconds: of a call, on the rank whose calls took longest in all.
    wall_seconds: of all timed calls, from when every rank was ready until every rank was done, by readings of its own.
    """

    operation: str
    num_bytes: int
    world_size: int
    iterations: int
    mean_seconds: float
    fastest_seconds: float
    slowest_seconds: float
    wall_seconds: float

    @property
    def algorithm_gb_per_second(self) -> float:
        return algorithm_bandwidth(self.num_bytes, self.mean_seconds)

    @property
    def bus_gb_per_second(self) -> float | None:
        return bus_bandwidth(self.operation, self.num_bytes, self.mean_seconds, self.world_size)


def equal_parts(num_bytes: int, dtype: str, world_size: int) -> int:
    """The elements in `num_bytes`, rounded down to a multiple of the number of ranks; 0 where it is too little."""
    return num_bytes // DTYPES[dtype].itemsize // world_size * world_size


def measure(
    operation: str,
    num_bytes: int,
    world: World,
    effort: Effort,
    after_each: Callable[[], None] = lambda: None,
    clock: Clock = time.perf_counter,
) -> Measured:
    """Check what every rank receives, warm up, time, check again. Collective; the same result on every rank.

    after_each: called after each call, between two readings of the clock. Raises WrongContents on the rank that has it.
    """
    whole = equal_parts(num_bytes, effort.dtype, world.world_size)
    num_bytes = whole * DTYPES[effort.dtype].itemsize
    collective = COLLECTIVES[operation](world, whole, DTYPES[effort.dtype])
    what = f"{operation} of {num_bytes:,} bytes ({effort.dtype}, {world.world_size} ranks) on rank {world.world_rank}"
    call_checked(collective, what)
    after_each()
    collective.calm()
    time_calls(collective, effort.warmup, clock, after_each)
    meet(world)
    begun = clock()
    seconds = time_calls(collective, effort.iterations, clock, after_each)
    meet(world)
    wall_seconds = clock() - begun
    call_checked(collective, what)
    after_each()
    own = [sum(seconds) / effort.iterations, min(seconds), max(seconds), wall_seconds]
    of_ranks = gathered(own, world)
    mean, fastest, slowest, _ = max(of_ranks)
    wall = max(wall for *_, wall in of_ranks)
    return Measured(operation, num_bytes, world.world_size, effort.iterations, mean, fastest, slowest, wall)


def call_checked(collective: Collective, what: str) -> None:
    """One call with contents that tell who sent them."""
    collective.fill()
    call(collective)
    collective.check(what)


def time_calls(collective: Collective, count: int, clock: Clock, after_each: Callable[[], None]) -> list[float]:
    """Seconds of each of `count` calls on this rank, the waiting for the work and for the device in them."""
    seconds = []
    for _ in range(count):
        begun = clock()
        call(collective)
        seconds.append(clock() - begun)
        after_each()
    return seconds


def call(collective: Collective) -> None:
    """Start it and wait until its result is there."""
    for work in collective.start():
        work.wait()
    synchronize(collective.world.device)  # NCCL's wait() only lets the stream wait


def meet(world: World) -> None:
    """Wait for all ranks, and for what their devices still do."""
    dist.all_reduce(torch.zeros(1, device=world.device))
    synchronize(world.device)


def gathered(numbers: list[float], world: World) -> list[list[float]]:
    """Every rank's numbers, by rank."""
    table = torch.zeros(world.world_size, len(numbers), dtype=torch.float64, device=world.device)
    table[world.world_rank] = torch.tensor(numbers, dtype=torch.float64)
    dist.all_reduce(table)
    return table.tolist()
