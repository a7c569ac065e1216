"""DistributedDataParallel where tensors are fake: what its C++ reducer would read from memory is left out."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

MIB = 2**20
Answer = torch.futures.Future[Tensor]


class ImaginedDDP(DistributedDataParallel):
    """Sends nothing at its start, and has the buckets from there on that a real one makes after its first step.

    answer: of a bucket; an all-reduce, unless a communication hook has been registered.
    """

    def __init__(self, module: nn.Module, **options: Any) -> None:
        # Looking for unused parameters, DDP makes its buckets once and for all.
        with nullcontext() if options["find_unused_parameters"] else rebuilt_buckets(options["bucket_cap_mb"]):
            super().__init__(module, **options | {"init_sync": False, "static_graph": False})
        self.reducer = LastingBuckets(self.reducer)  # type: ignore[assignment]
        self.answer: Callable[[Any], Answer] = all_reduced
        super().register_comm_hook(self, answer_at_once)  # type: ignore[no-untyped-call]

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        self.answer = partial(hook, state)


class LastingBuckets:
    """A reducer that keeps the buckets it has begun with: ranks would agree on the order of new ones.

    `_rebuild_buckets` is private in torch 2.14, and DDP calls it in each forward. Of the public options only
    find_unused_parameters keeps it from rebuilding, which walks the graph of each step.
    """

    def __init__(self, reducer: Any) -> None:
        self.reducer = reducer

    def _rebuild_buckets(self) -> bool:
        return False

    def __getattr__(self, name: str) -> Any:
        return getattr(self.reducer, name)


@contextmanager
def replaced(name: str, function: Any) -> Iterator[None]:
    """`function` in the place of torch.distributed's own."""
    original = getattr(dist, name)
    setattr(dist, name, function)
    try:
        yield
    finally:
        setattr(dist, name, original)


def rebuilt_buckets(cap_mb: float) -> AbstractContextManager[None]:
    """DDP begins with one bucket of all parameters; its later ones take gradients as they come, the last layer's first.

    cap_mb: MiB a bucket.
    """
    # Private in torch 2.14, and called by DDP's constructor: no public argument says which parameters share a bucket.
    name = "_compute_bucket_assignment_by_size"
    original = getattr(dist, name)

    def assign(parameters: list[Tensor], limits: list[int], sparse: list[bool]) -> tuple[list[list[int]], list[int]]:
        last = len(parameters) - 1
        buckets, limits = original(parameters[::-1], [int(cap_mb * MIB)], sparse[::-1])
        # From a reversed list into the list; DDP reverses the buckets once more.
        return [[last - place for place in bucket] for bucket in reversed(buckets)], limits[::-1]

    return replaced(name, assign)


def answer_at_once(wrapped: ImaginedDDP, bucket: dist.GradBucket) -> Answer:  # type: ignore[name-defined]
    """An answer that is there already."""
    with answered_all_reduces():
        return wrapped.answer(bucket)


def all_reduced(bucket: dist.GradBucket) -> Answer:  # type: ignore[name-defined]
    dist.all_reduce(bucket.buffer())
    return done(bucket.buffer())


def done(value: Any) -> torch.futures.Future[Any]:
    answer: torch.futures.Future[Any] = torch.futures.Future()
    answer.set_result(value)
    return answer


def answered_all_reduces() -> AbstractContextManager[None]:
    """Their futures hold the tensors, as a real backend's do; the fake one's hold nothing."""
    original = dist.all_reduce

    def all_reduce(tensor: Tensor, *arguments: Any, **named: Any) -> Any:
        work = original(tensor, *arguments, **named)
        return None if work is None else AnsweredWork(tensor)

    return replaced("all_reduce", all_reduce)


class AnsweredWork:
    """What an asynchronous all-reduce returns, over from the start."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        return done([self.tensor])
