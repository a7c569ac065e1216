"""The shapes that data sets tell without reading anything."""

from pathlib import Path

import numpy as np
import pytest
import torch

from src.batch import Request
from src.data.base import Data
from src.data.cifar10 import CIFAR10
from src.data.digits import Digits
from src.data.loader import MapData
from src.data.mnist import MNIST
from src.data.synthetic import SyntheticImages, SyntheticTokens
from src.data.text import Text
from tests.data.doubles import Points

NOWHERE = "/nowhere"  # examples must not need what lies on a disk


def of_the_sources(data: Data, num: int) -> None:
    train, _ = data.load(torch.device("cpu"), 0)
    [real] = train.stream([Request(np.arange(num), num)], 0)
    example = data.example(num)
    assert example is not None
    for told, given in zip(example, real, strict=True):
        assert (told.shape, told.dtype, told.stride()) == (given.shape, given.dtype, given.stride())


@pytest.mark.parametrize(
    "data",
    [
        Digits([1, 8, 8], 10),
        SyntheticImages([2, 5, 6], 10, num_samples=8, num_test_samples=2),
        SyntheticTokens(100, 7, num_samples=8, num_test_samples=2),
    ],
    ids=lambda data: type(data).__name__,
)
def test_an_example_looks_as_a_micro_batch_does(data: Data) -> None:
    of_the_sources(data, 3)


def test_an_example_of_text_looks_as_a_micro_batch_does(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("to be or not to be, that is the question" * 40)
    of_the_sources(Text(256, 16, [".txt"], root=str(tmp_path)), 3)


@pytest.mark.parametrize(
    ("data", "shape"),
    [
        (MNIST([1, 28, 28], 10, NOWHERE), (4, 1, 28, 28)),
        (CIFAR10([3, 32, 32], 10, NOWHERE), (4, 3, 32, 32)),
        (Text(256, 16, [".txt"], NOWHERE), (4, 16)),
    ],
    ids=lambda value: type(value).__name__,
)
def test_an_example_touches_no_disk_and_takes_no_memory_on_meta(data: Data, shape: tuple[int, ...]) -> None:
    with torch.device("meta"):
        example = data.example(4)
    assert example is not None
    assert example.inputs.is_meta
    assert example.inputs.shape == shape


def test_data_of_ones_own_tell_no_example() -> None:
    points = Points(4)
    assert MapData(points, points, "images").example(4) is None
