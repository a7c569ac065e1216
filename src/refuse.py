"""The Hydra callback that refuses an experiment while nothing exists yet: no folder, no process.

Hydra calls `on_run_start` before it makes the run's folder and `on_multirun_start` before the sweep's. An
ordinary exception in a callback becomes a warning and the run goes on; only SystemExit stops it, which is
what `refusing` turns every error into. No torch is imported until a hook runs (`--cfg job` runs none).
"""

import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig, ListConfig

from src.errors import Refused

REFUSED = 2


class RefuseBeforeStart(Callback):
    """Checks a run, or every job of a sweep, before Hydra writes anything."""

    def on_run_start(self, config: DictConfig, **kwargs: Any) -> None:
        with refusing():
            folder = Path(config.hydra.run.dir)
            refuse(job_problems(config) + folder_problems(folder, "hydra.run.dir"))

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        with refusing():
            found = folder_problems(Path(config.hydra.sweep.dir), "hydra.sweep.dir")
            for number, (overrides, job) in enumerate(sweep_jobs(config)):
                found += [f"job {number} ({' '.join(overrides)}): {line}" for line in job_problems(job)]
            refuse(found)


@contextmanager
def refusing() -> Iterator[None]:
    """Print a refusal, or an error of our own with its traceback, and leave: exit 2 or 1."""
    try:
        yield
    except Refused as refused:
        print_refusal(refused)
        raise SystemExit(REFUSED) from refused
    except Exception as error:
        traceback.print_exc()
        raise SystemExit(1) from error


def print_refusal(refused: Refused) -> None:
    """The problems on stderr, one a line, under one heading."""
    print("shardlab refused to start:", file=sys.stderr)
    for line in refused.problems:
        print(f"  {line}", file=sys.stderr)


def refuse(problems: list[str]) -> None:
    if problems:
        raise Refused(*problems)


def job_problems(cfg: DictConfig) -> list[str]:
    """Everything that is wrong with one job; its data are fetched where nothing else is wrong."""
    from src import checks  # torch

    found = choice_problems(cfg)
    if found:
        return found
    try:
        config, found = checks.check(cfg)
        if not found:
            checks.prepare(config)
    except Refused as refused:
        return refused.problems
    return found


def choice_problems(cfg: DictConfig) -> list[str]:
    """A group that was given a list: Hydra merges the options, where the user meant a sweep."""
    found = []
    for group, choice in cfg.hydra.runtime.choices.items():
        if isinstance(choice, list | ListConfig):
            names = ",".join(str(name) for name in choice)
            found.append(f"{group}=[{names}] would merge the options into one. For a sweep: -m {group}={names}")
    return found


def folder_problems(folder: Path, key: str) -> list[str]:
    """A folder that holds a run already; writing another into it would lose the first."""
    if any((folder / name).exists() for name in ("summary.json", "metrics.jsonl", ".hydra", "multirun.yaml")):
        return [f"{key}={folder} already holds a run. Choose another folder, or move that one away."]
    return []


def sweep_jobs(config: DictConfig) -> Iterator[tuple[list[str], DictConfig]]:
    """(overrides, composed configuration) of each job that Hydra's basic sweeper will run.

    Another sweeper decides its jobs as it goes; those are checked one by one, when they start.
    """
    from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
    from hydra.core.global_hydra import GlobalHydra
    from hydra.core.override_parser.overrides_parser import OverridesParser

    if not str(config.hydra.sweeper._target_).endswith("BasicSweeper"):
        return
    loader = GlobalHydra.instance().config_loader()
    params = config.hydra.sweeper.params  # hydra.sweeper.params in a YAML: a sweep's axes beside the command line's
    arguments = [f"{key}={params[key]}" for key in params or ()] + list(config.hydra.overrides.task)
    parsed = OverridesParser.create(config_loader=loader).parse_overrides(arguments)
    for batch in BasicSweeper.split_arguments(parsed, max_batch_size=None):
        for overrides in batch:
            yield overrides, loader.load_sweep_config(config, list(overrides))
