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
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from src.command.job import folder_problems, has_known_jobs, in_sweep, job_problems, task_overrides
from src.command.resume import AUTO, chosen, may_hold_a_run
from src.command.resume import problems as resume_problems
from src.errors import Refused

REFUSED = 2
MAX_LINE = 800  # characters of a problem that are shown: its beginning names the key, its end the remedy


class RefuseBeforeStart(Callback):  # type: ignore[misc] # hydra has no types
    """Checks a run, or every job of a sweep, before Hydra writes anything."""

    def on_run_start(self, config: DictConfig, **kwargs: Any) -> None:
        with refusing():
            run_dir, resume = Path(config.hydra.run.dir), config.checkpoint.resume
            found = resume_problems(resume, config.task.get("checkpoint"), is_sweep=False)
            if not found:
                found = folder_problems(run_dir, "hydra.run.dir", may_hold_a_run(resume, run_dir))
            refuse(found + job_problems(config, task_overrides(config.hydra), fetch=not found))
            refuse(loading_problems(config, run_dir))

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        with refusing():
            from src.command.sweep import sweep_problems  # Hydra's sweeper, which few runs need

            resume = config.checkpoint.resume
            found = resume_problems(resume, config.task.get("checkpoint"), is_sweep=True)
            if not found:
                found = folder_problems(Path(config.hydra.sweep.dir), "hydra.sweep.dir", resume == AUTO)
            refuse(found + sweep_problems(config, fetch=not found))


def loading_problems(config: DictConfig, run_dir: Path) -> list[str]:
    """Why the checkpoint that this run goes on from, or looks at, can't be loaded into what it has composed."""
    source, resume = config.task.get("checkpoint"), config.checkpoint.resume
    checkpoint = chosen(source or resume, run_dir)
    if checkpoint is None:
        return []
    from src.checks import rules  # torch
    from src.checks.fit import fit_problems

    return fit_problems(rules.check(config)[0], checkpoint, for_training=source is None)


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
        from src.checks.keys import unresolved

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
