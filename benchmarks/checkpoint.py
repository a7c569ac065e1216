"""How long a checkpoint keeps the training loop waiting: written at once, and while training goes on.

A GPT of 25 million parameters (101 MB of weights, with AdamW's two moments 302 MB a checkpoint) on two ranks, one
thread each, saved by the product's own parts as the loop saves it: strategy.state(), then Snapshots.save(). "Blocked"
is from the moment at which both ranks have come to the save until both may take the next step; every file is synced to
the disk and its digest taken. Each round takes plain steps, saves at once, then twice in the background, each time
with steps until that is whole, so that the machine's drift meets all alike; each figure is the median over the rounds.
The first of the two gets its host memory fresh from the system, as a run's first save does; the later ones, which the
bar is for, reuse it. "Lost" is what a save costs in all: the time blocked, and what the steps beside it took longer
than plain ones: on as many cores as ranks, those two compete.

    python benchmarks/checkpoint.py
"""

import argparse
import ctypes
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from src.batch import MicroBatch
from src.memory import keep_freed_memory
from src.models.gpt import GPT
from src.position import Position
from src.sharding import Sharding
from src.snapshots import SavePlan, Snapshots
from src.strategies.base import BuildSpec, Strategy
from src.strategies.ddp import DDP
from src.strategies.fsdp import FSDP2
from src.world import World, process_group

RANKS = 2
VOCABULARY, SEQUENCE, SAMPLES = 256, 64, 1  # of a micro-batch
LAYERS, WIDTH = 8, 512
BAR = 0.25
STRATEGIES: dict[str, tuple[Callable[[], Strategy], Sharding]] = {
    "fsdp": (FSDP2, Sharding("zero3")),
    "ddp": (DDP, Sharding("none")),
}


@dataclass
class Found:
    """Seconds, of the slowest rank. plain: one a step. at_once, first, later: one a round.

    The others: one a save in the background; beside: the mean step meanwhile.
    """

    plain: list[float] = field(default_factory=list)
    at_once: list[float] = field(default_factory=list)
    first: list[float] = field(default_factory=list)
    later: list[float] = field(default_factory=list)
    until_whole: list[float] = field(default_factory=list)
    beside: list[float] = field(default_factory=list)
    steps_beside: list[int] = field(default_factory=list)
    checkpoint_bytes: int = 0


class Loop:
    """Steps and saves of one strategy on one rank. Collective: every rank calls each method alike."""

    def __init__(self, world: World, name: str, folder: Path) -> None:
        make, sharding = STRATEGIES[name]
        torch.manual_seed(0)
        model = GPT(VOCABULARY, SEQUENCE, layers=LAYERS, width=WIDTH, heads=8)
        self.strategy = make()
        spec = BuildSpec(world, sharding=sharding, micro_batch_size=SAMPLES)
        self.strategy.build(model, partial(torch.optim.AdamW, lr=1e-4, foreach=True), spec)
        tokens = torch.randint(VOCABULARY, (SAMPLES, SEQUENCE + 1))
        self.batch = MicroBatch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
        self.position = Position()
        self.snapshots = Snapshots(self.strategy, world, folder, "benchmark", SavePlan(keep=1, asynchronous=True), 0)

    def timed(self, function: Callable[[], Any]) -> float:
        """Seconds from when all ranks have come here until the last one is through."""
        dist.barrier()
        before = time.perf_counter()
        function()
        seconds = torch.tensor(time.perf_counter() - before)
        dist.all_reduce(seconds, dist.ReduceOp.MAX)
        return float(seconds)

    def step(self) -> None:
        self.strategy.forward_backward([self.batch], RANKS * SAMPLES * SEQUENCE)
        self.strategy.optimizer_step(1.0, want_grad_norm=False)
        self.position.step += 1

    def save(self, in_background: bool) -> None:
        self.snapshots.save(self.position, None, in_background)

    def is_saving(self) -> bool:
        """On any rank."""
        store = self.snapshots.store
        assert store is not None
        going_on = torch.tensor(int(store.pending is not None and not store.pending.done()))
        dist.all_reduce(going_on)
        return bool(going_on)

    def forget_buffers(self) -> None:
        """Make the next save in the background the first one."""
        self.snapshots.finish()
        ctypes.CDLL(None).malloc_trim(0)
        self.snapshots.open_store()

    def round(self, found: Found, num_plain: int) -> None:
        self.forget_buffers()
        found.plain += [self.timed(self.step) for _ in range(num_plain)]
        found.at_once.append(self.timed(lambda: self.save(in_background=False)))
        for blocked in (found.first, found.later):
            self.step()
            before = time.perf_counter()
            blocked.append(self.timed(lambda: self.save(in_background=True)))
            steps = []
            while self.is_saving():
                steps.append(self.timed(self.step))
            found.until_whole.append(time.perf_counter() - before)
            found.beside.append(statistics.mean(steps))
            found.steps_beside.append(len(steps))


