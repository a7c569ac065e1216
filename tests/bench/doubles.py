"""Benchmarks that misbehave; they come in by `task._target_`."""

import time
from unittest.mock import patch

import torch.distributed as dist

from src.bench.collectives import Broadcast
from src.run import Experiment
from src.tasks.collectives import Collectives


class CollectivesThatHang(Collectives):
    """Rank 1 sleeps in its fourth broadcast, so the other waits for it."""

    def __call__(self, experiment: Experiment) -> None:
        started = 0

        def start(broadcast: Broadcast) -> list[dist.Work]:
            nonlocal started
            started += 1
            if started == 4 and experiment.world.world_rank == 1:
                time.sleep(120)
            return original(broadcast)

        original = Broadcast.start
        with patch.object(Broadcast, "start", start):
            super().__call__(experiment)


class CollectivesThatLose(Collectives):
    """What is broadcast does not arrive."""

    def __call__(self, experiment: Experiment) -> None:
        with patch.object(Broadcast, "start", lambda broadcast: []):
            super().__call__(experiment)
