"""One rank from its first line of log to its last: join the others, run, and say how it ended."""

import json
import logging
import os
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store, rendezvous  # type: ignore[attr-defined]

from src.environment import torchrun_ranks
from src.errors import Failed, Interrupted
from src.launch.failures import Failure, describe, mark_summary, record_failure
from src.launch.signals import interrupts
from src.logs import ONLY_IN_RANK_LOG, rank_log, rank_logs
from src.run import run
from src.world import World, process_group, share_out_threads

log = logging.getLogger(__name__)

#: How long ranks look for the store that they meet at; while they do, no signal but SIGKILL reaches Python.
MEETING_SECONDS = 300
FIRST_FAILURE = "first failure"  # a key of the ranks' store


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
            raise ending(error, number, run_dir, world, store) from error


def ending(
    error: BaseException, signal_number: int | None, run_dir: Path, world: World, store: Store | None
) -> Failed | Interrupted:
    """Log, record and sum up why this rank ends; the returned exception tells it to who started the rank.

    signal_number: of the signal that stopped it. Of several failures the first that the ranks know of is named.
    """
    if signal_number is None:
        log.error("rank %d failed\n%s", world.world_rank, traceback.format_exc(), extra=ONLY_IN_RANK_LOG)
        own = record_failure(error, world.world_rank)
        failure = told_failure(store, own) or own
    else:
        # torchrun stops the others when a rank has failed; then that is what the run ends of.
        told = told_failure(store)
        if told is None:
            interrupted = Interrupted(signal_number)
            if world.is_main:  # it may have come before there was anybody to write a summary
                with suppress(OSError):  # a full disk does not change what stopped the run
                    mark_summary(run_dir, "interrupted", str(interrupted))
            return interrupted
        failure = told
    if world.is_main:
        with suppress(OSError):  # a full disk may be what the run failed of
            mark_summary(run_dir, "failed", f"rank {failure.world_rank}: {failure.message}")
    return Failed(describe(failure, rank_log(run_dir, failure.world_rank)), failure.details)


def told_failure(store: Store | None, own: Failure | None = None) -> Failure | None:
    """The failure that reached the ranks' store first, if need be `own`; None where nobody told any.

    Under torchrun no parent of ours looks at the ranks' records.
    """
    if store is None:
        return None
    try:
        if own is not None:
            return Failure(**json.loads(store.compare_set(FIRST_FAILURE, "", json.dumps(vars(own)))))
        return Failure(**json.loads(store.get(FIRST_FAILURE))) if store.check([FIRST_FAILURE]) else None
    except dist.DistError:  # the store lived in a process that is gone as well
        return None


def meet() -> Store:
    """The store that torchrun's agent, or ours, keeps for its ranks; a name of its own for each restart."""
    store, _, _ = next(rendezvous("env://", timeout=timedelta(seconds=MEETING_SECONDS)))
    return PrefixStore(f"shardlab-{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store)
