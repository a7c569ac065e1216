"""The peak of a step: expected before it, and measured in it, over the product of what changes it.

    PYTHONPATH=. python benchmarks/memory.py [--every N]

Real ranks over gloo take two steps on the shapes of the data; the second one's peak is compared with the forecast that
every training run prints. --every: only each N-th combination; all of them take hours on two cores.
"""

import argparse
import statistics
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from tests.composing import composed
from tests.workers import Pool

#: Two shapes were chosen after the trace and the formulas were written: a wide MLP, and a GPT of an odd width,
#: with grouped heads and a vocabulary that outweighs its layers.
MODELS = {
    "mlp": "model=mlp",
    "cnn": "model=cnn",
    "gpt_tiny": "model=gpt_tiny",
    "gpt_30m": "model=gpt_tiny data=synthetic_tokens data.vocab_size=8192 data.sequence_length=64"
    " model.layers=8 model.width=512 model.heads=8",
    "mlp_wide": "model=mlp model.hidden=[1536,96,640]",
    "gpt_odd": "model=gpt_tiny data=synthetic_tokens data.vocab_size=6000 data.sequence_length=96"
    " model.layers=5 model.width=144 model.heads=12 model.kv_heads=4",
}
WAYS = {
    "single": ["strategy=single"],
    "ddp": ["strategy=ddp"],
    "fsdp zero2": ["strategy=fsdp", "sharding=zero2"],
    "fsdp zero3": ["strategy=fsdp"],
    "fsdp1": ["strategy=fsdp1"],
    "deepspeed zero1": ["strategy=deepspeed", "sharding=zero1"],
    "deepspeed zero2": ["strategy=deepspeed", "sharding=zero2"],
    "deepspeed zero3": ["strategy=deepspeed", "sharding=zero3"],
    "tp": ["strategy=tp"],
    "pp": ["strategy=pp", "trainer.accumulate=4"],
}
PRECISIONS = ("fp32", "bf16")
RECOMPUTATION = ("none", "full")
SIZES = (1, 8)
RANKS = (1, 2, 4)


@dataclass(frozen=True)
class Row:
    """One combination, in bytes of the fullest rank. formula: what the formulas expect, whatever the forecast is by."""

    model: str
    way: str
    words: tuple[str, ...]
    expected: int
    measured: int
    method: str
    formula: int

    @property
    def formula_error(self) -> float:
        return (self.formula - self.measured) / self.measured

    @property
    def error(self) -> float:
        return (self.expected - self.measured) / self.measured

    @property
    def bar(self) -> float:
        is_bf16_convolution = self.model == "cnn" and "precision=bf16" in self.words
        return 0.12 if is_bf16_convolution or self.way.startswith("deepspeed") else 0.08

    @property
    def is_over(self) -> bool:
        return abs(self.error) > self.bar


def combinations() -> Iterator[tuple[str, str, int, list[str]]]:
    """(model, way, ranks, command line) of all that is not refused."""
    for model, way, precision, mode, size, ranks in product(MODELS, WAYS, PRECISIONS, RECOMPUTATION, SIZES, RANKS):
        words = [f"precision={precision}", f"trainer.activation_checkpointing={mode}"]
        words += [f"trainer.micro_batch_size={size}", f"launch.nproc={ranks}", "launch.device=cpu"]
        if way in ("tp", "pp"):
            words.append(f"strategy.{way}={ranks}")
        yield model, way, ranks, [*MODELS[model].split(), *WAYS[way], *words]


