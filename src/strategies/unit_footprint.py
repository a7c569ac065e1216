"""What `fully_shard` and `replicate` hold (torch 2.14): units gathered one by one, their gradients reduced one by one.

Read in torch/distributed/fsdp/_fully_shard: a gathering goes into a buffer, and is copied out of it into whole weights;
in backward the next unit is gathered while the current one computes; a finished unit's gradients are copied into an
fp32 buffer, which stays until the next unit's; what is in no unit (embedding, head) is gathered for all of forward and,
once the output's gradient is there, for all of backward, whose end its gradients wait for.
"""

from collections import Counter
from dataclasses import replace

from src.footprint import FP32_BYTES, Footprint, ModelSizes, Part
from src.strategies.base import Setting
from src.strategies.footprint import BYTES, Shares, gradients_as_they_come, on_device, shares_of, states


class UnitWalk:
    """Goes through a step and finds the most that there is beside what is at rest, in bytes.

    ranks: that share a copy; 1: each has its own. keeps: whether units stay gathered between forward and backward.
    deferred: whether whole fp32 gradients of earlier micro-batches wait to be reduced with the last one's.
    """

    def __init__(self, sizes: ModelSizes, setting: Setting, ranks: int, keeps: bool, deferred: bool) -> None:
        self.sizes, self.ranks, self.keeps, self.deferred = sizes, ranks, keeps, deferred
        self.element = BYTES[setting.precision]
        self.accumulates = setting.accumulate > 1
        self.order = list(dict.fromkeys(i.unit for i in sizes.backward if i.unit is not None))
        self.most = self.most_buffers = 0
        self.rest = self.element * sizes.rest
        self.gathered = self.element * sizes.num_parameters if keeps else self.rest

    def see(self, activations: int, buffers: int, gradients: int) -> None:
        self.most = max(self.most, activations + buffers + gradients)
        self.most_buffers = max(self.most_buffers, buffers)

    def go(self) -> None:
        self.forward()
        place, current, rest, finished = -1, 0, 0, 0  # elements of gradients: of the unit, of no unit, reduced
        remaining = Counter(interval.unit for interval in self.sizes.backward)
        for interval in self.sizes.backward:
            if interval.unit is not None and (place < 0 or interval.unit != self.order[place]):
                place, current = place + 1, 0
            waiting = self.element * (rest + current) + self.reduced(finished)
            is_done = place >= 0 and not remaining[self.order[place]]  # then nothing but what is in no unit computes
            gathered = self.gathered + self.next(place) if is_done else self.gathering(place)
            self.see(interval.activations, gathered + self.reducing(place if is_done else place - 1), waiting)
            if interval.unit is None:
                rest += interval.parameter
                continue
            current += interval.parameter
            remaining[interval.unit] -= 1
            if not remaining[interval.unit]:
                self.gathered -= self.element * self.unit(place) if self.keeps else 0
                gathered = self.gathered + self.next(place)
                self.reduce(interval.left, gathered, rest, current, finished, interval.unit)
                finished += current
                current = 0
        # The output stays until backward is over.
        self.reduce(self.sizes.backward[-1].left, 0, 0, rest, finished, None)

    def forward(self) -> None:
        """What is in no unit, in the buffer it is gathered into and out of it; the last unit, and the one before.

        While the loss is worked out nothing is gathered, if it does not stay.
        """
        sizes, earlier = self.sizes, self.reduced(0) + self.reducing(-1)
        self.see(sizes.in_forward, self.gathered, earlier)
        frees = not self.keeps and self.ranks > 1
        self.see(sizes.in_loss, 0 if frees else self.gathered, earlier)
        if self.ranks == 1:
            return
        self.see(sizes.after_loss if frees else sizes.output * self.accumulates, 2 * self.rest, earlier)
        if self.order:
            last = self.element * self.unit(0)
            kept = self.gathered if self.keeps else self.rest + last
            before = sizes.activations * (len(self.order) - 1) // len(self.order)
            self.see(before, kept + last + self.element * self.unit(1), earlier)

    def reduce(self, activations: int, gathered: int, rest: int, current: int, finished: int, unit: int | None) -> None:
        """A unit's gradients are copied into an fp32 buffer, and reduced when all but the last are gone."""
        waiting = self.element * rest + self.reduced(finished)
        buffer, result = FP32_BYTES * current, FP32_BYTES * current // self.ranks
        own = 0 if self.deferred else self.element * current  # else counted in `reduced`
        self.see(activations, gathered + buffer, waiting + own)
        last = [size for size, other in self.sizes.parameters if other == unit][-1:] if self.ranks > 1 else []
        self.see(activations, gathered + buffer, waiting + result + min(own, self.element * sum(last)))

    def unit(self, place: int) -> int:
        """Elements of the unit at a place of backward's order; 0 beyond its ends."""
        return self.sizes.units[self.order[place]] if 0 <= place < len(self.order) else 0

    def next(self, place: int) -> int:
        """The unit that backward comes to next, on its way."""
        return 0 if self.keeps or self.ranks == 1 else self.element * self.unit(place + 1)

    def gathering(self, place: int) -> int:
        """While a unit computes: itself, and the next one."""
        if self.keeps:
            return self.gathered
        return self.gathered + self.element * self.unit(place) + self.next(place)

    def reducing(self, place: int) -> int:
        """The fp32 buffer of a unit's gradients, which stays until the next one's; until the first one's, that of what
        is in no unit, from the micro-batch before."""
        if place < 0:
            return FP32_BYTES * self.sizes.rest if self.accumulates and not self.deferred else 0
        return FP32_BYTES * self.unit(place)

    def reduced(self, finished: int) -> int:
        """Gradients of this micro-batch's finished units, and of all units of micro-batches before it."""
        trained = self.sizes.trained
        if self.deferred:
            return FP32_BYTES * (trained - finished) + FP32_BYTES * finished // self.ranks
        return FP32_BYTES * (trained if self.accumulates else finished) // self.ranks


