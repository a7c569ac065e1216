"""task=profile: where a training step goes, how much communication it hides, and a trace a rank to look at."""

from collections.abc import Generator, Mapping
from itertools import count
from typing import Any

from src.batch import GlobalBatch, MicroBatch
from src.profiling.finding import Finding, from_kernels, from_timings
from src.profiling.probe import Probe, of_all_ranks, timed
from src.profiling.trace import DATA, KernelTimes, annotated, capture, of_kernels, read_events
from src.run import Experiment
from src.strategies.base import Setting
from src.task import Task
from src.tasks.parts import peaks
from src.tasks.train import joined, make_trainer
from src.tracking.console import shown
from src.tracking.tables import show
from src.trainer import Trainer

LEAST = {"warmup": 2, "steps": 1, "samples": 3}


class Profile(Task):
    """warmup, steps: optimizer steps before and in the trace. samples: of each timing, where timings are needed."""

    def __init__(self, warmup: int = 3, steps: int = 5, samples: int = 20) -> None:
        self.warmup, self.steps, self.samples = warmup, steps, samples

    @classmethod
    def problems(cls, arguments: Mapping[str, Any], setting: Setting) -> list[str]:
        return [
            f"task.{key}={arguments[key]} is less than {least}; choose {least} or more."
            for key, least in LEAST.items()
            if arguments.get(key) is not None and arguments[key] < least
        ]

    def __call__(self, experiment: Experiment) -> None:
        world, beat = experiment.world, experiment.control.beat
        loop = Steps(make_trainer(experiment, *joined(experiment)))
        for _ in range(max(self.warmup, experiment.strategy.settling_steps() + 1)):
            loop.take()
            beat()
        path = experiment.run_dir / f"trace_rank_{world.world_rank}.json.gz"
        capture(loop.take, self.steps, path, world.device)
        beat()
        if world.device.type == "cuda":
            own = of_kernels(read_events(path))
            columns = [of_all_ranks([seconds], world)[0] for seconds in own]
            finding = from_kernels([KernelTimes(*ranks) for ranks in zip(*columns, strict=True)])
        else:
            finding = self.measured(experiment, loop)
        loop.close()
        experiment.control.rest()  # what a tracker takes to close is no hang
        experiment.reporter.record("profile", {"step": loop.steps, **finding.record})
        experiment.reporter.update(profile=finding.record, peak_memory_bytes=peaks(world))
        if world.is_main:
            traces = f"traces: {shown(experiment.run_dir)}/trace_rank_*.json.gz; open them in https://ui.perfetto.dev"
            show(finding.table(), *finding.lines(), traces)

    def measured(self, experiment: Experiment, loop: "Steps") -> Finding:
        """By the clock, the parts of steps in turn."""
        world, strategy = experiment.world, experiment.strategy
        probe = Probe(strategy, world)
        own: dict[str, list[float]] = {"data": [], "optimizer": []}
        for index in range(self.samples + 1):
            data_seconds = timed(loop.fetch, world)
            if index == 0:
                probe.warm_up(loop.microbatches, loop.valid_targets)
            else:
                probe.sample(loop.microbatches, loop.valid_targets)
            loop.forward_backward()
            optimizer_seconds = timed(loop.optimize, world)
            if index > 0:
                own["data"].append(data_seconds)
                own["optimizer"].append(optimizer_seconds)
            experiment.control.beat()
        seconds = probe.of_all_ranks() | {name: of_all_ranks(samples, world) for name, samples in own.items()}
        return from_timings(seconds, experiment.setting.strategy_name, strategy.supports)


class Steps:
    """The training of `trainer` in parts, over as many epochs as are asked for. Nothing is logged or kept."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer, self.strategy = trainer, trainer.strategy
        self.strategy.train_mode(True)
        self.batches = self.endless()
        self.steps = 0

    def endless(self) -> Generator[tuple[GlobalBatch, list[MicroBatch]]]:
        for epoch in count():
            yield from self.trainer.batches(epoch, 0)

    def fetch(self) -> None:
        with annotated(DATA):
            self.batch, self.microbatches = next(self.batches)

    @property
    def valid_targets(self) -> Any:
        return self.trainer.valid_targets(self.batch, self.microbatches)

    def forward_backward(self) -> None:
        self.strategy.forward_backward(self.microbatches, self.valid_targets)

    def optimize(self) -> None:
        self.strategy.optimizer_step(1.0, want_grad_norm=False)
        self.steps += 1

    def take(self) -> None:
        self.fetch()
        self.forward_backward()
        self.optimize()

    def close(self) -> None:
        """End what fetches the data."""
        self.batches.close()
