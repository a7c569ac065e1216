"""What a data set is: sized, indexed by sample id, and split into training and test samples.

The batch plan decides who reads which ids; a source only fetches them, so no source knows of ranks.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from src.batch import IGNORED, MicroBatch, Request


class Source(ABC):
    """Samples 0 ... num_samples - 1.

    targets_per_sample: valid targets of every sample, where that is one number; None where samples differ,
    in which case the trainer counts them step by step (one small all-reduce more a step).
    """

    num_samples: int
    targets_per_sample: int | None

    @abstractmethod
    def stream(self, requests: Sequence[Request], epoch: int) -> Iterator[MicroBatch]:
        """The micro-batches of `requests`, in that order, on the source's device, padding masked."""


class Data(ABC):
    """A data set. `prepare` runs once, before any rank starts; `load` in each rank."""

    kind: ClassVar[str]  # what a model must take: "images" or "tokens"

    @classmethod
    def gives_positions(cls, arguments: Mapping[str, Any]) -> bool:
        """Whether inputs are (batch, 2, sequence), tokens and their positions, which only some models read.

        arguments: the constructor's.
        """
        return False

    def prepare(self) -> None:
        """Download what is missing and check what is there. Raises Refused with the remedy."""
        return None

    def example(self, micro_batch_size: int) -> MicroBatch | None:
        """The shapes and types of a micro-batch, in zeros; None where they can't be told without reading samples.

        Touches no disk, and makes its tensors by torch's factories, so it works on the meta device and under a fake
        tensor mode.
        """
        return None

    @abstractmethod
    def load(
        self, device: torch.device, seed: int, *, data_rank: int = 0, local_size: int = 1
    ) -> tuple[Source, Source]:
        """(training samples, test samples).

        seed: for what is drawn while fetching, such as augmentation. data_rank, local_size: this rank's place on
        the data-parallel axis and the ranks of this machine; only loader processes need them (seeds, cores).
        """


def example_images(micro_batch_size: int, image_shape: Sequence[int]) -> MicroBatch:
    """What an ImageSource gives, in zeros. image_shape: (channels, height, width)."""
    return MicroBatch(torch.zeros(micro_batch_size, *image_shape), torch.zeros(micro_batch_size, dtype=torch.int64))


def mask_padding(targets: Tensor, num_real: int) -> Tensor:
    """Targets with everything from sample `num_real` on set to -100; the same tensor where nothing is padded."""
    if num_real == len(targets):
        return targets
    targets = targets.clone()
    targets[num_real:] = IGNORED
    return targets


class ArraySource(Source):
    """Samples held in memory, on the rank's device, and fetched a whole micro-batch at a time.

    inputs: (N, ...), e.g. uint8 images (N, channels, height, width). targets: (N, ...), int64.
    """

    targets_per_sample: int | None

    def __init__(self, inputs: Tensor, targets: Tensor, device: torch.device) -> None:
        self.inputs = inputs.to(device)
        self.targets = targets.to(device)
        self.device = device
        self.num_samples = len(inputs)
        self.targets_per_sample = targets[0].numel() if len(targets) else 1

    def stream(self, requests: Sequence[Request], epoch: int) -> Iterator[MicroBatch]:
        for request in requests:
            ids = torch.from_numpy(request.ids).to(self.device, non_blocking=True)
            inputs = self.transform(self.inputs[ids], ids, epoch)
            yield MicroBatch(inputs, mask_padding(self.targets[ids], request.num_real))

    def transform(self, inputs: Tensor, ids: Tensor, epoch: int) -> Tensor:
        """What is done to a micro-batch on the device. inputs: as stored. ids: (micro_batch,)."""
        return inputs


class ImageSource(ArraySource):
    """uint8 images, normalised by mean and standard deviation a channel (of pixels scaled to 0 ... 1)."""

    def __init__(
        self, images: Tensor, labels: Tensor, device: torch.device, mean: Sequence[float], std: Sequence[float]
    ) -> None:
        super().__init__(images, labels, device)
        # (x / 255 - mean) / std as one multiply and one add.
        scale = 1.0 / (255.0 * np.asarray(std))
        shift = -np.asarray(mean) / np.asarray(std)
        self.scale = torch.tensor(scale, dtype=torch.float32, device=device).view(-1, 1, 1)
        self.shift = torch.tensor(shift, dtype=torch.float32, device=device).view(-1, 1, 1)

    def transform(self, inputs: Tensor, ids: Tensor, epoch: int) -> Tensor:
        return inputs * self.scale + self.shift
