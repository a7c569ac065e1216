"""data=digits: the handwritten digits of the UCI repository that scikit-learn ships (Alpaydin and Kaynak 1998)."""

import gzip
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch

from src.batch import MicroBatch
from src.data.base import Data, ImageSource, Source, example_images
from src.errors import Refused

NUM_TEST = 300


class Digits(Data):
    """1797 grey images of 8x8 pixels, values 0 ... 16. The last 300 of a fixed shuffle are the test set."""

    kind = "images"

    def __init__(
        self,
        image_shape: list[int],
        num_classes: int,
        root: str | None = None,
        num_workers: int | None = None,
        limit: int | None = None,
    ) -> None:
        if list(image_shape) != [1, 8, 8] or num_classes != 10:
            raise ValueError(
                "data=digits has images of shape [1, 8, 8] in 10 classes; leave data.image_shape as it is."
            )
        self.root = root
        self.limit = limit

    def file(self) -> Path:
        """The table inside scikit-learn; found without importing it, which would take a second."""
        if self.root is not None:
            return Path(self.root) / "digits.csv.gz"
        spec = find_spec("sklearn")
        if spec is None or spec.origin is None:
            raise Refused("data=digits comes with scikit-learn, which is not installed. Run: pip install scikit-learn")
        return Path(spec.origin).parent / "datasets" / "data" / "digits.csv.gz"

    def prepare(self) -> None:
        if not self.file().is_file():
            raise Refused(
                f"data=digits needs {self.file()}, which is not there. Set data.root=null to use scikit-learn's copy."
            )

    def example(self, micro_batch_size: int) -> MicroBatch:
        return example_images(micro_batch_size, [1, 8, 8])

    def load(
        self, device: torch.device, seed: int, *, data_rank: int = 0, local_size: int = 1
    ) -> tuple[Source, Source]:
        with gzip.open(self.file(), "rt") as lines:
            table = np.loadtxt(lines, delimiter=",", dtype=np.uint8)
        # Shuffled by a fixed number, not by the run's seed: every run has the same test set.
        table = table[np.random.default_rng(0).permutation(len(table))]
        # 0 ... 16 spread over 0 ... 255, so that the images are ordinary uint8 ones.
        images = torch.from_numpy((table[:, :64] * 15).reshape(-1, 1, 8, 8))
        labels = torch.from_numpy(table[:, 64].astype(np.int64))
        split = len(table) - NUM_TEST
        num_train = split if self.limit is None else min(split, self.limit)
        mean, std = [0.288], [0.354]  # of the training pixels / 255
        train = ImageSource(images[:num_train], labels[:num_train], device, mean, std)
        return train, ImageSource(images[split:], labels[split:], device, mean, std)
