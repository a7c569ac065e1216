"""A program whose ranks step until one hangs: `python -m tests.launch.hanging <folder> what=sleep on_rank=1 [a=b]`."""

import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import HashStore

from src.environment import Ranks, torchrun_ranks
from src.errors import Failed
from src.heartbeat import Heartbeat
from src.launch import parent, rank
from src.stopping import StopRequest
from src.world import World
from tests.doubles import act


def step_until_hung(
    config: dict[str, Any], run_dir: Path, info: dict[str, Any], world: World, stop: StopRequest, heart: Heartbeat
) -> None:
    """What stands in for src.run.run. Step 0 is what comes before the first."""
    for step in range(config["steps"]):
        if step:
            heart.beat()
        (run_dir / f"step_{world.world_rank}").write_text(str(step))
        if step == config["at"] and world.world_rank == config["on_rank"]:
            act(config["what"], config["seconds"])
        time.sleep(0.05)
        if world.world_size > 1:
            try:
                dist.all_reduce(torch.ones(1))
            except RuntimeError:  # a victim that takes its time to close what it has open
                time.sleep(config["lingers"])
                raise


def main(folder: str, *words: str) -> int:
    given = dict(word.split("=") for word in words)
    run_dir = Path(folder)
    config = {
        "task": {"_target_": "src.tasks.train.Train"},
        "launch": {"timeout_seconds": float(given["timeout"]), "max_restarts": 0},
        "what": given["what"],
        "on_rank": int(given["on_rank"]),
        "at": int(given.get("at", 3)),
        "seconds": float(given.get("seconds", 80)),
        "steps": int(given.get("steps", 1000)),
        "lingers": float(given.get("lingers", 0)),
    }
    rank.run = step_until_hung  # type: ignore[assignment]
    ranks = torchrun_ranks()
    try:
        if ranks is not None:
            rank.run_rank(config, run_dir, {}, World.of(ranks, "cpu"), rank.meet)
        elif given.get("nproc") == "1":
            rank.run_rank(config, run_dir, {}, World.of(Ranks(0, 1, 0, 1), "cpu"), HashStore)
        else:
            parent.start_ranks(config, run_dir, {}, "cpu", nproc=2)
    except Failed as failed:
        print(failed, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
