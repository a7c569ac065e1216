"""Composing a configuration in the test's own process, and running it in started ranks."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from safetensors.torch import load_file
from torch import Tensor

from src import config as schema
from src.checks import rules
from src.command import resolvers
from tests.command import metrics
from tests.workers import Pool

CONF = Path(__file__).parent.parent / "conf"


def composed(*overrides: str) -> tuple[dict[str, Any], list[str]]:
    """The plain configuration of a command line, and the lines it would be refused with."""
    schema.register()
    resolvers.register()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return rules.check(compose("config", overrides=list(overrides)))


@dataclass(frozen=True)
class Result:
    """What a run left in its folder."""

    train: list[dict[str, Any]]
    evaluations: list[dict[str, Any]]
    epochs: list[dict[str, Any]]
    summary: dict[str, Any]
    weights: dict[str, Tensor]

    def series(self, key: str) -> list[Any]:
        return [record[key] for record in self.train]


def run_in(
    pool: Pool,
    num_ranks: int,
    run_dir: Path,
    *overrides: str,
    info: dict[str, Any] | None = None,
    timeout_seconds: float = 120,
) -> Result:
    """Run a command line on `num_ranks` started ranks of `pool`; it must not be refused. info: as for src.run.run."""
    config, problems = composed(
        f"launch.nproc={num_ranks}", "launch.device=cpu", "tracking=off", "trainer.log_every=1", *overrides
    )
    assert not problems, problems
    run_dir.mkdir(parents=True)
    pool.run(num_ranks, run_config, config, str(run_dir), info or {}, timeout_seconds=timeout_seconds)
    return read(run_dir)


def run_config(world: Any, config: dict[str, Any], run_dir: str, info: dict[str, Any]) -> None:
    """In a worker: one whole run."""
    from src.run import run

    run(config, Path(run_dir), info, world)


def read(run_dir: Path) -> Result:
    return Result(
        train=metrics(run_dir),
        evaluations=metrics(run_dir, "eval"),
        epochs=metrics(run_dir, "epoch"),
        summary=json.loads((run_dir / "summary.json").read_text()),
        weights=load_file(run_dir / "model.safetensors"),
    )
