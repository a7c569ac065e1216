"""DistributedDataParallel where tensors are fake: what its C++ reducer would read from memory is left out."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from src.strategies import ddp


class ImaginedDDP(DistributedDataParallel):
    """Sends nothing at its start, and never rebuilds its buckets, which would agree on their new order."""

    def __init__(self, module: nn.Module, **options: Any) -> None:
        # A reducer that looks for unused parameters keeps the buckets it has begun with: as large, in another order.
        super().__init__(
            module, **options | {"init_sync": False, "find_unused_parameters": True, "static_graph": False}
        )
        self.register_comm_hook(None, all_reduce_at_once)  # type: ignore[no-untyped-call]


def all_reduce_at_once(state: None, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """The all-reduce of a bucket, and an answer that is there already."""
    dist.all_reduce(bucket.buffer())
    answer: torch.futures.Future[Tensor] = torch.futures.Future()
    answer.set_result(bucket.buffer())
    return answer


@contextmanager
def imagined_wrapper() -> Iterator[None]:
    """`strategy=ddp` wraps its model in `ImaginedDDP`."""
    original = ddp.DistributedDataParallel
    ddp.DistributedDataParallel = ImaginedDDP  # type: ignore[misc]
    try:
        yield
    finally:
        ddp.DistributedDataParallel = original  # type: ignore[misc]
