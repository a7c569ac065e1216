"""The jobs of a sweep, checked before the first one starts: each job that can't work, named."""

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.config_loader import ConfigLoader
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, open_dict

from src.command.job import has_known_jobs, job_problems, task_overrides
from src.command.override_errors import COMPOSING, Composer
from src.command.resume import AUTO, differing_job
from src.environment import torchrun_ranks

MAX_NAMED = 4  # jobs that one line names


def sweep_problems(config: DictConfig, fetch: bool) -> list[str]:
    """Everything that is wrong with any job, each line once, with the jobs that it holds for unless that is all.

    fetch: where nothing is wrong with any, build each job's parts on trial and fetch its data.
    """
    if torchrun_ranks() is not None:
        return [
            "-m starts run after run, but torchrun's ranks live for one. Drop torchrun (train.py starts its own ranks),"
            " or start torchrun once a job."
        ]
    if not has_known_jobs(config.hydra):
        return []  # checked one by one, when they start
    loader = GlobalHydra.instance().config_loader()
    jobs = list(sweep_overrides(config, loader))
    found: dict[str, list[int]] = defaultdict(list)
    folders: dict[str, list[int]] = defaultdict(list)
    composed: list[DictConfig] = []
    for number, overrides in enumerate(jobs):
        try:
            composed.append(loader.load_sweep_config(config, overrides))
        except COMPOSING as error:
            lines = Composer(loader, config.hydra.job.config_name).explain(error, overrides)
        else:
            lines = job_problems(composed[-1], overrides, fetch=False)
            folder = subfolder(composed[-1], number)
            folders[folder].append(number)
            if config.checkpoint.resume == AUTO:
                lines += differing_job(Path(config.hydra.sweep.dir) / folder, overrides)
        for line in lines:
            found[line].append(number)
    if fetch and not found:
        for number, (job, overrides) in enumerate(zip(composed, jobs, strict=True)):
            for line in job_problems(job, overrides, fetch=True):
                found[line].append(number)
    return [named(line, numbers, jobs) for line, numbers in found.items()] + same_folders(folders)


def sweep_overrides(config: DictConfig, loader: ConfigLoader) -> Iterator[list[str]]:
    """The overrides of each job that Hydra's basic sweeper will run, in its order."""
    params = config.hydra.sweeper.params or {}  # a sweep's axes in a YAML, beside the command line's
    arguments = [f"{key}={value}" for key, value in params.items()] + task_overrides(config.hydra)
    parsed = OverridesParser.create(config_loader=loader).parse_overrides(arguments)
    for batch in BasicSweeper.split_arguments(parsed, max_batch_size=None):
        yield from (list(overrides) for overrides in batch)


def named(line: str, numbers: list[int], jobs: list[list[str]]) -> str:
    """`line` with the jobs that it holds for, where that is not all of them."""
    if len(numbers) == len(jobs):
        return line
    shown = [f"job {number} ({' '.join(jobs[number])})" for number in numbers[:MAX_NAMED]]
    more = f" and {len(numbers) - MAX_NAMED} more" if len(numbers) > MAX_NAMED else ""
    return f"{', '.join(shown)}{more}: {line}"


def subfolder(job: DictConfig, number: int) -> str:
    """Where a job will write, below the sweep's folder."""
    with open_dict(job.hydra.job):
        job.hydra.job.num, job.hydra.job.id = number, str(number)  # as the launcher will
    return str(job.hydra.sweep.subdir)


def same_folders(folders: dict[str, list[int]]) -> list[str]:
    """Jobs that would write into one folder, the later over the earlier."""
    return [
        f"hydra.sweep.subdir={folder} is the folder of jobs {', '.join(map(str, numbers))}, and each needs its own."
        " Use hydra.sweep.subdir='${hydra.job.num}'."
        for folder, numbers in folders.items()
        if len(numbers) > 1
    ]
