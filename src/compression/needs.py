"""What an exchange holds and sends, by formula; beside it stands the trace, which runs the compressor's own code."""

import math
from collections.abc import Sequence
from typing import NamedTuple

Shapes = Sequence[Sequence[int]]  # of the parameters of a bucket


class Needs(NamedTuple):
    """Of one bucket past the warm-up, in bytes. kept: from step to step. once: kept too, for the largest bucket only.

    work: beside that, while the bucket is exchanged. sent: as nccl-tests count, so of an all_gather of all ranks.
    """

    kept: int = 0
    once: int = 0
    work: int = 0
    sent: int = 0


def elements(shapes: Shapes) -> int:
    return sum(math.prod(shape) for shape in shapes)
