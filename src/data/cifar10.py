"""data=cifar10: small colour photographs (Krizhevsky 2009), 50000 to train on and 10000 to test."""

from pathlib import Path
from typing import Any

import torch

from src.batch import MicroBatch
from src.data.augment import AugmentedImageSource
from src.data.base import Data, ImageSource, Source, example_images
from src.data.download import download_once
from src.errors import Refused

# Of the training pixels / 255, a channel.
MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)


class CIFAR10(Data):
    """Colour images of 32x32 pixels in 10 classes, read by torchvision.

    root: holds cifar-10-batches-py, or the archive cifar-10-python.tar.gz. augment: random crops and mirror images
    of the training samples. limit: first N training samples. num_workers: not needed, all is in memory.
    """

    kind = "images"

    def __init__(
        self,
        image_shape: list[int],
        num_classes: int,
        root: str,
        augment: bool = True,
        num_workers: int | None = None,
        limit: int | None = None,
    ) -> None:
        if list(image_shape) != [3, 32, 32] or num_classes != 10:
            raise ValueError(
                "data=cifar10 has images of shape [3, 32, 32] in 10 classes; leave these keys as they are."
            )
        self.root = Path(root)
        self.augment = augment
        self.limit = limit

    @property
    def dataset(self) -> Any:
        """torchvision's class: the names, checksums and format of the files."""
        from torchvision.datasets import CIFAR10  # 2 to 7 s to import, so only where it is needed

        return CIFAR10

    def prepare(self) -> None:
        from torchvision.datasets.utils import check_integrity

        self.fetch()
        # The files are pickles, which can run code when read: only ones of the known checksums are.
        for file, checksum in self.files():
            if not check_integrity(str(file), checksum):
                raise Refused(f"{file} is damaged: its MD5 is not {checksum}. Remove it to have it fetched anew.")

    def fetch(self) -> None:
        """Download what is missing. In ranks too: the first of another machine, which shares no disk, does it there."""
        by_hand = f"Place {self.dataset.filename} in that folder, or set data.root to where it lies."
        download_once(self.root, self.is_complete, self.download, "cifar10", by_hand)

    def files(self) -> list[tuple[Path, str]]:
        """(path, MD5) of each batch and of the list of labels."""
        folder = self.root / self.dataset.base_folder
        meta = (self.dataset.meta["filename"], self.dataset.meta["md5"])
        return [
            (folder / name, checksum) for name, checksum in [*self.dataset.train_list, *self.dataset.test_list, meta]
        ]

    def is_complete(self) -> bool:
        return all(file.is_file() for file, _ in self.files())

    def download(self, folder: Path) -> None:
        """The unpacked archive into `folder`; an archive that was placed in root spares the network."""
        from torchvision.datasets.utils import check_integrity

        archive = self.root / self.dataset.filename
        if archive.is_file():
            if not check_integrity(str(archive), self.dataset.tgz_md5):
                raise Refused(f"{archive} is damaged: its MD5 is not {self.dataset.tgz_md5}. Replace it or remove it.")
            (folder / archive.name).symlink_to(archive.resolve())
        self.dataset(str(folder), download=True)
        (folder / archive.name).unlink()

    def example(self, micro_batch_size: int) -> MicroBatch:
        return example_images(micro_batch_size, [3, 32, 32])

    def load(
        self, device: torch.device, seed: int, *, data_rank: int = 0, local_size: int = 1
    ) -> tuple[Source, Source]:
        self.fetch()
        images, labels = self.read(train=True)
        if self.augment:
            train: ImageSource = AugmentedImageSource(images, labels, device, MEAN, STD, seed)
        else:
            train = ImageSource(images, labels, device, MEAN, STD)
        return train, ImageSource(*self.read(train=False), device, MEAN, STD)

    def read(self, train: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """uint8 images, (N, 3, 32, 32), and int64 labels, (N,). torchvision compares the checksums again."""
        stored = self.dataset(str(self.root), train=train)
        limit = self.limit if train else None
        images = torch.from_numpy(stored.data[:limit]).permute(0, 3, 1, 2).contiguous()
        return images, torch.tensor(stored.targets[:limit], dtype=torch.int64)
