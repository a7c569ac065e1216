"""Bytes on the links: what a step has sent, and what it would have sent uncompressed.

Counted as a ring does it, which is what gloo and NCCL use for large tensors: in an all-gather each of n ranks passes
on n - 1 shares; in an all-reduce it sends 2 (n - 1) / n of the tensor (Patarasuk and Yuan 2009).
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

INDEX_BYTES = 4  # an int32 tells where a value belongs


def all_reduce_bytes(num_bytes: int, ranks: int) -> int:
    """What each rank sends to sum `num_bytes` over `ranks`."""
    return 2 * (ranks - 1) * num_bytes // ranks


def all_gather_bytes(num_bytes: int, ranks: int) -> int:
    """What each rank sends until all have the `num_bytes` of each."""
    return (ranks - 1) * num_bytes


def break_even_density(ranks: int, value_bytes: int = 4) -> float:
    """The share of values at which gathering values and indices sends as much as the dense all-reduce.

    d* = 8 / (n (4 + index bytes)) for values of 4 bytes: (n - 1) d (4 + i) against 2 (n - 1) / n 4.
    """
    return 2 * value_bytes / (ranks * (value_bytes + INDEX_BYTES))


@dataclass
class Ledger:
    """Of one rank. step_*: the newest exchange of all buckets; total_*: of all steps, resumed ones included.

    sent: bytes that went out. dense: what an all-reduce of the gradients as they are would have sent.
    """

    steps: int = 0
    step_sent: int = 0
    step_dense: int = 0
    total_sent: int = 0
    total_dense: int = 0

    def begin_step(self) -> None:
        self.step_sent = self.step_dense = 0

    def add(self, sent: int, dense: int) -> None:
        """One bucket."""
        self.step_sent += sent
        self.step_dense += dense
        self.total_sent += sent
        self.total_dense += dense

    def copy(self) -> "Ledger":
        return replace(self)

    def totals(self) -> dict[str, int]:
        return {"steps": self.steps, "sent_bytes": self.total_sent, "dense_bytes": self.total_dense}

    def go_on_from(self, totals: Mapping[str, int]) -> None:
        """totals: of `totals`, of an earlier run."""
        self.steps, self.total_sent, self.total_dense = (totals[key] for key in ("steps", "sent_bytes", "dense_bytes"))
