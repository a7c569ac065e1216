"""The place of one rank among the others, and the process group that joins them."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]

from src.environment import Ranks, num_cores


@dataclass(frozen=True)
class World:
    """One rank's place. device: where its tensors live. is_imagined: there are no other ranks, and no process group."""

    world_rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_size: int = 1
    device: torch.device = torch.device("cpu")
    is_imagined: bool = False

    @classmethod
    def of(cls, ranks: Ranks, device_type: str) -> "World":
        device = torch.device("cuda", ranks.local_rank) if device_type == "cuda" else torch.device("cpu")
        return cls(*ranks, device)

    @property
    def has_peers(self) -> bool:
        """Whether there are other ranks to talk to."""
        return self.world_size > 1 and not self.is_imagined

    @property
    def is_main(self) -> bool:
        return self.world_rank == 0

    @property
    def backend(self) -> str:
        # gloo beside NCCL: what is offloaded to the host's memory has gradients and norms there.
        return "cpu:gloo,cuda:nccl" if self.device.type == "cuda" else "gloo"


def share_out_threads(world: World, users_choice: bool) -> None:
    """Intra-op threads: cores // ranks of this machine, unless OMP_NUM_THREADS is set.

    One thread a core each would make N ranks fight over the cores N times. torchrun itself sets the variable
    to 1 where the user has not, and nobody can tell the two apart: there the choice is made before we start.
    """
    if not users_choice:
        torch.set_num_threads(max(1, num_cores() // world.local_size))


@contextmanager
def one_thread() -> Iterator[None]:
    """No parallel regions while the block runs: a process that forks after one leaves children that hang in theirs.

    GNU OpenMP's pool of threads does not survive a fork (GCC bug 58378).
    """
    previous = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(previous)


@contextmanager
def process_group(world: World, timeout_seconds: float, store: Store) -> Iterator[None]:
    """The default process group. store: where the ranks meet; a HashStore for a lone one, which meets nobody."""
    if world.device.type == "cuda":
        torch.cuda.set_device(world.device)
    dist.init_process_group(
        world.backend,
        store=store,
        rank=world.world_rank,
        world_size=world.world_size,
        timeout=timedelta(seconds=timeout_seconds),
        device_id=world.device if world.device.type == "cuda" else None,
    )
    yield
    # What is left of a wrapper in a cycle (DDP's reducer) holds the group's threads; freed while the interpreter
    # shuts down, they abort the process now and then.
    gc.collect()
    # Not in a `finally`: after an error peers may be gone, and leaving together would wait for them.
    dist.destroy_process_group()