def worker(world_rank: int, folder: str, rounds: int, num_plain: int, results: Any) -> None:
    """One rank: the strategies one after the other, each with a first round that warms it up and is not counted."""
    torch.set_num_threads(1)
    keep_freed_memory()  # as a run does
    world = World(world_rank, RANKS, world_rank, RANKS)
    with process_group(world, 600, dist.FileStore(f"{folder}/store", RANKS)):
        for name in STRATEGIES:
            run_dir = Path(folder) / name
            loop = Loop(world, name, run_dir)
            loop.step()  # makes the optimizer's moments
            loop.save(in_background=False)  # imports, and makes the process group that saves
            found = Found()
            for _ in range(rounds):
                loop.round(found, num_plain)
            loop.snapshots.finish()
            loop.strategy.close()
            if world.is_main:
                found.checkpoint_bytes = sum(path.stat().st_size for path in run_dir.rglob("*.safetensors"))
                results.put((name, found))


def report(name: str, found: Found) -> float:
    """Print a strategy's figures; returns how long later saves in the background block the loop, of at once."""
    plain, at_once = statistics.median(found.plain), statistics.median(found.at_once)
    first, later = statistics.median(found.first), statistics.median(found.later)
    beside = [steps * (step - plain) for steps, step in zip(found.steps_beside, found.beside, strict=True)]
    lost = later + statistics.median(beside)
    print(f"{name}: {found.checkpoint_bytes / 1e6:.0f} MB a checkpoint")
    print(f"  step, no save                     {plain * 1e3:8.0f} ms")
    print(f"  step beside a background save     {statistics.median(found.beside) * 1e3:8.0f} ms")
    print(f"  at once: blocked                  {at_once * 1e3:8.0f} ms")
    print(f"  in the background: blocked, first {first * 1e3:8.0f} ms   {first / at_once:.3f} of at once")
    print(f"                     blocked, later {later * 1e3:8.0f} ms   {later / at_once:.3f}")
    print(f"                     until whole    {statistics.median(found.until_whole) * 1e3:8.0f} ms")
    print(f"                     lost in all    {lost * 1e3:8.0f} ms   {lost / at_once:.3f}")
    return later / at_once


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="saves of each kind (default 5)")
    parser.add_argument("--steps", type=int, default=6, help="plain steps a round (default 6)")
    parser.add_argument("--folder", help="on the disk to measure (default: the system's temporary folder)")
    arguments = parser.parse_args()
    print(f"load before the start: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    context = mp.get_context("spawn")
    results = context.SimpleQueue()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        started = mp.spawn(worker, (folder, arguments.rounds, arguments.steps, results), nprocs=RANKS, join=False)
        worst = {}
        for _ in STRATEGIES:
            name, found = results.get()
            worst[name] = report(name, found)
        started.join()
    name = max(worst, key=worst.__getitem__)
    print(f"loop blocked, in the background / at once: {worst[name]:.3f} ({name}; bar: at most {BAR})")


if __name__ == "__main__":
    main()
