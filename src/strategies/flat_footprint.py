"""What FullyShardedDataParallel holds (torch 2.14): flat parameters, gathered and reduced one by one.

Unlike `fully_shard` it keeps a shard of gradients between steps, until the next forward, and puts each flat parameter's
gradient together from those of its pieces, which for a moment takes it twice.
"""

from collections import Counter
from typing import cast

from torch import nn

from src.footprint import FP32_BYTES, Footprint, ModelSizes, Part
from src.strategies.base import Setting
from src.strategies.footprint import BYTES, Shares, on_device, shares_of, states
from src.strategies.unit_footprint import unit_traffic


def wrapped(model: nn.Module, least: int) -> list[nn.Module]:
    """FSDP1's units, from the inside out: the layers of a model that lets nobody split them, else parts by size."""
    if getattr(model, "keeps_units_whole", False):
        return cast(list[nn.Module], model.units())  # type: ignore[operator]
    return wrapped_by_size(model, least)


def wrapped_by_size(model: nn.Module, least: int) -> list[nn.Module]:
    """The modules that torch's size_based_auto_wrap_policy makes units of, from the inside out: parts of at least so
    many parameters that are in no unit yet."""
    units: list[nn.Module] = []

    def wrap(module: nn.Module) -> int:
        """Parameters that are in units now."""
        inside = sum(wrap(child) for child in module.children())
        whole = sum(p.numel() for p in module.parameters())
        lists = nn.ModuleList | nn.ModuleDict | nn.MultiheadAttention
        if module is model or whole - inside < least or isinstance(module, lists):
            return inside
        units.append(module)
        return whole

    wrap(model)
    return units


def flat_footprint(sizes: ModelSizes, setting: Setting) -> Footprint:
    """Of a rank."""
    ranks = 1 if setting.world_size == 1 else shares_of(setting).gradients
    held = states(sizes, setting, Shares(ranks, ranks, ranks))
    in_backward, buffers = flat_walk(sizes, setting, ranks)
    each = bool(setting.arguments.get("sync_each_microbatch", True))
    whole = FP32_BYTES * sizes.trained if setting.accumulate > 1 and not each else 0
    made = held.footprint(
        in_backward + whole,
        "weights, optimizer states + the most of activations, gathered flat parameters and their gradients",
        buffers=Part(buffers, "gathered flat parameters, and their gradients as they are put together and reduced"),
        traffic=unit_traffic(sizes, setting, ranks, each),
    )
    return on_device(made, setting, with_gradients=True)


def flat_walk(sizes: ModelSizes, setting: Setting, ranks: int) -> tuple[int, int]:
    """The most beside the shards: of all, and of buffers alone. Bytes."""
    element = BYTES[setting.precision]
    gathers = ranks > 1 or element == 2
    keeps = setting.sharding.level == "zero2" or not gathers
    order = list(dict.fromkeys(i.unit for i in sizes.backward if i.unit is not None))
    accumulates = setting.accumulate > 1 and bool(setting.arguments.get("sync_each_microbatch", True))
    weights = element * (sizes.num_parameters if setting.sharding.level == "zero2" else sizes.rest) * gathers
    remaining = Counter(interval.unit for interval in sizes.backward)
    # In forward the unit whose turn it is; while the loss is worked out none, and whole states that stay.
    last = 0 if keeps or not order else element * sizes.units[order[0]]
    shards = FP32_BYTES * sizes.trained // ranks if accumulates else 0  # of gradients; else as units are finished
    most, most_buffers = max(sizes.in_forward + weights + last, sizes.in_loss + weights) + shards, 2 * weights
    done: Counter[int | None] = Counter()
    for interval in sizes.backward:
        place = order.index(interval.unit) if interval.unit is not None else None
        near = [] if keeps or place is None else order[place : place + 2]
        gathered = weights + element * sum(sizes.units[unit] for unit in near)
        waiting = element * sum(done.values()) + shards
        most = max(most, interval.activations + gathered + waiting)
        done[interval.unit] += interval.parameter
        remaining[interval.unit] -= 1
        if not remaining[interval.unit]:
            own = done.pop(interval.unit)
            # Its pieces and the whole; then in fp32, where it was not.
            together = max(2 * element, element + FP32_BYTES * (element == 2)) * own
            shard = FP32_BYTES * own // ranks
            waiting = element * sum(done.values()) + shards
            most = max(most, interval.left + gathered + waiting + max(together, FP32_BYTES * own + shard))
            shards += 0 if accumulates else shard
            most_buffers = max(most_buffers, gathered + together)
            if keeps and gathers and interval.unit is not None:
                weights -= element * own
    return most, most_buffers
