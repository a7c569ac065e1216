"""What a run will need, worked out beside its start by a process of its own, which nothing waits for.

Tracing builds the model and takes two steps on fake tensors: a second or a few, in which the ranks import and begin.
What it finds is in the run folder by the time that the run has something to compare it with.
"""

import ctypes
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import get_context
from multiprocessing.context import ForkContext, SpawnContext
from pathlib import Path
from typing import Any

from src.checks.setting import num_ranks, ranks_of_a_machine, task_class
from src.control import Control
from src.plan.forecast import FORECAST, LOCK, Forecast, being_made, forecast
from src.run import build
from src.tracking.reporter import SilentReporter
from src.world import World

PR_SET_PDEATHSIG = 1  # linux/prctl.h
PARENT_LOOKS_SECONDS = 1.0  # where the kernel does not tell of the parent's end


@contextmanager
def forecasting(config: dict[str, Any], run_dir: Path, device_type: str) -> Iterator[None]:
    """While the block runs, a process writes the run's forecast, if its task takes training steps."""
    if not task_class(config).trains:
        yield
        return
    for left in (FORECAST, LOCK):  # by the run that this one goes on with
        (run_dir / left).unlink(missing_ok=True)
    # A fork, since what was imported to check the configuration is there already; where ranks aren't forked either
    # (CUDA's driver does not survive it), an interpreter of its own.
    context: ForkContext | SpawnContext = get_context("fork") if device_type == "cpu" else get_context("spawn")
    process = context.Process(target=write, args=(config, run_dir, os.getpid()), daemon=True)
    process.start()
    try:
        yield
    finally:
        process.kill()
        process.join()
        (run_dir / LOCK).unlink(missing_ok=True)


def write(config: dict[str, Any], run_dir: Path, parent: int) -> None:
    """The process: its forecast, or why there is none, in the run folder; whole or not at all. It says nothing."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)  # the parent ends it
    # Also where the parent is killed: what it has inherited of the run's folder would keep the next run out.
    end_with(parent)
    if os.getppid() != parent:
        return
    os.nice(5)  # the ranks come first
    silence = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(silence, stream)
    with being_made(run_dir) as partial:
        try:
            made = forecast_of(config, run_dir)
        except BaseException as error:  # of the user's model, perhaps: told where the figure is missed, and no failure
            made = Forecast.failed(error)
        partial.write_text(json.dumps(made.as_dict()))
        partial.replace(run_dir / FORECAST)


def end_with(parent: int) -> None:
    """Have this process killed as soon as `parent` is gone."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        return

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(PARENT_LOOKS_SECONDS)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def forecast_of(config: dict[str, Any], run_dir: Path) -> Forecast:
    """The forecast of the experiment that `config` describes."""
    ranks = num_ranks(config)
    world = World(0, ranks, 0, ranks_of_a_machine(config) or ranks, is_imagined=True)
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
