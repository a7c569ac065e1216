"""Random crops and flips of whole micro-batches, the same for a sample whatever the split.

The draws are a function of (seed, epoch, sample id), not of a generator's state: it does not matter which rank
fetches a sample, in which micro-batch, or whether the run was resumed on the way.
"""

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from src.data.base import ImageSource

BITS = 0xFFFFFFFF


def scramble(numbers: Tensor) -> Tensor:
    """A bijection of 32-bit numbers in which every bit depends on every other. numbers: int64, 0 ... 2^32 - 1.

    The two-multiplication hash of C. Wellons' hash-prospector. Both factors are below 2^31, so no product
    overflows an int64.
    """
    numbers = numbers ^ (numbers >> 16)
    numbers = (numbers * 0x21F0AAAD) & BITS
    numbers = numbers ^ (numbers >> 15)
    numbers = (numbers * 0x735A2D97) & BITS
    return numbers ^ (numbers >> 15)


def draws(seed: int, epoch: int, ids: Tensor, count: int) -> Tensor:
    """Independent uniform 32-bit numbers, (count, len(ids)), int64, for each sample of one epoch."""
    keys = np.random.SeedSequence([seed, epoch]).generate_state(count).astype(np.int64)
    keys_on_device = torch.from_numpy(keys).to(ids.device, non_blocking=True)
    return scramble(scramble(ids & BITS) ^ keys_on_device[:, None])


def crop_and_flip(images: Tensor, top: Tensor, left: Tensor, flip: Tensor, padding: int) -> Tensor:
    """Each image padded with black, cut back to its size at its own place, and mirrored where `flip` says so.

    images: (batch, channels, height, width). top, left: (batch,), 0 ... 2 x padding. flip: (batch,), bool.
    """
    batch, _, height, width = images.shape
    padded = F.pad(images, [padding] * 4)
    rows = top[:, None] + torch.arange(height, device=images.device)
    across = torch.arange(width, device=images.device)
    columns = left[:, None] + torch.where(flip[:, None], across.flip(0), across)
    each = torch.arange(batch, device=images.device)
    # Indices around the slice put its dim last: (batch, height, width, channels).
    return padded[each[:, None, None], :, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)


class AugmentedImageSource(ImageSource):
    """Images that are cropped at random with a border of `padding` pixels, and mirrored half of the time."""

    def __init__(
        self,
        images: Tensor,
        labels: Tensor,
        device: torch.device,
        mean: Sequence[float],
        std: Sequence[float],
        seed: int,
        padding: int = 4,
    ) -> None:
        super().__init__(images, labels, device, mean, std)
        self.seed, self.padding = seed, padding

    def transform(self, inputs: Tensor, ids: Tensor, epoch: int) -> Tensor:
        top, left, flip = draws(self.seed, epoch, ids, 3)
        places = 2 * self.padding + 1
        cropped = crop_and_flip(inputs, top % places, left % places, flip % 2 == 1, self.padding)
        return super().transform(cropped, ids, epoch)
