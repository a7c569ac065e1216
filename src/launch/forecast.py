"""What a run will need, worked out beside its start by a process of its own, which nothing waits for.

Tracing builds the model and takes two steps on fake tensors: a second or a few, in which the ranks import and begin.
What it finds is in the run folder by the time that the run has something to compare it with.
"""

import ctypes
import json
import multiprocessing
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from src.checks.setting import num_ranks, task_class
from src.control import Control
from src.plan.forecast import FORECAST, Forecast, forecast
from src.run import build
from src.tracking.reporter import SilentReporter
from src.world import World

PR_SET_PDEATHSIG = 1  # linux/prctl.h


@contextmanager
def forecasting(config: dict[str, Any], run_dir: Path) -> Iterator[None]:
    """While the block runs, a process writes the run's forecast, if its task takes training steps."""
    if not task_class(config).trains:
        yield
        return
    (run_dir / FORECAST).unlink(missing_ok=True)  # of the run that this one goes on with
    # A fork, since what was imported to check the configuration is there already.
    arguments = (config, run_dir, os.getpid())
    process = multiprocessing.get_context("fork").Process(target=write, args=arguments, daemon=True)
    process.start()
    try:
        yield
    finally:
        process.kill()
        process.join()


def write(config: dict[str, Any], run_dir: Path, parent: int) -> None:
    """The process: its forecast, or why there is none, in the run folder; whole or not at all. It says nothing."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)  # the parent ends it
    # Also where the parent is killed: what it has inherited of the run's folder would keep the next run out.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        return
    os.nice(5)  # the ranks come first
    silence = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(silence, stream)
    try:
        made = forecast_of(config, run_dir)
    except BaseException as error:  # of the user's model, perhaps: told where the figure is missed, and no failure
        made = Forecast.failed(error)
    partial = run_dir / f"{FORECAST}.partial"
    partial.write_text(json.dumps(made.as_dict()))
    partial.replace(run_dir / FORECAST)


def forecast_of(config: dict[str, Any], run_dir: Path) -> Forecast:
    """The forecast of the experiment that `config` describes."""
    ranks = num_ranks(config)
    world = World(0, ranks, 0, ranks, is_imagined=True)
    control = Control(world, config["launch"]["timeout_seconds"], None, None)
    experiment = build(config, run_dir, {}, world, SilentReporter(), control)
    return forecast(
        experiment.strategy,
        experiment.make_model,
        experiment.optimizer,
        experiment.spec,
        experiment.setting,
        experiment.data,
    )
