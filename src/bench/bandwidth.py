"""What a collective's time comes to, by the definitions of nccl-tests (its doc/PERFORMANCE.md). 1 GB is 10^9 bytes."""

from collections.abc import Callable

#: Of n ranks, by what the algorithm bandwidth is multiplied to give the bus bandwidth: the share of the size that the
#: busiest link carries at least, so that operations and numbers of ranks can be compared with one another and with a
#: link's own rate.
FACTORS: dict[str, Callable[[int], float]] = {
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "all_gather": lambda n: (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
    "broadcast": lambda n: 1.0,
    "reduce": lambda n: 1.0,
    "gather": lambda n: (n - 1) / n,
    "all_to_all": lambda n: (n - 1) / n,
    "send_recv": lambda n: 1.0,
}


def algorithm_bandwidth(num_bytes: int, seconds: float) -> float:
    """GB/s. num_bytes: nccl-tests' S; of all_gather, reduce_scatter and gather all ranks' parts together."""
    return num_bytes / seconds / 1e9


def bus_bandwidth(operation: str, num_bytes: int, seconds: float, world_size: int) -> float | None:
    """GB/s, or None for one rank, which has no bus to send over."""
    if world_size == 1:
        return None
    return algorithm_bandwidth(num_bytes, seconds) * FACTORS[operation](world_size)
