"""The place of one rank among the others, and the process group that joins them."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from src.environment import Ranks, num_cores


@dataclass(frozen=True)
class World:
    """One rank's place. device: where its tensors live."""

    world_rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_size: int = 1
    device: torch.device = torch.device("cpu")

    @classmethod
    def of(cls, ranks: Ranks, device_type: str) -> "World":
        device = torch.device("cuda", ranks.local_rank) if device_type == "cuda" else torch.device("cpu")
        return cls(*ranks, device)

    @property
    def is_main(self) -> bool:
        return self.world_rank == 0

    @property
    def backend(self) -> str:
        return "nccl" if self.device.type == "cuda" else "gloo"


def share_out_threads(world: World, users_choice: bool) -> None:
    """Intra-op threads: cores // ranks of this machine, unless the user set OMP_NUM_THREADS.

    One thread a core each would make N ranks fight over the cores N times.
    """
    if not users_choice:
        torch.set_num_threads(max(1, num_cores() // world.local_size))


@contextmanager
def process_group(world: World, timeout_seconds: float, store: dist.Store | None = None) -> Iterator[None]:
    """The default process group. store: where the ranks meet; None: the environment's (MASTER_ADDR, MASTER_PORT)."""
    if world.device.type == "cuda":
        torch.cuda.set_device(world.device)
    if store is None and world.world_size == 1:
        store = dist.HashStore()  # a lone process meets nobody: no port, no name look-up
    dist.init_process_group(
        world.backend,
        store=store,
        rank=world.world_rank,
        world_size=world.world_size,
        timeout=timedelta(seconds=timeout_seconds),
        device_id=world.device if world.device.type == "cuda" else None,
    )
    yield
    # Not in a `finally`: after an error peers may be gone, and leaving together would wait for them.
    dist.destroy_process_group()
