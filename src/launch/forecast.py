"""What a run will need, worked out beside its start by a process of its own, which nothing waits for.

Tracing builds the model and takes two steps on fake tensors: a second or a few, in which the ranks import and begin.
What it finds is in the run folder by the time that the run has something to compare it with.

    launcher -> watcher: says what became of the maker, and takes all of them along when the launcher is gone
                  -> maker: builds the model and traces it -> whatever the user's model starts
"""

import ctypes
import fcntl
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing import get_context
from multiprocessing.context import ForkContext, SpawnContext
from pathlib import Path
from typing import IO, Any

from src.checks.setting import num_ranks, ranks_of_a_machine, task_class
from src.control import Control
from src.launch.failures import how_it_ended
from src.plan.forecast import FORECAST, LOCK, Forecast, forecast
from src.run import build
from src.tracking.reporter import SilentReporter
from src.world import World

PR_SET_PDEATHSIG = 1  # linux/prctl.h
PARENT_LOOKS_SECONDS = 1.0  # where the kernel does not tell of the parent's end
GONE_SECONDS = 1.0  # where nobody reaps orphans, as in some containers, they stay for good
LAST_BYTES = 4096  # of what the maker wrote to stderr, for its last line


@contextmanager
def forecasting(config: dict[str, Any], run_dir: Path, device_type: str) -> Iterator[None]:
    """While the block runs, a process writes the run's forecast, if its task takes training steps."""
    if not task_class(config).trains:
        yield
        return
    for left in (FORECAST, LOCK):  # by the run that this one goes on with
        (run_dir / left).unlink(missing_ok=True)
    with (run_dir / LOCK).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the watcher inherits it, and it goes with the last who has it open
        # A fork also where CUDA's driver is awake: the watcher does nothing with torch.
        arguments = (config, run_dir, device_type, os.getpid())
        watcher = get_context("fork").Process(target=watch_over, args=arguments)
        watcher.start()
    try:
        yield
    finally:
        with suppress(ProcessLookupError, PermissionError):  # before it has a group, or when that is gone
            os.killpg(watcher.pid or 0, signal.SIGKILL)
        watcher.kill()
        watcher.join()
        wait_for_group(watcher.pid or 0)
        (run_dir / LOCK).unlink(missing_ok=True)


def wait_for_group(group: int) -> None:
    """Until none of a group of killed processes is left, which the kernel may take a moment for."""
    end = time.monotonic() + GONE_SECONDS
    with suppress(ProcessLookupError, PermissionError):
        while time.monotonic() < end:
            os.killpg(group, 0)
            time.sleep(0.01)


def watch_over(config: dict[str, Any], run_dir: Path, device_type: str, launcher: int) -> None:
    """The watcher: starts the maker, and says in its place why there is no forecast, if it can't. Does not return."""
    os.setpgid(0, 0)  # so that all that come of it can be killed at once
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)  # the launcher ends it
    signal.signal(signal.SIGTERM, lambda number, frame: os.killpg(0, signal.SIGKILL))
    # Also where the launcher is killed: what is inherited of the run's folder would keep the next run out.
    end_with(launcher, signal.SIGTERM)
    os.nice(5)  # the ranks come first
    with tempfile.TemporaryFile() as words:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        os.dup2(words.fileno(), 2)
        # A fork, since what was imported to check the configuration is there already; where ranks aren't forked either
        # (CUDA's driver does not survive it), an interpreter of its own.
        context: ForkContext | SpawnContext = get_context("fork") if device_type == "cpu" else get_context("spawn")
        maker = context.Process(target=make, args=(config, run_dir, os.getpid()))
        maker.start()
        maker.join()
        if not (run_dir / FORECAST).exists():
            assert maker.exitcode is not None, "it has been waited for"
            last = last_line(words)
            reason = f"the process that makes it: {how_it_ended(maker.exitcode)}{last and f'; its last line: {last}'}"
            with suppress(OSError):  # a full disk: then the free lock says that it failed
                Forecast({}, None, reason).publish(run_dir)
    os.killpg(0, signal.SIGKILL)  # what the model has started


def make(config: dict[str, Any], run_dir: Path, watcher: int) -> None:
    """The maker: its forecast, or the error that kept it from one, in the run folder. It says nothing."""
    end_with(watcher, signal.SIGKILL)
    try:
        made = forecast_of(config, run_dir)
    except BaseException as error:  # of the user's model, perhaps: told where the figure is missed, and no failure
        made = Forecast.failed(error)
    made.publish(run_dir)


def end_with(parent: int, number: signal.Signals) -> None:
    """Have this process sent a signal as soon as `parent` is gone, or now if it is."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)
    else:
        threading.Thread(target=look_after, args=(parent, number), daemon=True).start()
    if os.getppid() != parent:
        os.kill(os.getpid(), number)


def look_after(parent: int, number: signal.Signals) -> None:
    """Where there is no prctl, as on macOS: look now and then."""
    while os.getppid() == parent:
        time.sleep(PARENT_LOOKS_SECONDS)
    os.kill(os.getpid(), number)


def last_line(words: IO[bytes]) -> str:
    """The last that says anything; "" where there is none."""
    words.seek(max(0, words.seek(0, os.SEEK_END) - LAST_BYTES))
    lines = words.read().decode(errors="replace").splitlines()
    return next((line.strip() for line in reversed(lines) if line.strip()), "")


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
