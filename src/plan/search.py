"""What fits: ways to train one model on so many devices, the fastest estimate first.

A roofline: arithmetic at an assumed share of the device's peak, and after it the traffic at an assumed bandwidth. It
ranks; it does not promise. How much of the traffic hides behind arithmetic is not known before it is measured.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import product
from typing import Any

from src.footprint import Footprint, ModelSizes
from src.plan.traffic import moved_bytes
from src.strategies.base import Setting, Strategy

MAX_MICRO_BATCH = 1024  # samples; conf/config.yaml and conf/task/plan.yaml say so

#: Sizes of what a rank computes with: of (strategy, setting, world rank).
SizesOf = Callable[[type[Strategy], Setting, int], ModelSizes]


@dataclass(frozen=True)
class Assumptions:
    """peak_tflops: of a device, dense. efficiency: the share of it that training reaches. bandwidth_gb: of a rank's
    link, GB/s of 10^9 bytes, one way."""

    peak_tflops: float
    efficiency: float
    bandwidth_gb: float


@dataclass(frozen=True)
class Candidate:
    """A way to train, the fullest rank's footprint, and estimates of a step. Seconds."""

    strategy: type[Strategy]
    setting: Setting
    footprint: Footprint
    compute_seconds: float
    traffic_seconds: float

    @property
    def samples_per_second(self) -> float:
        """Of all ranks."""
        setting = self.setting
        batch = setting.micro_batch_size * setting.accumulate * setting.data_parallel_size
        return batch / (self.compute_seconds + self.traffic_seconds)


def degrees_of(strategy: type[Strategy], world_size: int) -> Iterator[dict[str, int]]:
    """The values of a strategy's degrees that divide the world."""
    divisors = [n for n in range(1, world_size + 1) if world_size % n == 0]
    tried = [[n for n in divisors if most is None or n <= most] for most in strategy.degrees.values()]
    for chosen in product(*tried):
        if world_size % math.prod(chosen) == 0:
            yield dict(zip(strategy.degrees, chosen, strict=True))


def candidates(
    ways: Sequence[tuple[type[Strategy], Setting]],
    sizes_of: SizesOf,
    memory_bytes: float,
    assumptions: Assumptions,
    global_batch_size: int | None,
) -> tuple[list[Candidate], Candidate | None]:
    """(those that fit, fastest first; the smallest of those that don't).

    ways: accepted by the strategies, at a micro-batch of one sample; for each, micro-batches that are powers of two
    are tried. global_batch_size: kept, where it is given, by accumulating less.
    """
    fitting: list[Candidate] = []
    smallest: Candidate | None = None
    for strategy, setting in ways:
        for resized in growing(setting, global_batch_size):
            made = estimate(strategy, resized, sizes_of, assumptions)
            if made.footprint.peak.bytes > memory_bytes:
                if smallest is None or made.footprint.peak.bytes < smallest.footprint.peak.bytes:
                    smallest = made
                break
            fitting.append(made)
    return sorted(fitting, key=lambda made: -made.samples_per_second), smallest


def largest_that_fits(
    strategy: type[Strategy], settings: Iterable[Setting], sizes_of: SizesOf, memory_bytes: float
) -> int | None:
    """The last micro-batch, in samples, whose predicted peak fits on every rank; None: not even the first does.

    settings: with ever larger micro-batches, as of `growing`.
    """
    found = None
    for setting in settings:
        kinds = strategy.different_ranks(setting.world_size, setting.arguments)
        peaks = [strategy.footprint(sizes_of(strategy, setting, rank), setting, rank).peak.bytes for rank in kinds]
        if max(peaks) > memory_bytes:
            break
        found = setting.micro_batch_size
    return found


def growing(setting: Setting, global_batch_size: int | None) -> Iterator[Setting]:
    """With micro-batches of 1, 2, 4 ... MAX_MICRO_BATCH samples, as far as the global batch can be made of such."""
    size = 1
    while size <= MAX_MICRO_BATCH:
        resized = with_micro_batch(setting, size, global_batch_size)
        if resized is None:
            return  # nor does a larger power of two divide it
        yield resized
        size *= 2


def with_micro_batch(setting: Setting, size: int, global_batch_size: int | None) -> Setting | None:
    """None where the global batch can't be made of such micro-batches."""
    if global_batch_size is None:
        return replace(setting, micro_batch_size=size)
    accumulate, rest = divmod(global_batch_size, size * setting.data_parallel_size)
    return None if rest or not accumulate else replace(setting, micro_batch_size=size, accumulate=accumulate)


def estimate(strategy: type[Strategy], setting: Setting, sizes_of: SizesOf, assumptions: Assumptions) -> Candidate:
    """Of the fullest and the slowest of the first and the last kind of rank, between which the others lie."""
    kinds = strategy.different_ranks(setting.world_size, setting.arguments)
    sizes = {rank: sizes_of(strategy, setting, rank) for rank in (kinds[0], kinds[-1])}
    found = [strategy.footprint(part, setting, rank) for rank, part in sizes.items()]
    # Recomputing does forward, a third of the arithmetic, once more.
    more = 4 / 3 if setting.activation_checkpointing == "full" else 1
    flops = max(part.flops for part in sizes.values()) * setting.accumulate * more
    busy = flops / (assumptions.peak_tflops * 1e12 * assumptions.efficiency)
    sent = max(traffic_seconds(footprint, setting, assumptions) for footprint in found)
    fullest = max(found, key=lambda footprint: footprint.peak.bytes)
    return Candidate(strategy, setting, fullest, busy / (1 - strategy.idle_share(setting)), sent)


def traffic_seconds(found: Footprint, setting: Setting, assumptions: Assumptions) -> float:
    """Of a step, one collective after the other, each over the ranks of its own axis."""
    return moved_bytes(found, setting) / (assumptions.bandwidth_gb * 1e9)


class Sizes:
    """Sizes by what they depend on, for any micro-batch from those of one and two samples: they grow by the sample."""

    def __init__(self, walk: SizesOf, key: Callable[[type[Strategy], Setting, int], Any]) -> None:
        self.walk, self.key = walk, key
        self.known: dict[Any, tuple[ModelSizes, ModelSizes]] = {}

    def __call__(self, strategy: type[Strategy], setting: Setting, world_rank: int) -> ModelSizes:
        key = self.key(strategy, setting, world_rank)
        if key not in self.known:
            one, two = (self.walk(strategy, replace(setting, micro_batch_size=n), world_rank) for n in (1, 2))
            self.known[key] = (one, two)
        return grown(*self.known[key], setting.micro_batch_size)


def grown(one: ModelSizes, two: ModelSizes, micro_batch_size: int) -> ModelSizes:
    """The sizes for so many samples, from those for one and for two."""

    def line(first: int, second: int) -> int:
        return first + (micro_batch_size - 1) * (second - first)

    numbers: Mapping[str, int] = {
        field.name: line(getattr(one, field.name), getattr(two, field.name))
        for field in fields(one)
        if isinstance(getattr(one, field.name), int)
    }
    backward = tuple(
        a._replace(activations=line(a.activations, b.activations), left=line(a.left, b.left))
        for a, b in zip(one.backward, two.backward, strict=True)
    )
    return replace(one, **numbers, backward=backward)  # type: ignore[arg-type]