def part_footprint(sizes: ModelSizes, setting: Setting) -> Footprint:
    """Of a rank that holds a part of each layer, or some of the layers. A lone data rank in fp32 has plain weights."""
    if setting.data_parallel_size > 1 or BYTES[setting.precision] < FP32_BYTES:
        return unit_footprint(sizes, setting)
    return states(sizes, setting, Shares()).footprint(
        gradients_as_they_come(sizes, setting), "weights, optimizer states, and the most of activations and gradients"
    )


def layer_traffic(sizes: ModelSizes, setting: Setting, degree: int) -> dict[str, Part]:
    """Between tensor-parallel ranks: four sums of the stream a unit and micro-batch (Shoeybi et al. 2019)."""
    num_units = len([unit for unit in sizes.units if unit is not None])
    if degree == 1 or not num_units:
        return {}
    # Under sequence parallelism each sum is a reduce-scatter and an all-gather, between which a rank holds its share.
    is_scattered = setting.arguments.get("sequence_parallel", False)
    names = ("reduce_scatter", "all_gather") if is_scattered else ("all_reduce",)
    whole = sizes.stream * (degree if is_scattered else 1)
    count = 4 * num_units * setting.accumulate
    said = f"{count} x {whole:,}: 4 a unit and micro-batch, of what goes from unit to unit"
    return {f"{name} (layers)": Part(count * whole, said) for name in names}


def unit_footprint(sizes: ModelSizes, setting: Setting) -> Footprint:
    """Of a rank of `data_parallel` units, sharded as the setting says, or replicated."""
    level = setting.sharding.level
    ranks = shares_of(setting).gradients
    each = bool(setting.arguments.get("sync_each_microbatch", True))
    deferred = setting.accumulate > 1 and not each
    walk = UnitWalk(sizes, setting, ranks, level in ("none", "zero2"), deferred)
    walk.go()
    held = states(sizes, setting, Shares(ranks, ranks, ranks))
    if deferred:
        whole = f"4 x {sizes.trained:,}, whole while they wait for the last micro-batch"
        held = replace(held, gradients=Part(FP32_BYTES * sizes.trained, whole))
    made = held.footprint(
        walk.most,
        "weights, optimizer states, and the most of activations, gathered units and gradients",
        buffers=Part(walk.most_buffers, "gathered units, and fp32 buffers to reduce gradients in"),
        traffic=unit_traffic(sizes, setting, ranks, each),
    )
    return on_device(made, setting, with_gradients=True)


def unit_traffic(sizes: ModelSizes, setting: Setting, ranks: int, each: bool) -> dict[str, Part]:
    """Of a step. Between ranks that share a copy: gatherings and reductions; between copies: sums of shards."""
    if setting.data_parallel_size == 1:
        return {}
    count = setting.accumulate
    times = count if each else 1
    found = {}
    if ranks > 1:
        gatherings = count * (1 if setting.sharding.level == "zero2" else 2)
        element = BYTES[setting.precision]
        found["all_gather"] = Part(
            gatherings * element * sizes.num_parameters, f"{gatherings} x {element} x {sizes.num_parameters:,} weights"
        )
        found["reduce_scatter"] = Part(
            times * FP32_BYTES * sizes.trained, f"{times} x 4 x {sizes.trained:,} gradients in fp32"
        )
    if ranks < setting.data_parallel_size:
        found["all_reduce"] = Part(
            times * FP32_BYTES * sizes.trained // ranks, f"{times} x 4 x {sizes.trained:,} gradients / {ranks}"
        )
    return found
