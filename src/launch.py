"""Start the ranks with torch's elastic agent, or join the ones that torchrun has started.

The parent composes, checks and fetches data; ranks get the plain resolved configuration and never compose.
"""

import json
import logging
import os
import sys
import tempfile
import traceback
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import yaml
from torch.distributed import HashStore, PrefixStore, Store, rendezvous  # type: ignore[attr-defined]

from src.environment import Ranks, torchrun_ranks
from src.errors import Failed, Interrupted
from src.failures import Failure, describe, first_cause, mark_summary, read_records, record_failure
from src.logs import ONLY_IN_RANK_LOG, add_to_train_log, rank_log, rank_logs
from src.run import run
from src.setting import device_type, num_ranks
from src.signals import interrupts, kept_handlers, stop_signals
from src.world import World, process_group, share_out_threads

log = logging.getLogger(__name__)

FIRST_FAILURE = "first failure"  # a key of the ranks' store


def launch(config: dict[str, Any], run_dir: Path, info: dict[str, Any], in_place: bool) -> float | None:
    """Run one job to its end. Returns the final evaluation loss (for sweepers that optimise).

    config: plain and resolved. run_dir: exists already. info: the command line, for the tracker.
    in_place: whether a lone rank may run in this process, where a debugger can follow it.
    Raises Refused, Failed or Interrupted.
    """
    try:
        (run_dir / "config.yaml").write_text(yaml.safe_dump(config, sort_keys=False), encoding="utf-8")
    except OSError as error:
        raise Failed(f"the run folder can't be written to: {error}") from error
    try:
        launch_ranks(config, run_dir, info, in_place)
    except (Failed, Interrupted) as ending:
        with suppress(OSError):  # a full disk may be what the run failed of, and is the better message
            add_to_train_log(run_dir, str(ending))
        raise
    summary = json.loads((run_dir / "summary.json").read_text())
    loss = (summary.get("eval") or {}).get("loss")
    return None if loss is None else float(loss)


def launch_ranks(config: dict[str, Any], run_dir: Path, info: dict[str, Any], in_place: bool) -> None:
    """As rank 0 of torchrun's world, as the only rank, or as the parent of the ranks."""
    device = device_type(config)
    ranks = torchrun_ranks()
    if ranks is not None:
        given = json.dumps({"config": config, "run_dir": str(run_dir.resolve()), "info": info, "device": device})

        def greet() -> Store:
            store = meet()
            store.set("shardlab", given)
            return store

        run_rank(config, run_dir, info, World.of(ranks, device), greet)
    elif (nproc := num_ranks(config)) == 1 and in_place:
        run_rank(config, run_dir, info, World.of(Ranks(0, 1, 0, 1), device), HashStore)
    else:
        start_ranks(config, run_dir, info, device, nproc)


def follow() -> None:
    """A rank > 0 under torchrun: wait for rank 0's configuration and run it. Raises Failed or Interrupted."""
    ranks = torchrun_ranks()
    assert ranks is not None
    store = meet()
    given = json.loads(store.get("shardlab"))
    world = World.of(ranks, given["device"])
    run_rank(given["config"], Path(given["run_dir"]), given["info"], world, lambda: store)


def meet() -> Store:
    """The store that torchrun's agent, or ours, keeps for its ranks; a name of its own for each restart."""
    store, _, _ = next(rendezvous("env://"))
    return PrefixStore(f"shardlab-{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store)


def start_ranks(config: dict[str, Any], run_dir: Path, info: dict[str, Any], device: str, nproc: int) -> None:
    """`nproc` processes under an elastic agent in this one; returns when all have ended well."""
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.launcher.api import LaunchConfig

    from src.agent import Agent

    # Its formatter imports torch._dynamo on every failure, and prints what `first_cause` says better.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    with tempfile.TemporaryDirectory(prefix="shardlab-") as records, kept_handlers():
        launch_config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=nproc,
            run_id=uuid.uuid4().hex,  # two launches on one machine never meet
            rdzv_backend="c10d",
            rdzv_endpoint="127.0.0.1:0",  # a free port
            local_addr="127.0.0.1",  # a host name that does not resolve would hang
            max_restarts=0,
            # A forked rank inherits the imports (seconds saved); a process that has used CUDA can't be forked.
            start_method="spawn" if torch.cuda.is_initialized() else "fork",  # type: ignore[no-untyped-call]
            logs_specs=DefaultLogsSpecs(log_dir=records),
            signals_to_handle=",".join(number.name for number in stop_signals()),
        )
        agent = Agent(launch_config, rank_entry, (config, str(run_dir), info, device, os.getpid()))
        try:
            if agent.succeeds():
                return
        except SignalException as error:
            interrupted = Interrupted(int(error.sigval))
            # Rank 0 may have lost its peers before the signal reached it, and say that it failed.
            mark_summary(run_dir, "interrupted", str(interrupted))
            raise interrupted from None
        failure = first_cause(agent.deaths, read_records(Path(records)))
        with suppress(OSError):  # as above
            mark_summary(run_dir, "failed", f"rank {failure.world_rank}: {failure.message}")
        raise Failed(describe(failure, rank_log(run_dir, failure.world_rank)), failure.details)


