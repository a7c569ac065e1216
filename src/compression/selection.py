"""Which values of a flat tensor are the largest by magnitude: exactly, or by a threshold."""

import math

import torch
from torch import Tensor

TAIL = 1000  # sampled values beyond the threshold: their number, hence the density, is known to 1/sqrt(TAIL) = 3 %
AIM = 1.1  # the share of the asked number that a sampled threshold aims at; what is too many is cut exactly
FEWEST = 0.9  # of the asked number; below it, a new threshold is taken
MOST = 3.0  # above it, cutting would cost more than a new threshold
FALL = 0.98  # of the smallest sent magnitude is the next step's threshold


def count_of(ratio: float, numel: int) -> int:
    """Values to send of `numel`: at least one."""
    return max(1, round(ratio * numel))


def largest(values: Tensor, count: int) -> Tensor:
    """The indices (int64, unordered) of the `count` values of largest magnitude; NaN counts as the largest."""
    return torch.topk(values.abs(), count, sorted=False).indices


def sampled_threshold(values: Tensor, count: int, offset: int) -> float:
    """A magnitude that about `count` of `values` exceed, from every so-manyth value, of which the first is `offset`."""
    share = count / values.numel()
    # An odd stride meets every column of a matrix whose width is a power of two.
    stride = max(1, math.floor(values.numel() * share / TAIL)) | 1
    sample = values[offset % stride :: stride].abs()
    return float(torch.topk(sample, count_of(share, sample.numel()), sorted=False).values.min())


class Sampled:
    """Of one bucket after another: a threshold is kept from step to step, and corrected by what it let through."""

    def __init__(self) -> None:
        self.thresholds: dict[str, float] = {}  # by bucket
        self.masks: tuple[Tensor, Tensor] | None = None

    def select(self, bucket: str, values: Tensor, count: int, step: int) -> Tensor:
        """The indices (int64) of at most `count` of `values`, all of about the largest magnitudes; at least FEWEST of
        `count`, unless fewer are not zero. bucket: its name. step: moves the sample."""
        if (threshold := self.thresholds.get(bucket)) is not None:
            found = self.beyond(values, threshold)
            if not FEWEST * count <= found.numel() <= MOST * count:
                threshold = None
        if threshold is None:
            threshold = sampled_threshold(values, min(values.numel(), math.ceil(AIM * count)), step)
            found = self.beyond(values, threshold)
            if found.numel() < FEWEST * count and threshold > 0:
                found = largest(values, count)  # the sample did not look like the whole
                threshold = float(values[found].abs().min())
        if found.numel() > count:
            magnitudes = values[found].abs()
            kept = torch.topk(magnitudes, count, sorted=False)
            found, threshold = found[kept.indices], float(kept.values.min())
        self.learn(bucket, threshold * FALL)
        return found

    def learn(self, bucket: str, threshold: float) -> None:
        if threshold > 0 and math.isfinite(threshold):
            self.thresholds[bucket] = threshold
        else:
            self.thresholds.pop(bucket, None)

    def beyond(self, values: Tensor, threshold: float) -> Tensor:
        """The indices of values of at least this magnitude, or of all but zeros; NaN is beyond everything."""
        if threshold == 0:
            return values.nonzero().squeeze(1)
        below, above = self.masks_for(values)
        torch.lt(values, threshold, out=below)
        torch.gt(values, -threshold, out=above)
        return below.logical_and_(above).logical_not_().nonzero().squeeze(1)

    def masks_for(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Two of the values' shape, kept from bucket to bucket."""
        if self.masks is None or self.masks[0].numel() < values.numel() or self.masks[0].device != values.device:
            self.masks = (
                values.new_empty(values.shape, dtype=torch.bool),
                values.new_empty(values.shape, dtype=torch.bool),
            )
        return self.masks[0][: values.numel()], self.masks[1][: values.numel()]


class ImaginedSampled(Sampled):
    """Of values that nobody knows: what a choice holds, and as many indices as were asked for."""

    def select(self, bucket: str, values: Tensor, count: int, step: int) -> Tensor:
        self.masks_for(values)
        found = values.new_empty(count, dtype=torch.int64)
        magnitudes = values[found].abs()
        kept = torch.topk(magnitudes, count, sorted=False)
        return found[kept.indices]
