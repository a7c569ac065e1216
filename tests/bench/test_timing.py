"""Real collectives on gloo ranks: their contents are checked, their waiting is timed. ME-.. name reported faults."""

import time
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.profiler import profile

from src.bench.bandwidth import FACTORS
from src.bench.collectives import COLLECTIVES, DTYPES, EMULATED, ROOT
from src.bench.contents import WrongContents
from src.bench.timing import Effort, call, call_checked, equal_parts, measure
from src.world import World
from tests.workers import Pool

ONCE = Effort(warmup=0, iterations=1)


class Late:
    """A call whose work takes `seconds` longer than it does, as only waiting tells. calls: the last such one."""

    def __init__(self, function: Callable[..., Any], seconds: float, calls: int | None = None) -> None:
        self.function, self.seconds, self.calls = function, seconds, calls

    def __call__(self, *args: Any, async_op: bool = False, **kwargs: Any) -> Any:
        work = self.function(*args, async_op=async_op, **kwargs)
        if not async_op:  # the benchmark's own meeting of ranks
            return work
        if self.calls is not None:
            self.calls -= 1
        is_late = self.calls is None or self.calls >= 0
        return LateWork(work, self.seconds if is_late else 0.0)


class LateWork:
    def __init__(self, work: dist.Work, seconds: float) -> None:
        self.work, self.seconds = work, seconds

    def wait(self) -> None:
        time.sleep(self.seconds)
        self.work.wait()


def measure_all(world: World) -> None:
    for dtype in DTYPES:
        for operation in COLLECTIVES:
            row = measure(operation, 10_007, world, Effort(1, 2, dtype))
            whole = 10_007 // DTYPES[dtype].itemsize // world.world_size * world.world_size
            assert (row.operation, row.num_bytes) == (operation, whole * DTYPES[dtype].itemsize)
            assert 0 < row.fastest_seconds <= row.mean_seconds <= row.slowest_seconds
            assert row.bus_gb_per_second == pytest.approx(
                FACTORS[operation](world.world_size) * row.num_bytes / row.mean_seconds / 1e9
            )


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_every_operation_delivers_the_right_contents_in_every_type(pool: Pool, world_size: int) -> None:
    pool.run(world_size, measure_all)


def spoil(world: World, operation: str, on_rank: int) -> str | None:
    """One checked call of which rank `on_rank` gets one element wrong; what is raised here."""
    collective = COLLECTIVES[operation](world, 1000 * world.world_size, torch.float32)
    start = collective.start

    def start_and_spoil() -> list[dist.Work]:
        for work in start():
            work.wait()
        if world.world_rank == on_rank:
            collective.received[-1] += 1
        return []

    with patch.object(collective, "start", start_and_spoil):
        try:
            call_checked(collective, f"{operation} on rank {world.world_rank}")
        except WrongContents as wrong:
            return str(wrong)
    return None


@pytest.mark.parametrize("operation", COLLECTIVES)
def test_one_wrong_element_is_found_on_the_rank_that_received_it(pool: Pool, operation: str) -> None:
    receiver = ROOT if operation in ("reduce", "gather") else 1
    found = pool.run(2, spoil, operation, receiver)
    assert found[1 - receiver] is None
    assert found[receiver].startswith(f"{operation} on rank {receiver}: element ")


def deliver_nothing(world: World) -> str | None:
    """A broadcast of which nothing arrives, measured as the task does."""

    class Done:
        def wait(self) -> None:
            return None

    with patch.object(dist, "broadcast", lambda *args, **kwargs: Done()):
        try:
            # The rank that sends has all that it must have; it would wait for the other in what follows.
            if world.world_rank != ROOT:
                measure("broadcast", 10**6, world, ONCE)
        except WrongContents as wrong:
            return str(wrong)
    return None


