"""A program whose ranks step, agree and save, but train nothing: `python -m tests.launch.stepping <folder> [a=b]`.

Started by our own parent, in place (nproc=1), or under torchrun. Each rank keeps its step in step_<r>, and what it
saved in saved_<r>.
"""

import sys
import time
from pathlib import Path
from typing import Any

from torch.distributed import HashStore

from src.environment import Ranks, torchrun_ranks
from src.errors import Failed, Interrupted
from src.heartbeat import Heartbeat
from src.launch import parent, rank
from src.stopping import Agreement, StopRequest
from src.world import World


def step_until_stopped(
    config: dict[str, Any], run_dir: Path, info: dict[str, Any], world: World, stop: StopRequest, heart: Heartbeat
) -> None:
    """What stands in for src.run.run."""
    agreement = Agreement(world)
    with stop.deferred():
        for step in range(1, 100_000):
            agreement.begin(stop)
            time.sleep(0.01 * (1 + world.world_rank))
            (run_dir / f"step_{world.world_rank}").write_text(str(step))
            number = agreement.end()
            heart.beat()
            if number is not None:
                (run_dir / f"saving_{world.world_rank}").touch()
                if config["save"] == "fails" and world.world_rank == 1:
                    raise OSError(28, "No space left on device")
                time.sleep(config["save_seconds"])
                (run_dir / f"saved_{world.world_rank}").write_text(str(step))
                raise Interrupted(number)


def main(folder: str, *words: str) -> int:
    given = dict(word.split("=") for word in words)
    run_dir = Path(folder)
    config = {
        "task": {"_target_": "src.tasks.train.Train"},
        "launch": {"timeout_seconds": 60, "max_restarts": int(given.get("max_restarts", 0))},
        "save_seconds": float(given.get("save_seconds", 0.1)),
        "save": given.get("save"),
    }
    rank.run = step_until_stopped  # type: ignore[assignment]
    ranks = torchrun_ranks()
    try:
        if ranks is not None:
            rank.run_rank(config, run_dir, {}, World.of(ranks, "cpu"), rank.meet)
        elif given.get("nproc") == "1":
            rank.run_rank(config, run_dir, {}, World.of(Ranks(0, 1, 0, 1), "cpu"), HashStore)
        else:
            parent.start_ranks(config, run_dir, {}, "cpu", nproc=2)
    except Interrupted as interrupted:
        return interrupted.exit_code
    except Failed as failed:
        print(failed, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
