"""data=mnist: handwritten digits (LeCun, Cortes and Burges 1998), 60000 to train on and 10000 to test."""

from pathlib import Path

import numpy as np
import torch

from src.batch import MicroBatch
from src.data.base import Data, ImageSource, Source, example_images
from src.data.download import download_once
from src.data.idx import check_idx, read_idx
from src.errors import Refused

#: The files, and the dims of each one's array.
FILES = {
    "train-images-idx3-ubyte": 3,
    "train-labels-idx1-ubyte": 1,
    "t10k-images-idx3-ubyte": 3,
    "t10k-labels-idx1-ubyte": 1,
}
MEAN, STD = 0.1307, 0.3081  # of the training pixels / 255


class MNIST(Data):
    """Grey images of 28x28 pixels in 10 classes.

    root: holds the four idx files, gzipped or not, flat or where torchvision puts them (root/MNIST/raw).
    limit: first N training samples. num_workers: not needed, all is in memory.
    """

    kind = "images"

    def __init__(
        self,
        image_shape: list[int],
        num_classes: int,
        root: str,
        num_workers: int | None = None,
        limit: int | None = None,
    ) -> None:
        if list(image_shape) != [1, 28, 28] or num_classes != 10:
            raise ValueError("data=mnist has images of shape [1, 28, 28] in 10 classes; leave these keys as they are.")
        self.root = Path(root)
        self.limit = limit

    def prepare(self) -> None:
        self.fetch()
        shapes = {name: check_idx(self.find(name), dims) for name, dims in FILES.items()}
        for split in ("train", "t10k"):
            num_images, height, width = shapes[f"{split}-images-idx3-ubyte"]
            [num_labels] = shapes[f"{split}-labels-idx1-ubyte"]
            if num_images != num_labels or not num_images or (height, width) != (28, 28):
                raise Refused(
                    f"data.root={self.root} holds {num_images} {split} images and {num_labels} labels,"
                    f" of {height}x{width} pixels; MNIST's are of 28x28. {self.by_hand}"
                )

    def fetch(self) -> None:
        """Download what is missing. In ranks too: the first of another machine, which shares no disk, does it there."""
        download_once(self.root, self.is_complete, self.download, "mnist", self.by_hand)

    @property
    def by_hand(self) -> str:
        names = ", ".join(f"{name}.gz" for name in FILES)
        return f"Place {names} (as they are, or unpacked) in that folder, or set data.root to where they lie."

    def is_complete(self) -> bool:
        return all(self.candidates(name) for name in FILES)

    def candidates(self, name: str) -> list[Path]:
        """Where the file is: unpacked ones first, which are read faster."""
        folders = [self.root, self.root / "MNIST" / "raw"]
        paths = [folder / f"{name}{suffix}" for suffix in ("", ".gz") for folder in folders]
        return [path for path in paths if path.is_file()]

    def find(self, name: str) -> Path:
        return self.candidates(name)[0]

    def download(self, folder: Path) -> None:
        """All four files into folder/MNIST/raw, their checksums compared."""
        from torchvision import datasets  # 2 to 7 s to import, so only where it is needed

        datasets.MNIST(str(folder), download=True)

    def example(self, micro_batch_size: int) -> MicroBatch:
        return example_images(micro_batch_size, [1, 28, 28])

    def load(
        self, device: torch.device, seed: int, *, data_rank: int = 0, local_size: int = 1
    ) -> tuple[Source, Source]:
        self.fetch()
        return self.source("train", device, self.limit), self.source("t10k", device, None)

    def source(self, split: str, device: torch.device, limit: int | None) -> ImageSource:
        images = torch.from_numpy(read_idx(self.find(f"{split}-images-idx3-ubyte"), 3)[:limit]).unsqueeze(1)
        labels = torch.from_numpy(read_idx(self.find(f"{split}-labels-idx1-ubyte"), 1)[:limit].astype(np.int64))
        return ImageSource(images, labels, device, [MEAN], [STD])
