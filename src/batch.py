"""Batch arithmetic, the plan that fixes which samples each step sees, and padding.

The plan depends on (seed, epoch, global batch) alone, never on how the work is split: that is what
makes the same experiment read the same data on one process and on many.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from torch import Tensor

from src.errors import Refused

#: The target of a padded slot; cross-entropy's `ignore_index`.
IGNORED = -100

Ids = npt.NDArray[np.int64]


@dataclass(frozen=True)
class BatchSizes:
    """micro_batch_size x accumulate x data_parallel_size = global_batch_size, all in samples."""

    micro_batch_size: int
    accumulate: int
    data_parallel_size: int

    @property
    def global_batch_size(self) -> int:
        return self.micro_batch_size * self.accumulate * self.data_parallel_size

    @classmethod
    def solve(
        cls, micro: int | None, accumulate: int | None, global_batch: int | None, data_parallel_size: int
    ) -> "BatchSizes":
        """The missing one of three sizes from the other two.

        Raises Refused, with the arithmetic, when they disagree, don't divide, or fewer than two are given.
        """
        given = {
            "trainer.micro_batch_size": micro,
            "trainer.accumulate": accumulate,
            "trainer.global_batch_size": global_batch,
        }
        for key, value in given.items():
            if value is not None and value < 1:
                raise Refused(f"{key}={value} is not a batch size; choose 1 or more.")
        missing = [key for key, value in given.items() if value is None]
        if len(missing) > 1:
            raise Refused(f"{' and '.join(missing)} are null; give two of the three batch sizes.")
        ranks = data_parallel_size
        if global_batch is None:
            assert micro is not None
            assert accumulate is not None
            return cls(micro, accumulate, ranks)
        if micro is None or accumulate is None:
            known_key = "accumulate" if micro is None else "micro_batch_size"
            known = accumulate if micro is None else micro
            assert known is not None
            rest, remainder = divmod(global_batch, known * ranks)
            if remainder or rest < 1:
                raise Refused(
                    f"trainer.global_batch_size={global_batch} is not a multiple of {known_key} x data ranks"
                    f" = {known} x {ranks} = {known * ranks}; choose a multiple of {known * ranks}."
                )
            return cls(rest, known, ranks) if micro is None else cls(known, rest, ranks)
        if micro * accumulate * ranks != global_batch:
            raise Refused(
                f"trainer.global_batch_size={global_batch} disagrees with micro_batch_size x accumulate x data ranks"
                f" = {micro} x {accumulate} x {ranks} = {micro * accumulate * ranks}; set one of the three to null."
            )
        return cls(micro, accumulate, ranks)


class Request(NamedTuple):
    """One micro-batch to fetch. ids: (micro_batch_size,); only the first num_real count, the rest is padding."""

    ids: Ids
    num_real: int


class MicroBatch(NamedTuple):
    """inputs: (micro_batch, ...). targets: int64, -100 where masked. Both on the rank's device."""

    inputs: Tensor
    targets: Tensor


@dataclass(frozen=True)
class GlobalBatch:
    """The samples of one optimizer step, over all data ranks. sample_ids: (at most global_batch_size,)."""

    epoch: int
    sample_ids: Ids

    @property
    def hash(self) -> str:
        """Identifies the *set* of samples, so two runs can be shown to have read the same data."""
        return hashlib.blake2b(np.sort(self.sample_ids).tobytes(), digest_size=8).hexdigest()

    def requests(self, sizes: BatchSizes, data_rank: int) -> list[Request]:
        """The micro-batches of one data rank: as many for every rank, and always full.

        Slot s of the step lies in micro-batch s // (size x ranks), so a short batch needs fewer micro-batches,
        not smaller ones. Slots beyond the batch repeat its samples and are masked: the shapes stay, batch
        statistics see real samples, and nothing counts twice.
        """
        micro, ranks = sizes.micro_batch_size, sizes.data_parallel_size
        num_samples = len(self.sample_ids)
        if num_samples == sizes.global_batch_size:  # nearly every step; no padding to work out
            return [Request(ids, micro) for ids in self.sample_ids.reshape(-1, ranks, micro)[:, data_rank]]
        num_microbatches = -(-num_samples // (micro * ranks))
        slots = np.arange(num_microbatches * ranks * micro).reshape(num_microbatches, ranks, micro)[:, data_rank]
        num_real = np.clip(num_samples - slots[:, 0], 0, micro)
        ids = self.sample_ids[slots % num_samples]
        return [Request(ids[i], int(num_real[i])) for i in range(num_microbatches)]


@dataclass(frozen=True)
class BatchPlan:
    """Which samples each optimizer step sees. Position in the data is a count of samples since the first epoch."""

    num_samples: int
    global_batch_size: int
    seed: int
    shuffle: bool = True

    @property
    def steps_per_epoch(self) -> int:
        return -(-self.num_samples // self.global_batch_size)

    def order(self, epoch: int) -> Ids:
        """A permutation of all sample ids, from (seed, epoch) alone."""
        if not self.shuffle:
            return np.arange(self.num_samples, dtype=np.int64)
        return np.random.default_rng([self.seed, epoch]).permutation(self.num_samples).astype(np.int64)

    def epoch(self, epoch: int, first_sample: int = 0) -> Iterator[GlobalBatch]:
        """The steps of an epoch from its sample `first_sample` on; the last one may be short."""
        order = self.order(epoch)
        for start in range(first_sample, self.num_samples, self.global_batch_size):
            yield GlobalBatch(epoch, order[start : start + self.global_batch_size])
