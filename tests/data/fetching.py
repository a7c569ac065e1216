"""Fetching samples in tests, and data sets small enough to write by hand."""

import struct
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from src.batch import MicroBatch, Request
from src.data.base import Source

CPU = torch.device("cpu")


def fetch(source: Source, ids: Sequence[int], num_real: int | None = None, epoch: int = 0) -> MicroBatch:
    """One micro-batch of the given samples."""
    request = Request(np.asarray(ids, dtype=np.int64), len(ids) if num_real is None else num_real)
    [batch] = list(source.stream([request], epoch))
    return batch


def write_idx(path: Path, values: np.ndarray) -> None:
    """An array of uint8 as MNIST's files hold it."""
    header = struct.pack(f">BBBB{values.ndim}I", 0, 0, 8, values.ndim, *values.shape)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(header + values.astype(np.uint8).tobytes())


def write_small_mnist(folder: Path) -> None:
    """The four files, with 20 images to train on and 7 to test."""
    generator = np.random.default_rng(0)
    for split, count in (("train", 20), ("t10k", 7)):
        write_idx(folder / f"{split}-images-idx3-ubyte", generator.integers(0, 256, (count, 28, 28)))
        write_idx(folder / f"{split}-labels-idx1-ubyte", generator.integers(0, 10, count))