def measured_peak(world: Any, config: dict[str, Any]) -> float:
    """In a rank: the peak of a second step, past a compressor's warm-up; the median of three tries.

    A gradient whose last holder is a thread of the backend lives a moment longer now and then: in one of fifty steps of
    a model of 1.5 MiB that made 20 %.
    """
    from src.meter import StepPeak

    experiment = parts(world, config)
    strategy, spec = experiment.strategy, experiment.spec
    strategy.build(experiment.make_model(), experiment.optimizer, spec)
    strategy.train_mode(True)
    tries = []
    for _ in range(3):
        peak = StepPeak(strategy, world.device, after=strategy.settling_steps())
        for _ in range(peak.after + 2):
            with peak.step():
                microbatches = [experiment.data.example(spec.micro_batch_size) for _ in range(spec.accumulate)]
                strategy.forward_backward(microbatches, microbatches[0].targets.numel() * len(microbatches))
                strategy.optimizer_step(1.0, want_grad_norm=False)
        tries.append(peak.bytes)
    strategy.close()
    assert all(found is not None for found in tries)
    return statistics.median(found for found in tries if found is not None)


def expected_peak(config: dict[str, Any], ranks: int) -> tuple[int, str]:
    """In a process without a group: the forecast's peak of the fullest rank, and how it was made."""
    from src.plan.forecast import forecast
    from src.world import World

    made = parts(World(0, ranks, 0, ranks, is_imagined=True), config)
    found = forecast(made.strategy, made.make_model, made.optimizer, made.spec, made.setting, made.data)
    assert found.peak is not None, found.reason
    assert found.method is not None
    return found.peak, found.method


def formula_peak(config: dict[str, Any], ranks: int) -> int:
    """By the closed formulas alone."""
    from src.plan.formula import fullest, plan
    from src.world import World

    made = parts(World(0, ranks, 0, ranks, is_imagined=True), config)
    return fullest(
        plan(type(made.strategy), made.make_model, made.optimizer, made.data, made.setting)
    ).footprint.peak.bytes


def parts(world: Any, config: dict[str, Any]) -> Any:
    from src.control import Control
    from src.run import build
    from src.tracking.reporter import SilentReporter

    return build(config, Path("nowhere"), {}, world, SilentReporter(), Control(world, 600.0, None, None))


def walk(pool: Pool, every: int) -> Iterator[Row]:
    """Each `every`-th combination that is not refused."""
    accepted = ((*rest, words, *composed(*words)) for *rest, words in list(combinations())[::every])
    for model, way, ranks, words, config, problems in accepted:
        if problems:
            continue
        measured = int(max(pool.run(ranks, measured_peak, config)))
        expected, method = expected_peak(config, ranks)
        yield Row(model, way, tuple(words), expected, measured, method, formula_peak(config, ranks))


def summary(rows: list[Row]) -> list[str]:
    """Lines of a Markdown table: by way of training, how many, median and largest error, and the bar."""
    by_way: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        by_way[row.way].append(row)
    lines = ["| strategy | combinations | forecast by | median error | largest | formula: median | largest |"]
    lines.append("|---|---|---|---|---|---|---|")
    for way, found in [*by_way.items(), ("all", rows)]:
        errors = [abs(row.error) for row in found]
        methods = "/".join(sorted({row.method for row in found}))
        cells = [way, str(len(found)), methods, *middle_and_most(errors)]
        cells += middle_and_most([abs(row.formula_error) for row in found])
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def middle_and_most(errors: list[float]) -> list[str]:
    return [f"{statistics.median(errors):.1%}", f"{max(errors):.1%}"]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--every", type=int, default=1)
    every = parser.parse_args().every
    pool, rows = Pool(), []
    for row in walk(pool, every):
        rows.append(row)
        late = f"  OVER {row.bar:.0%}" if row.is_over else ""
        print(
            f"{row.error:+7.2%} {row.measured / 2**20:9.2f} MiB {row.method:8} formula {row.formula_error:+7.2%}",
            f"{' '.join(row.words)}{late}",
            flush=True,
        )
    pool.close()
    print("\n".join(summary(rows)))
    worst = max(rows, key=lambda row: abs(row.error) / row.bar)
    print(f"worst against its bar: {worst.error:+.1%} of {worst.bar:.0%}, {' '.join(worst.words)}")


if __name__ == "__main__":
    main()
