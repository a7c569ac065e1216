"""Start the ranks with torch's elastic launcher, or join the ones that torchrun has started.

The parent composes, checks and fetches data; ranks get the plain resolved configuration and never compose.
"""

import json
import logging
import os
import signal
import sys
import tempfile
import traceback
import uuid
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import yaml

from src import checks
from src.environment import Ranks, torchrun_ranks
from src.errors import Failed, Interrupted, Refused
from src.failures import describe, first_cause, mark_summary_failed, record_failure
from src.logs import rank_log, rank_logs
from src.run import run
from src.signals import interrupts, restore_default_signals
from src.world import World, process_group, share_out_threads

log = logging.getLogger(__name__)


def launch(config: dict[str, Any], run_dir: Path, info: dict[str, Any], in_place: bool) -> float | None:
    """Run one job to its end. Returns the final evaluation loss (for sweepers that optimise).

    config: plain and resolved. run_dir: exists already. info: the command line, for the tracker.
    in_place: whether a lone rank may run in this process, where a debugger can follow it.
    Raises Refused, Failed or Interrupted.
    """
    (run_dir / "config.yaml").write_text(yaml.safe_dump(config, sort_keys=False))
    device = checks.device_type(config)
    ranks = torchrun_ranks()
    if ranks is not None:
        store = meet(config)
        store.set("shardlab", json.dumps({"config": config, "run_dir": str(run_dir.resolve()), "info": info, "device": device}))
        run_rank(config, run_dir, info, World.of(ranks, device), store)
    elif (num_ranks := checks.num_ranks(config)) == 1 and in_place:
        run_rank(config, run_dir, info, World.of(Ranks(0, 1, 0, 1), device), None)
    else:
        start_ranks(config, run_dir, info, device, num_ranks)
    summary = json.loads((run_dir / "summary.json").read_text())
    return (summary.get("eval") or {}).get("loss")


def follow() -> None:
    """A rank > 0 under torchrun: wait for rank 0's configuration and run it. Raises Failed."""
    ranks = torchrun_ranks()
    assert ranks is not None
    store = meet(None)
    given = json.loads(store.get("shardlab"))
    world = World.of(ranks, given["device"])
    run_rank(given["config"], Path(given["run_dir"]), given["info"], world, store)


def meet(config: dict[str, Any] | None) -> dist.Store:
    """The store that torchrun's agent keeps for its ranks; a name of its own for each restart."""
    store, _, _ = next(dist.rendezvous("env://"))
    return dist.PrefixStore(f"shardlab-{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store)


def start_ranks(config: dict[str, Any], run_dir: Path, info: dict[str, Any], device: str, num_ranks: int) -> None:
    """`num_ranks` processes under an elastic agent in this one; returns when all have ended well."""
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    # Its formatter imports torch._dynamo on every failure, and prints what `first_cause` says better.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    with tempfile.TemporaryDirectory(prefix="shardlab-") as records:
        launch_config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=num_ranks,
            run_id=uuid.uuid4().hex,  # two launches on one machine never meet
            rdzv_backend="c10d",
            rdzv_endpoint="127.0.0.1:0",  # a free port
            local_addr="127.0.0.1",  # a host name that does not resolve would hang
            max_restarts=0,
            # A forked rank inherits the imports (seconds saved); a process that has used CUDA can't be forked.
            start_method="spawn" if torch.cuda.is_initialized() else "fork",
            logs_specs=DefaultLogsSpecs(log_dir=records),
        )
        try:
            elastic_launch(launch_config, rank_entry)(config, str(run_dir), info, device)
        except ChildFailedError as error:
            failure = first_cause(error, Path(records))
            mark_summary_failed(run_dir, failure)
            raise Failed(describe(failure, rank_log(run_dir, failure.world_rank))) from None
        except SignalException as error:
            raise Interrupted(int(error.sigval)) from None
        finally:
            restore_default_signals()


def rank_entry(config: dict[str, Any], run_dir: str, info: dict[str, Any], device: str) -> None:
    """What the agent calls in each process that it starts. Leaves with an exit code, never with a traceback."""
    ranks = torchrun_ranks()
    assert ranks is not None, "the elastic agent sets torchrun's variables"
    try:
        run_rank(config, Path(run_dir), info, World.of(ranks, device), meet(config))
    except Failed:
        sys.exit(1)
    except Interrupted as interrupted:
        sys.exit(interrupted.exit_code)


def run_rank(config: dict[str, Any], run_dir: Path, info: dict[str, Any], world: World, store: dist.Store | None) -> None:
    """One rank from its first line of log to its last. Raises Failed (already logged and recorded) or Interrupted."""
    # torchrun sets OMP_NUM_THREADS=1 by itself; only there is 1 what the user may not have chosen, and right.
    share_out_threads(world, users_choice="OMP_NUM_THREADS" in os.environ)
    with interrupts(), rank_logs(run_dir, world):
        try:
            with process_group(world, config["launch"]["timeout_seconds"], store):
                run(config, run_dir, info, world)
        except Exception as error:
            log.error("rank %d failed\n%s", world.world_rank, traceback.format_exc())
            failure = record_failure(error, world.world_rank)
            raise Failed(describe(failure, rank_log(run_dir, world.world_rank))) from error
