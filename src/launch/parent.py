"""Start the ranks with torch's elastic agent, or join the ones that torchrun has started.

The parent composes, checks and fetches data; ranks get the plain resolved configuration and never compose.
"""

import json
import logging
import os
import sys
import tempfile
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch.distributed import HashStore, Store  # type: ignore[attr-defined]

from src.checks.setting import device_type, num_local_ranks, task_class
from src.environment import Ranks, restart_count, torchrun_ranks
from src.errors import Failed, Interrupted
from src.launch.failures import Failure, describe, follows_another, mark_summary
from src.launch.folder import claimed, final_loss, write_config
from src.launch.forecast import forecasting
from src.launch.rank import agents_store, meet, rank_entry, run_rank
from src.launch.signals import interrupts
from src.logs import add_to_train_log, rank_log
from src.world import World

log = logging.getLogger(__name__)

GIVEN = "given"  # the key of the ranks' store under which rank 0 tells the others what to run, or null
LOOK_SECONDS = 0.1  # between two looks for it


def launch(config: dict[str, Any], run_dir: Path, info: dict[str, Any], in_place: bool) -> float | None:
    """Run one job to its end. Returns the final evaluation loss (for sweepers that optimise).

    config: plain and resolved. run_dir: exists already. info: the command line, for the tracker.
    in_place: whether a lone rank may run in this process, where a debugger can follow it.
    Raises Refused, Failed or Interrupted.
    """
    info = {"run_id": uuid.uuid4().hex[:12], **info}
    with claimed(run_dir, may_exist="resumes" in info):
        write_config(config, run_dir, info.get("resumes", 0))
        for line in info.pop("passed_over", []):
            log.warning("checkpoint passed over: %s", line)
            add_to_train_log(run_dir, f"checkpoint passed over: {line}")
        try:
            with forecasting(config, run_dir, device_type(config)):
                launch_ranks(config, run_dir, info, in_place)
        except (Failed, Interrupted) as ending:
            with suppress(OSError):  # a full disk may be what the run failed of, and is the better message
                add_to_train_log(run_dir, str(ending))
            raise
    return final_loss(run_dir)


def launch_ranks(config: dict[str, Any], run_dir: Path, info: dict[str, Any], in_place: bool) -> None:
    """As rank 0 of torchrun's world, as the only rank, or as the parent of the ranks."""
    device = "cpu" if task_class(config).ranks == "imagined" else device_type(config)
    ranks = torchrun_ranks()
    if ranks is not None:
        given = json.dumps({"config": config, "run_dir": str(run_dir.resolve()), "info": info, "device": device})

        def greet() -> Store:
            store = meet()
            store.set(GIVEN, given)
            agents_store().set(GIVEN, given)
            return store

        if (restarts := config["launch"]["max_restarts"]) > 0:
            print(
                f"shardlab: launch.max_restarts={restarts} is for ranks that train.py starts itself;"
                f" use torchrun --max-restarts={restarts}.",
                file=sys.stderr,
            )

        run_rank(config, run_dir, info, World.of(ranks, device), greet)
    elif (nproc := num_local_ranks(config)) == 1 and in_place and config["launch"]["max_restarts"] == 0:
        run_rank(config, run_dir, info, World.of(Ranks(0, 1, 0, 1), device), HashStore)
    else:
        start_ranks(config, run_dir, info, device, nproc)


def dismiss() -> None:
    """As rank 0 under torchrun: there is no run (`--cfg job`, `--help`), so the others need not wait for one."""
    if torchrun_ranks() is not None:
        meet().set(GIVEN, json.dumps(None))


def was_given() -> bool:
    """As torchrun's rank 0: whether these ranks are started again, and were told before what to run and where.

    Then nothing is composed, refused or chosen again: it only has to `follow`.
    """
    return restart_count() > 0 and agents_store().check([GIVEN])


