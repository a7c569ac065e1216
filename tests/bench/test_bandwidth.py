"""The arithmetic of bandwidths: nccl-tests' definitions, by hand. The letters ME-.. name reported faults."""

import pytest

from src.bench.bandwidth import FACTORS, algorithm_bandwidth, bus_bandwidth
from src.bench.collectives import COLLECTIVES


def test_a_thousand_million_bytes_in_a_second_are_one_gigabyte_a_second() -> None:  # ME-02
    assert algorithm_bandwidth(10**9, 1.0) == 1.0
    assert algorithm_bandwidth(2**30, 1.0) == 1.073741824  # a GiB is no GB
    assert algorithm_bandwidth(10**6, 0.001) == 1.0


@pytest.mark.parametrize(
    ("operation", "two", "four"),
    [
        ("all_reduce", 1.0, 1.5),  # 2(n - 1)/n: 2/2, 6/4
        ("all_gather", 0.5, 0.75),  # (n - 1)/n: 1/2, 3/4
        ("reduce_scatter", 0.5, 0.75),
        ("gather", 0.5, 0.75),
        ("all_to_all", 0.5, 0.75),
        ("broadcast", 1.0, 1.0),
        ("reduce", 1.0, 1.0),
        ("send_recv", 1.0, 1.0),
    ],
)
def test_bus_bandwidth_is_the_algorithms_by_the_factor_once(operation: str, two: float, four: float) -> None:  # ME-02
    # 3 x 10^9 bytes in 2 s are 1.5 GB/s of algorithm bandwidth.
    assert algorithm_bandwidth(3 * 10**9, 2.0) == 1.5
    assert bus_bandwidth(operation, 3 * 10**9, 2.0, 2) == 1.5 * two
    assert bus_bandwidth(operation, 3 * 10**9, 2.0, 4) == 1.5 * four


def test_one_rank_has_no_bus_bandwidth() -> None:  # ME-02
    assert {bus_bandwidth(operation, 10**9, 1.0, 1) for operation in FACTORS} == {None}


def test_every_collective_has_a_factor() -> None:
    assert FACTORS.keys() == COLLECTIVES.keys()
