"""Parts that misbehave on purpose. They come in by `_target_=tests.doubles.X`, so `src/` has no switch for them."""

import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from src.batch import MicroBatch, Request
from src.data.base import Source
from src.data.digits import Digits
from src.environment import restart_count
from src.errors import Refused
from src.models.mlp import MLP
from src.schedule import Schedule


def act(name: str, seconds: float) -> None:
    """What a double does when its moment has come."""
    if name == "raise":
        raise ValueError("boom")
    if name == "raise_long":
        raise ValueError("boom\n" + "x" * 5000)
    if name == "sys_exit":
        sys.exit(0)
    if name == "os_exit_0":
        os._exit(0)
    if name == "os_exit_3":
        os._exit(3)
    if name == "abort":
        os.abort()
    if name in ("SIGKILL", "SIGSEGV", "SIGTERM"):
        os.kill(os.getpid(), getattr(signal, name))
        time.sleep(60)
    if name == "hang":  # deaf to everything but SIGKILL
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        time.sleep(seconds)
    if name == "sleep":
        time.sleep(seconds)
    if name == "hold_the_lock":  # in C code that lets no other thread run Python
        sum(range(10**13))


class MisbehavingDigits(Digits):
    """Digits whose stream does `what` on rank `on_rank` before it hands out micro-batch number `at` (from 1).

    None as rank: on all. With one micro-batch a step that is the step's number. restarts: the last restart of the
    ranks that it still does so after; None: always.
    """

    def __init__(
        self,
        what: str,
        on_rank: int | None = 1,
        at: int = 2,
        seconds: float = 120,
        restarts: int | None = None,
        **digits: Any,
    ) -> None:
        super().__init__(**digits)
        self.what, self.on_rank, self.at, self.seconds, self.restarts = what, on_rank, at, seconds, restarts

    def load(self, device: torch.device, seed: int, **place: int) -> tuple[Source, Source]:
        train, test = super().load(device, seed, **place)
        rank = int(os.environ.get("RANK", "0"))
        is_over = self.restarts is not None and restart_count() > self.restarts
        if (self.on_rank is None or rank == self.on_rank) and not is_over:
            return MisbehavingSource(train, self.what, self.at, self.seconds), test
        return train, test


class MisbehavingSource(Source):
    def __init__(self, source: Source, what: str, at: int, seconds: float) -> None:
        self.source, self.what, self.at, self.seconds = source, what, at, seconds
        self.num_samples, self.targets_per_sample = source.num_samples, source.targets_per_sample

    def stream(self, requests: Sequence[Request], epoch: int) -> Iterator[MicroBatch]:
        for number, batch in enumerate(self.source.stream(requests, epoch), start=1):
            if number == self.at:
                act(self.what, self.seconds)
            yield batch


class DataThatBreaksThePreparation(Digits):
    """A fault of the program's, not of the user's, before anything has started."""

    def prepare(self) -> None:
        raise ZeroDivisionError("a fault in prepare")


class DataInterruptedInPreparation(Digits):
    """Ctrl-C while the parent checks and fetches."""

    def prepare(self) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(5)


class DigitsAfterParallelWork(Digits):
    """Computes in the parent what torch would share out among threads, whose pool does not survive a fork."""

    def prepare(self) -> None:
        torch.ones(1000, 1000) @ torch.ones(1000, 1000)
        torch.randn(2_000_000).mul(2).sum()
        super().prepare()


class DigitsWithCudaInUse(Digits):
    """As if something in the parent had initialised CUDA, after which no process can be forked."""

    def prepare(self) -> None:
        torch.cuda.is_initialized = lambda: True
        super().prepare()


class BreakpointMLP(MLP):
    """Stops in the debugger in its first forward."""

    def forward(self, images: Tensor) -> Tensor:
        if self.training and not hasattr(self, "stopped"):
            self.stopped = True
            breakpoint()
        return super().forward(images)


class MLPThatBreaksInBuilding(MLP):
    """Raises on one rank while it is built, though not on the meta device, where the parent tries it."""

    def __init__(self, on_rank: int, **mlp: Any) -> None:
        super().__init__(**mlp)
        if os.environ.get("RANK") == str(on_rank) and not next(self.parameters()).is_meta:
            raise ValueError("boom while building")


class SlowSamples(Dataset[tuple[Tensor, Tensor]]):
    """`num_samples` images of noise, each `seconds` in the making."""

    def __init__(self, num_samples: int, seconds: float) -> None:
        self.num_samples, self.seconds = num_samples, seconds

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        time.sleep(self.seconds)
        return torch.zeros(1, 8, 8), torch.tensor(index % 10)


class DeafAndFailing(MisbehavingDigits):
    """Rank 1 raises in its second step, when rank 0 hangs and hears no signal."""

    def __init__(self, **digits: Any) -> None:
        is_first = os.environ.get("RANK") == "0"
        super().__init__(what="hang" if is_first else "raise", on_rank=None, **digits)


class RaisesThenIsKilled(MisbehavingDigits):
    """Rank 1 raises in its second step, and after a restart is killed there."""

    def __init__(self, **digits: Any) -> None:
        super().__init__(what="SIGKILL" if restart_count() else "raise", **digits)


class MLPThatRefuses(MLP):
    """Refuses in the ranks, though not on the meta device, where the parent tries it."""

    def __init__(self, **mlp: Any) -> None:
        super().__init__(**mlp)
        if not next(self.parameters()).is_meta:
            raise Refused("no such model")


class BreaksForSeed1(Digits):
    """A fault of the program's in one job of a sweep."""

    def __init__(self, seed: int, **digits: Any) -> None:
        super().__init__(**digits)
        self.seed = seed

    def prepare(self) -> None:
        if self.seed == 1:
            raise ZeroDivisionError("a fault for seed 1")
        super().prepare()


class DigitsWithoutANumber(Digits):
    """The training images of micro-batch number `at` (from 1) are NaN on rank `on_rank`."""

    def __init__(self, on_rank: int, at: int, **digits: Any) -> None:
        super().__init__(**digits)
        self.on_rank, self.at = on_rank, at

    def load(self, device: torch.device, seed: int, **place: int) -> tuple[Source, Source]:
        train, test = super().load(device, seed, **place)
        return (WithoutANumber(train, self.at) if place["data_rank"] == self.on_rank else train), test


class WithoutANumber(Source):
    def __init__(self, source: Source, at: int) -> None:
        self.source, self.at = source, at
        self.num_samples, self.targets_per_sample = source.num_samples, source.targets_per_sample

    def stream(self, requests: Sequence[Request], epoch: int) -> Iterator[MicroBatch]:
        for number, batch in enumerate(self.source.stream(requests, epoch), start=1):
            yield batch._replace(inputs=batch.inputs * torch.nan) if number == self.at else batch


class ExplodingSchedule(Schedule):
    """The optimizer's own lr for `after` updates, then a thousand times that."""

    def __init__(self, after: int, warmup_steps: int = 0) -> None:
        super().__init__(warmup_steps)
        self.after = after

    def factor(self, update: int, total_updates: int) -> float:
        return 1.0 if update < self.after else 1000.0

    def decay(self, progress: float) -> float:
        return 1.0
