"""Small models and data whose numbers tests can work out by hand; they come in by `_target_`.

Their constructors take what conf/model/mlp.yaml and conf/data/digits.yaml give, and more.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from src.batch import IGNORED
from src.data.base import ArraySource, Data, Source

VOCABULARY = 11
SEQUENCE = 6


class MaskedTokens(Data):
    """Token sequences of which sample i has i % (SEQUENCE + 1) valid targets; those in `masked` have none."""

    kind = "tokens"

    def __init__(self, num_samples: int = 23, masked: list[int] | None = None, **given: Any) -> None:
        self.num_samples, self.masked = num_samples, masked or []

    def load(self, device: torch.device, seed: int, **given: Any) -> tuple[Source, Source]:
        generator = np.random.default_rng(7)
        tokens = torch.from_numpy(generator.integers(0, VOCABULARY, (self.num_samples, SEQUENCE)))
        targets = torch.from_numpy(generator.integers(0, VOCABULARY, (self.num_samples, SEQUENCE)))
        for sample in range(self.num_samples):
            targets[sample, sample % (SEQUENCE + 1) :] = IGNORED
        targets[self.masked] = IGNORED
        source = ArraySource(tokens, targets, device)
        source.targets_per_sample = None  # they differ, so the trainer has to count
        return source, source


class TokenModel(nn.Module):
    """An embedding and a linear layer."""

    inputs = "tokens"

    def __init__(self, **given: Any) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 8)
        self.head = nn.Linear(8, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.embedding(tokens))


class OverflowingImages(Data):
    """8x8 images of which the samples in `huge` exceed fp16's range."""

    kind = "images"

    def __init__(self, huge: list[int], num_samples: int = 24, **given: Any) -> None:
        self.huge, self.num_samples = huge, num_samples

    def load(self, device: torch.device, seed: int, **given: Any) -> tuple[Source, Source]:
        images = torch.from_numpy(np.random.default_rng(1).standard_normal((self.num_samples, 1, 8, 8), np.float32))
        images[self.huge] = 1e6  # fp16 ends at 65504
        source = ArraySource(images, torch.arange(self.num_samples) % 10, device)
        return source, source


class NormalisedModel(nn.Module):
    """A linear layer behind BatchNorm."""

    inputs = "images"

    def __init__(self, **given: Any) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(self.norm(inputs))


class UnusedHead(nn.Module):
    """Two heads of which forward uses one."""

    inputs = "images"

    def __init__(self, **given: Any) -> None:
        super().__init__()
        self.used = nn.Linear(4, 3)
        self.spare = nn.Linear(4, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.used(inputs)


class ReadsAValue(nn.Module):
    """Its constructor reads a tensor's values, as stochastic depth does, which can't be done without memory."""

    inputs = "images"

    def __init__(self, **given: Any) -> None:
        super().__init__()
        self.rates = [rate.item() for rate in torch.linspace(0, 0.1, 3)]
        self.head = nn.Linear(64, 10)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(images.flatten(1))
