"""Sharding is a value: what is split over the data-parallel axis, and what lives in the host's memory."""

from dataclasses import dataclass

LEVELS = {
    "none": "shards nothing",
    "zero1": "shards optimizer states",
    "zero2": "shards optimizer states and gradients",
    "zero3": "shards parameters",
    "hybrid": "shards parameters inside groups",
}
OFFLOADS = ("none", "optimizer", "all")


@dataclass(frozen=True)
class Sharding:
    """level: a key of LEVELS. shard_size: ranks that share one copy (hybrid only). offload: one of OFFLOADS."""

    level: str = "none"
    shard_size: int | None = None
    offload: str = "none"
