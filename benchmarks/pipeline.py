"""What a pipeline gains: two stages on two ranks against one process that accumulates the same micro-batches.

The same work: a GPT of 8 equal layers, 8 micro-batches a step, AdamW, one thread a rank. Two ranks could be twice as
fast, but for the bubble: m p / (m + p - 1) = 16 / 9 = 1.78 times. Each schedule's speed-up is held against that one
number; interleaved_1f1b and zero_bubble have shorter bubbles and may exceed it. Steps alternate in one run, so that the
machine's drift meets all alike; each figure is the median over the rounds, the ratio the median of the rounds' ratios.
A rank also computes slower than the process alone: it shares the memory, and zero_bubble walks each graph twice. "work"
is the processor time of both ranks against the single process's, which the bubble does not count.

    python benchmarks/pipeline.py
"""

import argparse
import statistics
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from src.batch import MicroBatch
from src.memory import keep_freed_memory
from src.models.gpt import GPT
from src.parallel.pipeline import predicted_bubble
from src.strategies.base import BuildSpec, Strategy
from src.strategies.pp import PipelineParallel
from src.strategies.single import Single
from src.world import World, process_group

S = TypeVar("S", bound=Strategy)

RANKS = 2
MICROBATCHES = 8
IDEAL = MICROBATCHES * RANKS / (MICROBATCHES + RANKS - 1)
VOCABULARY, SEQUENCE, SAMPLES = 256, 64, 4  # of a micro-batch: 4 x 64 tokens
#: Name, schedule and stages a rank.
PIPELINES = [
    ("gpipe", "gpipe", 1),
    ("1f1b", "1f1b", 1),
    ("interleaved_1f1b, 2 stages a rank", "interleaved_1f1b", 2),
    ("zero_bubble", "zero_bubble", 1),
    ("zero_bubble, 2 stages a rank", "zero_bubble", 2),
]


def build(strategy: S, world: World, width: int) -> S:
    torch.manual_seed(0)
    model = GPT(VOCABULARY, SEQUENCE, layers=8, width=width, heads=8)
    spec = BuildSpec(world, micro_batch_size=SAMPLES, accumulate=MICROBATCHES)
    strategy.build(model, partial(torch.optim.AdamW, lr=1e-3, fused=True), spec)
    return strategy


def microbatches() -> list[MicroBatch]:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(VOCABULARY, (MICROBATCHES, SAMPLES, SEQUENCE + 1), generator=generator)
    return [MicroBatch(row[:, :-1].contiguous(), row[:, 1:].contiguous()) for row in rows]


class Step(NamedTuple):
    """seconds: from the first rank's start to the last one's end. work_seconds: processor time, over all ranks."""

    seconds: float
    work_seconds: float
    bubble: float = 0.0


def take_step(strategy: Strategy, batches: list[MicroBatch]) -> Step:
    """On this rank alone."""
    before, work_before = time.perf_counter(), time.process_time()
    strategy.forward_backward(batches, MICROBATCHES * SAMPLES * SEQUENCE)
    strategy.optimizer_step(1.0, want_grad_norm=False)
    return Step(time.perf_counter() - before, time.process_time() - work_before)


def step_together(strategy: PipelineParallel, batches: list[MicroBatch]) -> Step:
    """On all ranks."""
    dist.barrier()  # which waits without computing
    own = take_step(strategy, batches)
    seconds, work = torch.tensor(own.seconds), torch.tensor(own.work_seconds)
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    dist.all_reduce(work)
    return Step(float(seconds), float(work), strategy.measured_bubble())


def worker(world_rank: int, folder: str, rounds: int, width: int, results: Any) -> None:
    """One rank: every round, rank 0 takes a step alone, then both take one of each pipeline."""
    torch.set_num_threads(1)
    keep_freed_memory()  # as a run does
    world = World(world_rank, RANKS, world_rank, RANKS)
    with process_group(world, 600, dist.FileStore(f"{folder}/store", RANKS)):
        batches = microbatches()
        serial = build(Single(), World(), width) if world.is_main else None
        pipelines = {
            name: build(PipelineParallel(pp=RANKS, schedule=schedule, stages_per_rank=several), world, width)  # type: ignore[arg-type]
            for name, schedule, several in PIPELINES
        }
        found: list[dict[str, Step]] = []
        for number in range(rounds + 1):
            steps = {} if serial is None else {"serial": take_step(serial, batches)}
            steps |= {name: step_together(strategy, batches) for name, strategy in pipelines.items()}
            if number:  # the first round warms up, and works out shapes
                found.append(steps)
        if world.is_main:
            results.put(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10, help="steps of each competitor (default 10)")
    parser.add_argument("--width", type=int, default=256, help="of the model (default 256)")
    arguments = parser.parse_args()
    context = mp.get_context("spawn")
    results = context.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        started = mp.spawn(
            worker, (str(Path(folder)), arguments.rounds, arguments.width, results), nprocs=RANKS, join=False
        )
        found = results.get()
        started.join()
    print(f"a step of {MICROBATCHES} micro-batches, median of {arguments.rounds}; {RANKS} ranks, one thread each")
    print(f"  {'serial accumulation':<34} {statistics.median(s['serial'].seconds for s in found) * 1e3:8.1f} ms")
    ratios = {}
    for name, schedule, several in PIPELINES:
        taken = statistics.median(steps[name].seconds for steps in found)
        gain = statistics.median(steps["serial"].seconds / steps[name].seconds for steps in found)
        work = statistics.median(steps[name].work_seconds / steps["serial"].work_seconds for steps in found)
        bubble = statistics.median(steps[name].bubble for steps in found)
        predicted = predicted_bubble(schedule, MICROBATCHES, RANKS, several)
        ratios[name] = gain / IDEAL
        print(
            f"  {name:<34} {taken * 1e3:8.1f} ms   {gain:.2f} times as fast, {ratios[name]:.3f} of {IDEAL:.2f};"
            f" bubble {bubble:.3f}, predicted {predicted:.3f}; work {work:.2f}"
        )
    best = max(ratios, key=ratios.__getitem__)
    print(f"best pipeline / ideal: {ratios[best]:.3f} ({best}; bar: at least 0.9)")


if __name__ == "__main__":
    main()
