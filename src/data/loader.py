"""Map-style data sets of one's own, through torch's DataLoader.

conf/data/photographs.yaml, chosen with data=photographs:

    _target_: src.data.loader.MapData
    image_shape: [3, 64, 64]
    num_classes: 12
    train: {_target_: mine.Photographs, split: train}
    test: {_target_: mine.Photographs, split: test}
"""

import os
import random
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset

from src.batch import Ids, MicroBatch, Request
from src.data.base import Data, Source, mask_padding
from src.environment import num_cores
from src.errors import Refused
from src.stopping import STOPPING

MOST_WORKERS = 8  # that are started unasked, however many cores there are: each may hold a copy of the data


class MapData(Data):
    """Two map-style data sets, given as nodes with a `_target_`.

    train, test: `__len__` and `__getitem__(id)` that returns (input, target): arrays of one shape, targets integer,
    -100 where nothing is to be predicted. kind: "images" or "tokens", what a model must take. image_shape,
    num_classes, vocab_size, sequence_length: for models that interpolate them. num_workers: loader processes of a
    rank; None: as many as its share of the cores leaves free. limit: first N training samples.
    """

    def __init__(
        self,
        train: Dataset,
        test: Dataset,
        kind: Literal["images", "tokens"] = "images",
        image_shape: list[int] | None = None,
        num_classes: int | None = None,
        vocab_size: int | None = None,
        sequence_length: int | None = None,
        root: str | None = None,
        num_workers: int | None = None,
        limit: int | None = None,
    ) -> None:
        self.train, self.test = train, test
        self.kind = kind  # type: ignore[misc]
        self.num_workers, self.limit = num_workers, limit

    def prepare(self) -> None:
        for key, dataset in (("train", self.train), ("test", self.test)):
            if isinstance(dataset, IterableDataset):
                raise Refused(
                    f"data.{key} is an IterableDataset: it has no length and no sample ids, so no plan can share it out"
                    " among ranks of equal work, nor resume it. Use a map-style Dataset (__len__, __getitem__)."
                )
            if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")) or isinstance(dataset, dict):
                raise Refused(f"data.{key} is no map-style Dataset: a {type(dataset).__name__}. Give it a _target_.")
            if not len(dataset):
                raise Refused(f"data.{key} ({type(dataset).__name__}) is empty. Give it at least one sample.")

    def load(
        self, device: torch.device, seed: int, *, data_rank: int = 0, local_size: int = 1
    ) -> tuple[Source, Source]:
        workers = default_workers(local_size) if self.num_workers is None else self.num_workers
        train: Dataset = self.train
        if self.limit is not None:
            train = Subset(train, range(min(self.limit, len(train))))  # type: ignore[arg-type]
        return (
            LoaderSource(train, device, seed, data_rank, workers),
            LoaderSource(self.test, device, seed, data_rank, workers),
        )