def rank_entry(config: dict[str, Any], run_dir: str, info: dict[str, Any], device: str, parent: int) -> None:
    """What the agent calls in each process that it starts. Leaves with an exit code, never with a traceback."""
    ranks = torchrun_ranks()
    assert ranks is not None, "the elastic agent sets torchrun's variables"
    if os.getppid() != parent:  # killed before this process could ask the kernel to be told of that
        sys.exit(1)
    try:
        run_rank(config, Path(run_dir), info, World.of(ranks, device), meet)
    except Failed:
        sys.exit(1)
    except Interrupted as interrupted:
        sys.exit(interrupted.exit_code)


def run_rank(
    config: dict[str, Any], run_dir: Path, info: dict[str, Any], world: World, join: Callable[[], Store]
) -> None:
    """One rank from its first line of log to its last. Raises Failed (already logged and recorded) or Interrupted.

    join: gives the store where the ranks meet.
    """
    share_out_threads(world, users_choice="OMP_NUM_THREADS" in os.environ)
    store: Store | None = None
    with interrupts() as stop, rank_logs(run_dir, world):
        log.info(
            "rank %d of %d, process %d, on %s with %d thread(s)",
            world.world_rank,
            world.world_size,
            os.getpid(),
            world.device,
            torch.get_num_threads(),
            extra=ONLY_IN_RANK_LOG,
        )
        try:
            store = join()
            with process_group(world, config["launch"]["timeout_seconds"], store):
                run(config, run_dir, info, world)
        # Everything: a rank that leaves by sys.exit(0) in the middle has failed as well.
        except BaseException as error:
            number = error.signal_number if isinstance(error, Interrupted) else stop.signal_number
            if number is not None:
                raise end_interrupted(Interrupted(number), run_dir, world) from error
            raise end_failed(error, run_dir, world, store) from error


def end_interrupted(interrupted: Interrupted, run_dir: Path, world: World) -> Interrupted:
    """Rank 0's last word after a signal; it may have come before there was anybody to write a summary."""
    if world.is_main:
        mark_summary(run_dir, "interrupted", str(interrupted))
    return interrupted


def end_failed(error: BaseException, run_dir: Path, world: World, store: Store | None) -> Failed:
    """Log and record a rank's failure. The returned Failed names the one that came first, as far as the ranks know."""
    log.error("rank %d failed\n%s", world.world_rank, traceback.format_exc(), extra=ONLY_IN_RANK_LOG)
    failure = record_failure(error, world.world_rank)
    if store is not None and world.world_size > 1:
        failure = agreed_first(failure, store)
    if world.is_main:
        with suppress(OSError):
            mark_summary(run_dir, "failed", f"rank {failure.world_rank}: {failure.message}")
    return Failed(describe(failure, rank_log(run_dir, failure.world_rank)), failure.details)


def agreed_first(failure: Failure, store: Store) -> Failure:
    """The failure that reached the ranks' store first. Under torchrun no parent of ours looks at their records."""
    try:
        told = store.compare_set(FIRST_FAILURE, "", json.dumps(vars(failure)))
    except dist.DistError:  # the store lived in a process that is gone as well
        return failure
    return Failure(**json.loads(told))
