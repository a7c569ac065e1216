"""DistributedDataParallel where tensors are fake: what its C++ reducer would read from memory is left out."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel


class ImaginedDDP(DistributedDataParallel):
    """Sends nothing at its start, and never rebuilds its buckets, which would agree on their new order."""

    def __init__(self, module: nn.Module, **options: Any) -> None:
        super().__init__(module, **options | {"init_sync": False, "static_graph": False})
        self.reducer = LastingBuckets(self.reducer)  # type: ignore[assignment]
        self.register_comm_hook(None, all_reduce_at_once)  # type: ignore[no-untyped-call]


class LastingBuckets:
    """A reducer that keeps the buckets it has begun with: as large as the rebuilt ones, in another order."""

    def __init__(self, reducer: Any) -> None:
        self.reducer = reducer

    def _rebuild_buckets(self) -> bool:
        return False

    def __getattr__(self, name: str) -> Any:
        return getattr(self.reducer, name)


def all_reduce_at_once(
    state: None,
    bucket: dist.GradBucket,  # type: ignore[name-defined]
) -> torch.futures.Future[Tensor]:
    """The all-reduce of a bucket, and an answer that is there already."""
    dist.all_reduce(bucket.buffer())
    answer: torch.futures.Future[Tensor] = torch.futures.Future()
    answer.set_result(bucket.buffer())
    return answer