def default_workers(local_size: int) -> int:
    """Loader processes for one of `local_size` ranks: its share of the cores less the one it computes on.

    None where there is no such core: on CPUs the ranks keep all of them busy, and a worker would only compete.
    """
    return min(MOST_WORKERS, max(0, num_cores() // local_size - 1))


class LoaderSource(Source):
    """Fetches the samples of a map-style data set in `num_workers` processes, or in this one.

    Seeds: what a sample draws by itself depends on (seed, epoch, sample id) alone, see SeededSamples. What a worker
    draws besides (in a `worker_init_fn`'s place) is different in every worker of every data rank.
    """

    targets_per_sample: int | None = None  # any number may be -100

    def __init__(self, dataset: Dataset, device: torch.device, seed: int, data_rank: int, num_workers: int) -> None:
        self.dataset, self.device = dataset, device
        self.seed, self.data_rank, self.num_workers = seed, data_rank, num_workers
        self.num_samples = len(dataset)  # type: ignore[arg-type]

    def loader(self, requests: Sequence[Request], epoch: int) -> DataLoader:
        """A loader whose batches are the requests, in order. torch seeds its workers from the generator."""
        words = np.random.SeedSequence([self.seed, epoch, self.data_rank]).generate_state(1, np.uint64)
        return DataLoader(
            SeededSamples(self.dataset, self.seed, epoch),
            batch_sampler=[request.ids for request in requests],  # type: ignore[arg-type, misc]
            num_workers=self.num_workers,
            pin_memory=self.device.type == "cuda",
            generator=torch.Generator().manual_seed(int(words[0])),
            worker_init_fn=leave_signals_to_parent,
        )

    def stream(self, requests: Sequence[Request], epoch: int) -> Iterator[MicroBatch]:
        batches = iter(self.loader(requests, epoch))
        try:
            for request in requests:
                inputs, targets = pair(next(batches))
                yield MicroBatch(
                    inputs.to(self.device, non_blocking=True),
                    mask_padding(targets.to(self.device, non_blocking=True), request.num_real),
                )
        finally:
            # Also when the loop stops or fails early. Dropping the iterator would do, but for an error's traceback,
            # which keeps it alive.
            if self.num_workers:
                batches._shutdown_workers()  # type: ignore[attr-defined]


class SeededSamples(Dataset):
    """Seeds torch, numpy and random from (seed, epoch, sample id) before each sample, and restores them after.

    So random augmentation of any data set is the same on one process and on many, with any number of workers, and
    after a resume. Generators that the data set made for itself are out of reach.
    """

    def __init__(self, dataset: Dataset, seed: int, epoch: int) -> None:
        self.dataset, self.seed, self.epoch = dataset, seed, epoch

    def __getitems__(self, ids: Ids) -> list[Any]:
        """What torch's loader calls for a whole batch."""
        with random_state_kept():
            return [self[int(sample_id)] for sample_id in ids]

    def __getitem__(self, sample_id: int) -> Any:
        words = np.random.SeedSequence([self.seed, self.epoch, sample_id]).generate_state(3)
        torch.default_generator.manual_seed(int(words[0]))  # torch.manual_seed would reseed the GPUs too
        np.random.seed(words[1])
        random.seed(int(words[2]))
        return self.dataset[sample_id]


@contextmanager
def random_state_kept() -> Iterator[None]:
    """Leaves the process's generators as it found them: without workers, dropout draws from the same ones."""
    states = torch.get_rng_state(), np.random.get_state(), random.getstate()
    try:
        yield
    finally:
        torch.set_rng_state(states[0])
        np.random.set_state(states[1])
        random.setstate(states[2])


def leave_signals_to_parent(worker_id: int) -> None:
    """A terminal and many a scheduler signal every process; the rank needs its workers until it has saved.

    It ends them by a SIGTERM of its own, and only the kernel tells that from another's.
    """
    for number in STOPPING:
        if number != signal.SIGTERM:
            signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    threading.Thread(target=leave_when_told_by, args=(os.getppid(),), daemon=True).start()


def leave_when_told_by(rank_pid: int) -> None:
    """A worker's thread that waits for its rank's SIGTERM."""
    while signal.sigwaitinfo([signal.SIGTERM]).si_pid != rank_pid:
        pass
    os._exit(0)


def pair(batch: Any) -> tuple[Tensor, Tensor]:
    """A collated micro-batch as inputs and int64 targets."""
    if not isinstance(batch, list | tuple) or len(batch) != 2 or not all(isinstance(part, Tensor) for part in batch):
        raise ValueError(
            f"a sample of the data set became a {type(batch).__name__}, not two tensors; "
            "its __getitem__ must return (input, target), both numbers or arrays."
        )
    inputs, targets = batch
    if targets.is_floating_point():
        raise ValueError(
            f"targets of type {targets.dtype} are no classes: the loss is cross-entropy."
            " Return whole numbers, -100 where nothing is to be predicted."
        )
    return inputs, targets.long()
