"""The Hydra callback that refuses an experiment while nothing exists yet: no folder, no process.

Hydra calls `on_run_start` before it makes the run's folder and `on_multirun_start` before the sweep's. An
ordinary exception in a callback becomes a warning and the run goes on; only SystemExit stops it, which is
what `refusing` turns every error into. No torch is imported until a hook runs (`--cfg job` runs none).
"""

import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from src.errors import Refused

REFUSED = 2
MAX_LINE = 800  # characters of a problem that are shown: its beginning names the key, its end the remedy
TRACES_OF_A_RUN = ("summary.json", "metrics.jsonl", ".hydra", "multirun.yaml")


class RefuseBeforeStart(Callback):  # type: ignore[misc] # hydra has no types
    """Checks a run, or every job of a sweep, before Hydra writes anything."""

    def on_run_start(self, config: DictConfig, **kwargs: Any) -> None:
        with refusing():
            found = folder_problems(Path(config.hydra.run.dir), "hydra.run.dir")
            refuse(found + job_problems(config, task_overrides(config.hydra), fetch=not found))

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        with refusing():
            from src.sweep import sweep_problems  # which needs this module

            found = folder_problems(Path(config.hydra.sweep.dir), "hydra.sweep.dir")
            refuse(found + sweep_problems(config, fetch=not found))


def in_sweep(hydra: DictConfig) -> bool:
    """Whether a job is one of a sweep's. hydra: its own node of the configuration."""
    from hydra.types import RunMode

    return bool(hydra.mode == RunMode.MULTIRUN)


def task_overrides(hydra: DictConfig) -> list[str]:
    """The command line's words for one job, as they were typed: plain access would resolve a ${...} in them."""
    return [str(word) for word in OmegaConf.to_container(hydra.overrides.task, resolve=False)]


def has_known_jobs(hydra: DictConfig) -> bool:
    """Whether a sweep's jobs are known before its first. A sweeper that optimises decides as it goes."""
    return str(hydra.sweeper._target_).endswith("BasicSweeper")


def vouched_for(hydra: DictConfig) -> bool:
    """Whether the callback above has checked this job: ~hydra.callbacks.refuse removes it."""
    callbacks = [callback.get("_target_") for callback in hydra.callbacks.values() if callback]
    is_there = f"{RefuseBeforeStart.__module__}.{RefuseBeforeStart.__name__}" in callbacks
    return is_there and (has_known_jobs(hydra) or not in_sweep(hydra))


@contextmanager
def refusing() -> Iterator[None]:
    """Print a refusal, or an error of our own with its traceback, and leave: exit 2 or 1."""
    try:
        yield
    except Refused as refused:
        print_refusal(refused)
        raise SystemExit(REFUSED) from refused
    except OmegaConfBaseException as error:  # in Hydra's own node, such as hydra.run.dir
        from src.keys import unresolved

        print_refusal(Refused(unresolved(error, "hydra")))
        raise SystemExit(REFUSED) from error
    except Exception as error:
        traceback.print_exc()
        raise SystemExit(1) from error


def print_refusal(refused: Refused, label: str = "") -> None:
    """The problems on stderr, one a line, under one heading. label: the job of a sweep."""
    print(f"shardlab refused to start{f' {label}'.rstrip(': ')}:", file=sys.stderr)
    for line in refused.problems:
        is_long = len(line) > MAX_LINE
        print(f"  {f'{line[: MAX_LINE // 2]} ... {line[-MAX_LINE // 2 :]}' if is_long else line}", file=sys.stderr)


def refuse(problems: list[str]) -> None:
    if problems:
        raise Refused(*problems)


def job_problems(cfg: DictConfig, overrides: list[str], fetch: bool) -> list[str]:
    """Everything that is wrong with one job. fetch: where nothing is, try to build its parts and fetch its data."""
    from src import checks  # torch
    from src.override_errors import merged_choices
    from src.world import one_thread

    found = merged_choices(overrides)
    if found:
        return found
    try:
        with one_thread():  # whatever a data set or a model of the user's computes here; the ranks are forked later
            config, found = checks.check(cfg)
            if fetch and not found:
                checks.prepare(config)
    except Refused as refused:
        return refused.problems
    return found


def folder_problems(folder: Path, key: str) -> list[str]:
    """A folder that can't be made or written to, or that holds a run already, which a second one would overwrite."""
    # os.path.exists, unlike Path.exists, answers also below a folder that may not be entered.
    if any(os.path.exists(folder / name) for name in TRACES_OF_A_RUN):
        return [f"{key}={folder} already holds a run. Choose another folder, or move that one away."]
    existing = folder.absolute()
    while not os.path.exists(existing) and existing != existing.parent:
        existing = existing.parent
    if not existing.is_dir():
        return [f"{key}={folder} can't be a folder: {existing} is a file. Choose another."]
    if not os.access(existing, os.W_OK | os.X_OK):
        return [f"{key}={folder} can't be written: no permission to write in {existing}. Choose another with {key}=..."]
    return []
