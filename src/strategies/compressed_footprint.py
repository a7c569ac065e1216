"""What DDP holds and sends with a compressor before its all-reduces, by formula."""

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from src.compression.base import Compression
from src.compression.needs import Needs
from src.footprint import FP32_BYTES, Footprint, ModelSizes, Part
from src.strategies.base import Setting
from src.strategies.footprint import States

MIB = 2**20


class Exchange(NamedTuple):
    """Of one bucket. beside: bytes of activations that are alive meanwhile, and of gradients outside of buckets."""

    needs: Needs
    beside: int


def compressed(dense: Footprint, held: States) -> Footprint:
    """`dense`, DDP's own, with what the setting's compressor adds."""
    setting = held.setting
    if setting.compressor is None or not held.sizes.backward:
        return dense
    compression = setting.compressor(**setting.compression)
    found = list(exchanges(held.sizes, setting, compression))
    kept = sum(each.needs.kept for each in found) + max(each.needs.once for each in found)
    work = max(each.needs.work for each in found)
    most = max(each.needs.work + each.beside for each in found)
    sent = sum(each.needs.sent for each in found)
    buffers = dense.communication_buffers
    return replace(
        dense,
        communication_buffers=Part(
            buffers.bytes + kept + work,
            f"{buffers.formula}; {compression.holds}: {kept:,} kept, {work:,} in the largest exchange",
        ),
        peak=Part(
            kept + max(dense.peak.bytes, held.at_rest + held.gradients.bytes + most),
            f"{dense.peak.formula}, or of an exchange; what the compressor keeps",
        ),
        traffic={compression.collective: Part(sent, compression.sent_formula(setting.data_parallel_size))},
    )


def exchanges(sizes: ModelSizes, setting: Setting, compression: Compression) -> Iterator[Exchange]:
    """In backward's order. The reducer closes a bucket with the gradient that reaches its size."""
    cap = int(setting.arguments.get("bucket_cap_mb", 25) * MIB)
    shapes: list[tuple[int, ...]] = []
    size = finished = 0
    for number, interval in enumerate(sizes.backward, 1):
        shapes.append(interval.shape)
        size += FP32_BYTES * interval.parameter
        finished += interval.parameter
        if size >= cap or number == len(sizes.backward):
            gradients = outside_of_buckets(sizes.trained, finished, interval.parameter, setting)
            beside = interval.left + FP32_BYTES * gradients
            yield Exchange(compression.needs(shapes, setting.data_parallel_size), beside)
            shapes, size = [], 0


def outside_of_buckets(trained: int, finished: int, newest: int, setting: Setting) -> int:
    """Gradients beside the buckets, in elements, when `finished` have been taken into them, `newest` of these just now.

    The newest is still there where it was copied. So is, of earlier micro-batches, what has not met its last one.
    """
    accumulates = setting.accumulate > 1
    if setting.arguments.get("gradient_as_bucket_view", True):
        return (trained - finished if accumulates else 0) + newest
    return trained + newest if accumulates else finished
