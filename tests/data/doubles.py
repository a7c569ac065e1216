"""Data sets whose downloads are recorded, fail or die, and ones to be loaded; they come in by `_target_`."""

import os
import random
import signal
import time
from pathlib import Path
from urllib.error import URLError

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from src.data.mnist import MNIST
from tests.data.fetching import write_small_mnist


class RecordedMNIST(MNIST):
    """Notes each download in a file beside its root, and takes its time, so that others come in between."""

    def download(self, folder: Path) -> None:
        with open(f"{self.root}.downloads", "a") as record:
            record.write(f"{os.getpid()}\n")
        time.sleep(0.3)
        write_small_mnist(folder / "MNIST" / "raw")


class UnreachableMNIST(MNIST):
    """As on a machine without network."""

    def download(self, folder: Path) -> None:
        raise URLError("no route to host")


class KilledMNIST(MNIST):
    """Dies with half of the files on the disk."""

    def download(self, folder: Path) -> None:
        write_small_mnist(folder)
        os.kill(os.getpid(), signal.SIGKILL)


class Points(Dataset):
    """num_samples points of class id % 3, each drawn anew from all three generators whenever it is fetched."""

    def __init__(self, num_samples: int, noise: float = 0.1, masked: bool = False) -> None:
        self.num_samples, self.noise, self.masked = num_samples, noise, masked

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        drawn = [torch.rand(()).item(), np.random.rand(), random.random()]
        point = torch.nn.functional.one_hot(torch.tensor(index % 3), 3) + self.noise * torch.tensor(drawn)
        return point.float().view(1, 1, 3), -100 if self.masked and index % 2 else index % 3


class WorkerSeeds(Dataset):
    """Samples that hold the seed of the worker that fetched them."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        info = get_worker_info()
        assert info is not None
        return torch.tensor([info.seed, os.getpid()]), 0


class Broken(Points):
    """One sample can't be read."""

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        if index == 5:
            raise ValueError("sample 5 is unreadable")
        return super().__getitem__(index)


class Stream(IterableDataset):
    """No length, no ids."""

    def __iter__(self):
        return iter([(torch.zeros(1), 0)])