def test_a_wrong_content_names_rank_operation_and_size(pool: Pool) -> None:
    _, found = pool.run(2, deliver_nothing)
    assert found.startswith("broadcast of 1,000,000 bytes (fp32, 2 ranks) on rank 1: element 0 of 250000 is -1, and")


def measure_late(world: World, on_rank: int, seconds: float, calls: int | None, effort: Effort) -> float:
    late = Late(dist.all_reduce, seconds if world.world_rank == on_rank else 0.0, calls)
    with patch.object(dist, "all_reduce", late):
        return measure("all_reduce", 4000, world, effort).mean_seconds


def test_the_wait_for_an_asynchronous_work_is_counted_and_the_slowest_rank_counts(pool: Pool) -> None:  # ME-05
    # A rank sleeps 50 ms in wait(); nothing else tells of them.
    for on_rank in (0, 1):
        means = pool.run(2, measure_late, on_rank, 0.05, None, Effort(warmup=1, iterations=3))
        assert means[0] == means[1]
        assert 0.05 <= means[0] < 1


def test_warm_ups_are_not_counted(pool: Pool) -> None:  # ME-05
    # The checked call and two warm-ups sleep 0.4 s each, the three timed calls not at all.
    means = pool.run(2, measure_late, 0, 0.4, 3, Effort(warmup=2, iterations=3))
    assert means[0] < 0.2


def measure_by_fixed_clock(world: World) -> tuple[float, ...]:
    readings = iter(range(1000))
    row = measure("all_reduce", 10**6, world, Effort(2, 4), clock=lambda: float(next(readings)))
    assert row.algorithm_gb_per_second == 1e-3
    return (
        row.mean_seconds,
        row.fastest_seconds,
        row.slowest_seconds,
        row.wall_seconds,
        float(row.bus_gb_per_second or 0),
    )


def test_by_a_clock_of_one_second_a_reading_each_call_takes_one_second(pool: Pool) -> None:  # ME-02
    # Two readings a call: a second between them, and one to the next call. Around four calls: 4 + 3 + 2 seconds.
    # 10^6 bytes in 1 s: 0.001 GB/s, and with two ranks the bus bandwidth of an all_reduce is the same.
    for found in pool.run(2, measure_by_fixed_clock):
        assert found == (1.0, 1.0, 1.0, 9.0, 1e-3)


def beats(world: World) -> int:
    calls: list[None] = []
    measure("all_gather", 4000, world, Effort(2, 3), lambda: calls.append(None))
    return len(calls)


def test_every_call_is_followed_by_a_sign_of_life(pool: Pool) -> None:
    assert pool.run(2, beats) == [7, 7]  # 2 warm-ups, 3 timed, the checked ones before and after


def gloo_runs(world: World) -> dict[str, set[str]]:
    """By operation, what torch's profiler sees gloo run."""
    found = {}
    for operation in COLLECTIVES:
        collective = COLLECTIVES[operation](world, 100 * world.world_size, torch.float32)
        dist.barrier()
        with profile() as seen:
            call(collective)
        found[operation] = {event.key for event in seen.key_averages() if event.key.startswith("gloo:")}
    return found


def test_what_is_said_to_be_emulated_is_and_nothing_else(pool: Pool) -> None:
    for found in pool.run(2, gloo_runs):
        own = {name: {f"gloo:{name}"} for name in COLLECTIVES} | {"send_recv": {"gloo:send", "gloo:recv"}}
        emulated = {("gloo", name) for name in COLLECTIVES if not found[name] & own[name]}
        assert emulated == EMULATED.keys()
        assert found["reduce_scatter"] == {"gloo:all_reduce"}


def test_sizes_are_rounded_down_to_equal_parts() -> None:
    assert equal_parts(10**6, "fp32", 2) == 250_000
    assert equal_parts(10**6, "fp32", 3) == 249_999
    assert equal_parts(10**6, "bf16", 3) == 499_998
    assert equal_parts(15, "fp32", 4) == 0
