"""One job of the command line: what it was asked, and what is wrong with it."""

import os
import tempfile
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from src.errors import Refused
from src.launch.folder import is_claimed

FIRST_BYTES = 64 << 10  # Hydra's files, our configuration and the first lines of the logs
TRACES_OF_A_RUN = ("summary.json", "metrics.jsonl", ".hydra", "multirun.yaml")


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


def job_problems(cfg: DictConfig, overrides: list[str], fetch: bool) -> list[str]:
    """Everything that is wrong with one job. fetch: where nothing is, try to build its parts and fetch its data."""
    from src.checks import rules, trial  # torch
    from src.command.override_errors import merged_choices
    from src.world import one_thread

    found = merged_choices(overrides)
    if found:
        return found
    try:
        with one_thread():  # whatever a data set or a model of the user's computes here; the ranks are forked later
            config, found = rules.check(cfg)
            if fetch and not found:
                trial.prepare(config)
    except Refused as refused:
        return refused.problems
    return found


def folder_problems(folder: Path, key: str, may_hold_a_run: bool = False) -> list[str]:
    """A folder that can't be made, or has no room, or that holds a run already, which a second one would overwrite."""
    # os.path.exists, unlike Path.exists, answers also below a folder that may not be entered.
    if not may_hold_a_run and any(os.path.exists(folder / name) for name in TRACES_OF_A_RUN):
        return [
            f"{key}={folder} already holds a run. Choose another folder, or go on in it with checkpoint.resume=auto."
        ]
    if may_hold_a_run and is_claimed(folder):
        return [f"the run in {folder} is still going on. Stop it first, or wait for its end."]
    existing = folder.absolute()
    while not os.path.exists(existing) and existing != existing.parent:
        existing = existing.parent
    if not existing.is_dir():
        return [f"{key}={folder} can't be a folder: {existing} is a file. Choose another."]
    if not os.access(existing, os.W_OK | os.X_OK):
        return [f"{key}={folder} can't be written: no permission to write in {existing}. Choose another with {key}=..."]
    try:
        with tempfile.TemporaryFile(dir=existing) as probe:
            probe.write(bytes(FIRST_BYTES))
            probe.flush()
    except OSError as error:  # a full disk, a quota: Hydra would leave a folder with half of its files
        return [f"{key}={folder} can't be written: {error.strerror} in {existing}. Make room, or choose another."]
    return []
