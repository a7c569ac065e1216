"""One rank from its first line of log to its last: join the others, run, and say how it ended."""

import json
import logging
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store, rendezvous  # type: ignore[attr-defined]

from src.checks.setting import task_class
from src.environment import restart_count, torchrun_ranks
from src.errors import Failed, Interrupted, Refused, in_words
from src.heartbeat import Hung, heartbeat
from src.launch.failures import WAITED, Failure, describe, follows_another, mark_summary, record_failure
from src.launch.signals import interrupts
from src.logs import ONLY_IN_RANK_LOG, rank_log, rank_logs
from src.run import run
from src.stopping import StopRequest
from src.world import World, process_group, share_out_threads

log = logging.getLogger(__name__)

#: How long ranks look for the store that they meet at; while they do, no signal but SIGKILL reaches Python.
MEETING_SECONDS = 300
FIRST_FAILURE = "first failure"  # a key of the ranks' store
#: How long a rank that waited for another in vain lets that one say first why it did not come.
EXPLANATION_SECONDS = 3
FAILED, REFUSED = 1, 2  # exit codes of a rank


def rank_entry(config: dict[str, Any], run_dir: str, info: dict[str, Any], device: str, parent: int) -> None:
    """What the agent calls in each process that it starts. Leaves with an exit code, never with a traceback."""
    ranks = torchrun_ranks()
    assert ranks is not None, "the elastic agent sets torchrun's variables"
    if os.getppid() != parent:  # killed before this process could ask the kernel to be told of that
        sys.exit(FAILED)
    try:
        run_rank(config, Path(run_dir), info, World.of(ranks, device), meet, launcher=parent)
    except Failed as failed:
        sys.exit(REFUSED if comes_of_a_refusal(failed) else FAILED)
    except Interrupted as interrupted:
        sys.exit(interrupted.exit_code)


def comes_of_a_refusal(error: BaseException) -> bool:
    """Whether a part refused what it was given; Hydra wraps what a part raises while it is built."""
    return isinstance(error, Refused) or (error.__cause__ is not None and comes_of_a_refusal(error.__cause__))


def run_rank(
    config: dict[str, Any],
    run_dir: Path,
    info: dict[str, Any],
    world: World,
    join: Callable[[], Store],
    launcher: int | None = None,
) -> None:
    """One rank from its first line of log to its last. Raises Failed (already logged and recorded) or Interrupted.

    join: gives the store where the ranks meet. launcher: train.py's own parent of ranks, which tells what
    the run failed of.
    """
    share_out_threads(world, users_choice="OMP_NUM_THREADS" in os.environ)
    store: Store | None = None
    info = info | {"restarts": restart_count()}
    timeout_seconds = config["launch"]["timeout_seconds"]

    def give_up(hung: Hung) -> None:
        failed = ending(hung, stop, run_dir, world, store)
        if launcher is None:
            print(f"shardlab: {failed}", file=sys.stderr, flush=True)

    with interrupts(launcher) as stop, rank_logs(run_dir, world):
        log.info(
            "rank %d of %d, process %d, on %s with %d thread(s)%s",
            world.world_rank,
            world.world_size,
            os.getpid(),
            world.device,
            torch.get_num_threads(),
            f", restart {restart_count()}" if restart_count() else "",
            extra=ONLY_IN_RANK_LOG,
        )
        try:
            store = join()
            log_file, is_alone = rank_log(run_dir, world.world_rank), world.world_size == 1
            is_imagined = task_class(config).ranks == "imagined"
            with (
                heartbeat(timeout_seconds, log_file, is_alone, give_up) as heart,
                nullcontext() if is_imagined else process_group(world, timeout_seconds, store),
                leaving_together(stop, world),
            ):
                run(config, run_dir, info, world, stop, heart)
            if stop.is_agreed:
                assert stop.signal_number is not None
                raise stop.ending(stop.signal_number)
        # Everything: a rank that leaves by sys.exit(0) in the middle has failed as well.
        except BaseException as error:
            raise ending(error, stop, run_dir, world, store) from error


@contextmanager
def leaving_together(stop: StopRequest, world: World) -> Iterator[None]:
    """Ends an Interrupted that all ranks have agreed on: nobody is missing, so they can close their group in order.

    When the first has left, all have saved. The caller raises it again.
    """
    try:
        yield
    except Interrupted:
        if not stop.is_agreed:
            raise
        if world.world_size > 1:
            dist.barrier()


def ending(
    error: BaseException, stop: StopRequest, run_dir: Path, world: World, store: Store | None
) -> Failed | Interrupted:
    """Log, record and sum up why this rank ends; the returned exception tells it to who started the rank.

    Of several failures the first that the ranks know of is named.
    """
    signal_number = stopped_by(error, stop)
    if signal_number is None:
        details = "".join(traceback.format_exception(error))
        log.error("rank %d failed\n%s", world.world_rank, details, extra=ONLY_IN_RANK_LOG)
        own = record_failure(error, world.world_rank)
        failure = told_failure(store, own) or own
    else:
        # torchrun stops the others when a rank has failed; then that is what the run ends of.
        told = told_failure(store)
        if told is None:
            interrupted = stop.ending(signal_number)
            if world.is_main:  # it may have come before there was anybody to write a summary
                with suppress(OSError):  # a full disk does not change what stopped the run
                    mark_summary(run_dir, "interrupted", str(interrupted))
            return interrupted
        failure = told
    if world.is_main:
        with suppress(OSError):  # a full disk may be what the run failed of
            mark_summary(run_dir, "failed", f"rank {failure.world_rank}: {failure.message}")
    return Failed(describe(failure, rank_log(run_dir, failure.world_rank)), failure.details)


def stopped_by(error: BaseException, stop: StopRequest) -> int | None:
    """The signal that this rank ends of, None where it is the error.

    What went wrong by itself between a request and the save is a failure; a peer that has left is none.
    """
    if isinstance(error, Interrupted):
        return error.signal_number
    if isinstance(error, Hung) or (stop.failed_since and not follows_another(in_words(error))):
        return None
    return stop.signal_number


def told_failure(store: Store | None, own: Failure | None = None) -> Failure | None:
    """The failure that reached the ranks' store first, if need be `own`; None where nobody told any.

    Under torchrun no parent of ours looks at the ranks' records.
    """
    if store is None:
        return None
    try:
        if own is not None:
            if WAITED.search(own.message):
                with suppress(dist.DistStoreError):  # nobody said anything in that time
                    store.wait([FIRST_FAILURE], timedelta(seconds=EXPLANATION_SECONDS))
            return Failure(**json.loads(store.compare_set(FIRST_FAILURE, "", json.dumps(vars(own)))))
        return Failure(**json.loads(store.get(FIRST_FAILURE))) if store.check([FIRST_FAILURE]) else None
    except dist.DistError:  # the store lived in a process that is gone as well
        return None


def meet() -> Store:
    """The store that torchrun's agent, or ours, keeps for its ranks; a name of its own for each restart."""
    return PrefixStore(f"shardlab-{restart_count()}", agents_store())


def agents_store() -> Store:
    """The same, with what is to outlive restarts."""
    store, _, _ = next(rendezvous("env://", timeout=timedelta(seconds=MEETING_SECONDS)))
    return PrefixStore("shardlab", store)