def follow() -> None:
    """A rank > 0 under torchrun: wait for rank 0's configuration and run it. Raises Failed or Interrupted.

    Rank 0 itself where it `was_given` one before torchrun started the ranks again.
    """
    ranks = torchrun_ranks()
    assert ranks is not None
    store = meet()
    if ranks.world_rank == 0:
        store.set(GIVEN, agents_store().get(GIVEN).decode())
    # In looks, since a store gives up after a while, and rank 0 may have a model to fetch and text to tokenise. Where
    # that one has died, torchrun ends who waits.
    while not store.check([GIVEN]):
        time.sleep(LOOK_SECONDS)
    given = json.loads(store.get(GIVEN))
    if given is None:
        return
    # On another machine, which may not share rank 0's disk, the folder holds the logs of its own ranks.
    Path(given["run_dir"]).mkdir(parents=True, exist_ok=True)
    world = World.of(ranks, given["device"])
    run_rank(given["config"], Path(given["run_dir"]), given["info"], world, lambda: store)


def start_ranks(config: dict[str, Any], run_dir: Path, info: dict[str, Any], device: str, nproc: int) -> None:
    """`nproc` processes under an elastic agent in this one; returns when all have ended well.

    Raises Failed when they have failed and may not be started again, Interrupted when a stop signal ended them.
    """
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.launcher.api import LaunchConfig

    from src.launch.agent import Agent

    # Its formatter imports torch._dynamo on every failure, and prints what `first_cause` says better.
    for name in ("", ".multiprocessing.api", ".agent.server.api"):  # torch gives these levels of their own
        logging.getLogger(f"torch.distributed.elastic{name}").setLevel(logging.CRITICAL)
    with tempfile.TemporaryDirectory(prefix="shardlab-") as records, interrupts() as stop, stop.deferred(is_told=False):
        launch_config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=nproc,
            run_id=uuid.uuid4().hex,  # two launches on one machine never meet
            rdzv_backend="c10d",
            rdzv_endpoint="127.0.0.1:0",  # a free port
            local_addr="127.0.0.1",  # a host name that does not resolve would hang
            max_restarts=config["launch"]["max_restarts"],
            # A forked rank inherits the imports (seconds saved); but no process that has so much as asked the CUDA
            # driver whether there is a GPU can be forked to use one, and some of torch's imports ask.
            start_method="fork" if device == "cpu" and not cuda_is_initialized() else "spawn",
            logs_specs=DefaultLogsSpecs(log_dir=records),
            signals_to_handle="",  # `interrupts` does, and tells one wish said twice from two
        )
        arguments = (config, str(run_dir), info, device, os.getpid())
        agent = Agent(launch_config, rank_entry, arguments, stop, Path(records), restart_teller(config, run_dir))
        try:
            if agent.succeeds():
                return
        except Interrupted as hurried:
            mark(run_dir, "interrupted", str(hurried))
            raise
        if agent.stopped_by is not None and all(follows_another(record.message) for record in agent.records()):
            # Rank 0 may have lost its peers before the signal reached it, and say that it failed.
            interrupted = Interrupted(agent.stopped_by)
            mark(run_dir, "interrupted", str(interrupted))
            raise interrupted
        failure = agent.cause()
        mark(run_dir, "failed", f"rank {failure.world_rank}: {failure.message}")
        raise Failed(describe(failure, rank_log(run_dir, failure.world_rank)), failure.details)


def mark(run_dir: Path, status: str, error: str) -> None:
    """summary.json, as far as there is room for it: a full disk does not change how the run ended."""
    with suppress(OSError):
        mark_summary(run_dir, status, error)


def restart_teller(config: dict[str, Any], run_dir: Path) -> Callable[[Failure, int], None]:
    """A function that says on the terminal and in train.log what the ranks failed of and that they start again."""

    def tell(failure: Failure, restart: int) -> None:
        line = (
            f"rank {failure.world_rank} failed: {failure.message}; starting all ranks again,"
            f" restart {restart} of launch.max_restarts={config['launch']['max_restarts']}"
        )
        print(f"{failure.details}shardlab: {line}", file=sys.stderr, flush=True)
        with suppress(OSError):
            add_to_train_log(run_dir, line)

    return tell


def cuda_is_initialized() -> bool:
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]
