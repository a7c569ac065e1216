"""The collectives that are measured: what each sends, how it is started, what every rank must have received.

`whole` is nccl-tests' size S in elements: of all_gather, reduce_scatter and gather all ranks' parts together.
"""

from abc import ABC, abstractmethod
from typing import Any, ClassVar, Literal

import torch
import torch.distributed as dist

from src.bench.contents import NOTHING, Part, check, terms, values, write
from src.world import World

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
ROOT = 0  # the rank that broadcasts, and that reduce and gather go to

#: What a backend makes of another operation, so that its number is none of a network's own.
EMULATED = {
    ("gloo", "reduce_scatter"): "emulated by gloo: an all_reduce of the whole, of which each rank keeps its part",
}


class Collective(ABC):
    """One operation and its buffers. All ranks of `world` (two or more) make it, and call its methods alike.

    sends, receives: the whole, or a rank's part of it. receives None: into what was sent. sums: adds what ranks send.
    """

    sends: ClassVar[Literal["whole", "part"]]
    receives: ClassVar[Literal["whole", "part"] | None] = None
    sums: ClassVar[bool] = False

    def __init__(self, world: World, whole: int, dtype: torch.dtype) -> None:
        """whole: a multiple of the number of ranks."""
        assert whole % world.world_size == 0, "every rank has a part of the same size"
        self.world, self.part, self.whole = world, whole // world.world_size, whole
        self.sent = torch.empty(self.elements(self.sends), dtype=dtype, device=world.device)
        self.received = self.sent
        if self.receives is not None:
            self.received = torch.empty(self.elements(self.receives), dtype=dtype, device=world.device)

    def elements(self, share: str) -> int:
        return self.whole if share == "whole" else self.part

    @classmethod
    def buffer_bytes(cls, num_bytes: int, world_size: int) -> int:
        """What the buffers of the rank that holds most take; what the backend takes beside them is its own."""
        shares = [cls.sends] if cls.receives is None else [cls.sends, cls.receives]
        return sum(num_bytes if share == "whole" else num_bytes // world_size for share in shares)

    def fill(self) -> None:
        """Write what is to be sent, and nothing where something is to be received."""
        self.received.fill_(NOTHING)
        rank, size = self.world.world_rank, self.world.world_size
        if self.is_sender():
            write(self.sent, terms(rank, size) if self.sums else values(rank))

    def calm(self) -> None:
        """Before many calls: sums of sums would grow beyond every number; zeros stay what they are."""
        if self.sums:
            self.sent.zero_()

    def is_sender(self) -> bool:
        return True

    @abstractmethod
    def start(self) -> list[dist.Work]:
        """Start it; whoever waits for all of the work has its result."""

    @abstractmethod
    def expected(self) -> list[Part]:
        """What this rank must have received; empty where it receives nothing."""

    def check(self, what: str) -> None:
        """Raise WrongContents unless this rank has received what it must. what: stands before what is wrong."""
        check(self.received, self.expected(), what)


def one(work: Any) -> list[dist.Work]:
    assert work is not None, "this rank is in the group, and the call is asynchronous"
    return [work]


class AllReduce(Collective):
    sends, sums = "whole", True

    def start(self) -> list[dist.Work]:
        return one(dist.all_reduce(self.sent, async_op=True))

    def expected(self) -> list[Part]:
        return [Part(None, 0, self.whole)]


class AllGather(Collective):
    sends, receives = "part", "whole"

    def start(self) -> list[dist.Work]:
        return one(dist.all_gather_single(self.received, self.sent, async_op=True))

    def expected(self) -> list[Part]:
        return [Part(source, 0, self.part) for source in range(self.world.world_size)]


class ReduceScatter(Collective):
    sends, receives, sums = "whole", "part", True

    def start(self) -> list[dist.Work]:
        return one(dist.reduce_scatter_single(self.received, self.sent, async_op=True))

    def expected(self) -> list[Part]:
        return [Part(None, self.world.world_rank * self.part, self.part)]


class Broadcast(Collective):
    sends = "whole"

    def is_sender(self) -> bool:
        return self.world.world_rank == ROOT

    def start(self) -> list[dist.Work]:
        return one(dist.broadcast(self.sent, ROOT, async_op=True))

    def expected(self) -> list[Part]:
        return [Part(ROOT, 0, self.whole)]


class Reduce(Collective):
    sends, sums = "whole", True

    def start(self) -> list[dist.Work]:
        return one(dist.reduce(self.sent, ROOT, async_op=True))

    def expected(self) -> list[Part]:
        return [Part(None, 0, self.whole)] if self.world.world_rank == ROOT else []


class Gather(Collective):
    sends, receives = "part", "whole"

    def elements(self, share: str) -> int:
        return super().elements(share) if share == self.sends or self.world.world_rank == ROOT else 0

    def start(self) -> list[dist.Work]:
        places = list(self.received.chunk(self.world.world_size)) if self.world.world_rank == ROOT else None
        return one(dist.gather(self.sent, places, ROOT, async_op=True))

    def expected(self) -> list[Part]:
        if self.world.world_rank != ROOT:
            return []
        return [Part(source, 0, self.part) for source in range(self.world.world_size)]


class AllToAll(Collective):
    sends, receives = "whole", "whole"

    def start(self) -> list[dist.Work]:
        return one(dist.all_to_all_single(self.received, self.sent, async_op=True))

    def expected(self) -> list[Part]:
        return [Part(source, self.world.world_rank * self.part, self.part) for source in range(self.world.world_size)]


class SendRecv(Collective):
    """Around a ring: each rank sends the whole to the next, and receives the one before's at the same time."""

    sends, receives = "whole", "whole"

    def neighbours(self) -> tuple[int, int]:
        rank, size = self.world.world_rank, self.world.world_size
        return (rank - 1) % size, (rank + 1) % size

    def start(self) -> list[dist.Work]:
        before, after = self.neighbours()
        # One batch: NCCL would wait for the other side of the first before it began the second.
        both = [dist.P2POp(dist.isend, self.sent, after), dist.P2POp(dist.irecv, self.received, before)]
        return dist.batch_isend_irecv(both)

    def expected(self) -> list[Part]:
        return [Part(self.neighbours()[0], 0, self.whole)]


COLLECTIVES: dict[str, type[Collective]] = {
    "all_reduce": AllReduce,
    "all_gather": AllGather,
    "reduce_scatter": ReduceScatter,
    "broadcast": Broadcast,
    "reduce": Reduce,
    "gather": Gather,
    "all_to_all": AllToAll,
    "send_recv": SendRecv,
}
