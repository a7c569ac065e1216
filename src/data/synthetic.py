"""data=synthetic_images and data=synthetic_tokens: made-up samples that can be learnt, of any shape and number."""

from collections.abc import Iterator, Sequence

import torch

from src.batch import MicroBatch, Request
from src.data.augment import BITS, scramble
from src.data.base import Data, ImageSource, Source, example_images
from src.data.tokens import example_tokens, shifted
from src.errors import Refused

NOISE = 40.0  # standard deviation around a class's prototype, in 1/255
MEAN, STD = 0.5, 0.32  # of the pixels / 255: prototypes uniform over 0 ... 255, and the noise
STEPS = 4  # a row of synthetic tokens goes up by 1 ... 4 at each place
FIRST_TOKENS = 1024  # rows start among this many tokens, so that a few steps of training show


def require_samples(num_samples: int, num_test_samples: int) -> None:
    """Raises Refused where there would be nothing to train on, or to test."""
    for key, value in (("num_samples", num_samples), ("num_test_samples", num_test_samples)):
        if value < 1:
            raise Refused(f"data.{key}={value} leaves an empty data set; choose 1 or more.")


class SyntheticImages(Data):
    """One random image a class, plus noise. The same samples in every run, whatever its seed; held in memory.

    image_shape: (channels, height, width). num_samples, num_test_samples: images to train on, and to test.
    limit: first N training samples. root, num_workers: not needed.
    """

    kind = "images"

    def __init__(
        self,
        image_shape: list[int],
        num_classes: int,
        num_samples: int,
        num_test_samples: int,
        root: str | None = None,
        num_workers: int | None = None,
        limit: int | None = None,
    ) -> None:
        self.image_shape, self.num_classes = list(image_shape), num_classes
        self.num_samples, self.num_test_samples = num_samples, num_test_samples
        self.limit = limit

    def prepare(self) -> None:
        require_samples(self.num_samples, self.num_test_samples)

    def example(self, micro_batch_size: int) -> MicroBatch:
        return example_images(micro_batch_size, self.image_shape)

    def load(
        self, device: torch.device, seed: int, *, data_rank: int = 0, local_size: int = 1
    ) -> tuple[Source, Source]:
        generator = torch.Generator().manual_seed(0)
        prototypes = torch.rand(self.num_classes, *self.image_shape, generator=generator) * 255

        def source(num_samples: int) -> ImageSource:
            labels = torch.arange(num_samples) % self.num_classes
            images = torch.empty(num_samples, *self.image_shape, dtype=torch.uint8)
            for image, label in zip(images, labels.tolist(), strict=True):  # one by one: floats take four times as much
                noise = torch.randn(self.image_shape, generator=generator) * NOISE
                image.copy_((prototypes[label] + noise).round_().clamp_(0, 255))
            channels = self.image_shape[0]
            return ImageSource(images, labels, device, [MEAN] * channels, [STD] * channels)

        test = source(self.num_test_samples)  # first, so that it is the same for every num_samples
        return source(self.num_samples if self.limit is None else min(self.limit, self.num_samples)), test


class SyntheticTokens(Data):
    """Rows of tokens that go up by a step of their own. A sample is made from its id when it is fetched.

    num_samples, num_test_samples: rows to train on, and to test. limit: first N training samples.
    root, num_workers: not needed.
    """

    kind = "tokens"

    def __init__(
        self,
        vocab_size: int,
        sequence_length: int,
        num_samples: int,
        num_test_samples: int,
        root: str | None = None,
        num_workers: int | None = None,
        limit: int | None = None,
    ) -> None:
        if vocab_size < 1 or sequence_length < 1:
            raise ValueError(
                f"data.vocab_size={vocab_size} and data.sequence_length={sequence_length} must both be 1 or more."
            )
        self.vocab_size, self.sequence_length = vocab_size, sequence_length
        self.num_samples, self.num_test_samples = num_samples, num_test_samples
        self.limit = limit

    def prepare(self) -> None:
        require_samples(self.num_samples, self.num_test_samples)

    def example(self, micro_batch_size: int) -> MicroBatch:
        return example_tokens(micro_batch_size, self.sequence_length)

    def load(
        self, device: torch.device, seed: int, *, data_rank: int = 0, local_size: int = 1
    ) -> tuple[Source, Source]:
        num_train = self.num_samples if self.limit is None else min(self.limit, self.num_samples)
        sizes = (self.vocab_size, self.sequence_length, device)
        # Test rows have the ids beyond all training rows'.
        return RowSource(0, num_train, *sizes), RowSource(self.num_samples, self.num_test_samples, *sizes)


class RowSource(Source):
    """Rows of ids first_id ... first_id + num_samples - 1, computed on the device."""

    targets_per_sample: int | None

    def __init__(
        self, first_id: int, num_samples: int, vocab_size: int, sequence_length: int, device: torch.device
    ) -> None:
        self.first_id, self.num_samples = first_id, num_samples
        self.vocab_size, self.device = vocab_size, device
        self.targets_per_sample = sequence_length
        self.places = torch.arange(sequence_length + 1, device=device)

    def stream(self, requests: Sequence[Request], epoch: int) -> Iterator[MicroBatch]:
        for request in requests:
            ids = torch.from_numpy(request.ids).to(self.device, non_blocking=True) + self.first_id
            drawn = scramble(ids & BITS)
            step = drawn % STEPS + 1
            first = (drawn // STEPS) % min(FIRST_TOKENS, self.vocab_size)
            yield shifted((first[:, None] + step[:, None] * self.places) % self.vocab_size, request.num_real)
