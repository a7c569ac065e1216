"""What a step sends: a footprint's traffic, completed, and what it comes to on a link."""

from collections.abc import Mapping
from fractions import Fraction

from src.bench.bandwidth import FACTORS
from src.footprint import Footprint, Part
from src.strategies.base import Setting
from src.strategies.rings import LAYERS, operation_of, ring_size

#: What recomputing a unit adds to what split layers send. Forward has two sums a unit, of four in a step (Shoeybi et
#: al. 2019), and the second is not repeated: no backward reads what it gives, and torch's checkpoint stops at the last
#: tensor that one does. Under sequence parallelism the two gatherings of forward come before what is read.
REPEATED = {"all_reduce": Fraction(1, 4), "reduce_scatter": Fraction(1, 4), "all_gather": Fraction(2, 4)}


def step_traffic(found: Footprint, setting: Setting) -> dict[str, Part]:
    """Of a rank in a step, by collective: what its footprint lists, with what recomputation repeats.

    Without what would go to nobody.
    """
    listed = {name: part for name, part in found.traffic.items() if part.bytes and ring_size(name, setting) > 1}
    return recomputed(listed) if setting.activation_checkpointing == "full" else listed


def recomputed(traffic: Mapping[str, Part]) -> dict[str, Part]:
    """Gatherings of shards are not repeated: backward gathers a unit once, for both."""

    def with_repeated(name: str, part: Part) -> Part:
        more = REPEATED[name.removesuffix(LAYERS)] if name.endswith(LAYERS) else Fraction(0)
        return Part(int(part.bytes * (1 + more)), f"{part.formula}; {more} more, recomputed") if more else part

    return {name: with_repeated(name, part) for name, part in traffic.items()}


def moved_bytes(found: Footprint, setting: Setting) -> float:
    """What the busiest link of a rank carries in a step at least: sizes by the factors of nccl-tests."""
    return sum(
        part.bytes * FACTORS[operation_of(name)](ring_size(name, setting))
        for name, part in step_traffic(found, setting).items()
    )
