"""What ranks send one another, so that each element received tells whose it is and which, and whether it is right.

Small whole numbers, exact in fp32, fp16 and bf16 alike however many ranks there are. What is sent on as it is repeats
with a period, from another number on each rank. Of what is summed each element has two ranks that send something for
it, and zeros from all others: a rank left out, counted twice, or another reduction than a sum shows.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

VALUES = 251  # different numbers, all exact in bf16 (8 bits); prime, so that no size of a part hides a shift
STRIDE = 31  # between two ranks' first numbers
TERMS = 7  # different sums
NOTHING = -1  # what stands where nothing has been received; no rank sends it, and no sum gives it
CHUNK = 1 << 20  # elements at a time: what is expected takes no memory beside what is received


class Part(NamedTuple):
    """`length` elements in a row, from element `start` of what `source` sends; None: of the sum over all ranks."""

    source: int | None
    start: int
    length: int


class WrongContents(RuntimeError):  # noqa: N818 - what was found, named like the outcomes in src/errors.py
    """A rank has received something else than was sent."""


def values(world_rank: int) -> Tensor:
    """One period of what a rank sends to be passed on. (VALUES,)"""
    return (STRIDE * world_rank + torch.arange(VALUES)) % VALUES


def terms(world_rank: int, world_size: int) -> Tensor:
    """One period of what a rank sends to be summed over two ranks or more. (TERMS * world_size,)

    For element i, rank i mod n sends 1 + i mod TERMS, and the rank before it 2.
    """
    i = torch.arange(TERMS * world_size)
    return torch.where(i % world_size == world_rank, 1 + i % TERMS, 2 * ((i - 1) % world_size == world_rank))


def sums() -> Tensor:
    """One period of the sum of all ranks' terms. (TERMS,)"""
    return 3 + torch.arange(TERMS)


def stretched(period: Tensor, start: int, length: int) -> Tensor:
    """Elements start to start + length of a period that is repeated for ever."""
    start %= len(period)
    return period.repeat(-(-(start + length) // len(period)))[start : start + length]


def write(target: Tensor, period: Tensor) -> None:
    """Fill a vector with a period repeated."""
    period = period.to(target.device, target.dtype)
    for first in range(0, len(target), CHUNK):
        piece = target[first : first + CHUNK]
        piece.copy_(stretched(period, first, len(piece)))


def mistakes(received: Tensor, parts: list[Part]) -> Iterator[str]:
    """A line for each chunk that is not as expected, naming its first wrong element. received: all parts in a row."""
    first = 0
    for source, start, length in parts:
        period = (sums() if source is None else values(source)).to(received.device, received.dtype)
        for offset in range(0, length, CHUNK):
            found = received[first + offset : first + min(offset + CHUNK, length)]
            right = stretched(period, start + offset, len(found))
            if not torch.equal(found, right):
                index = int((found != right).nonzero()[0])  # NaN differs from everything
                whose = "the sum over all ranks" if source is None else f"what rank {source} sent"
                yield (
                    f"element {first + offset + index} of {len(received)} is {found[index].item():g},"
                    f" and {whose} is {right[index].item():g}"
                )
        first += length


def check(received: Tensor, parts: list[Part], what: str) -> None:
    """Raise WrongContents where `received` is not `parts` one after the other. what: stands before what is wrong."""
    for mistake in mistakes(received, parts):
        raise WrongContents(f"{what}: {mistake}. Do not trust what was trained over this network, or by this library.")
