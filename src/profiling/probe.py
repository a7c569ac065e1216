"""A step's forward and backward with its synchronisation, without it, and the synchronisation alone: three timings.

What communication adds to a step is the first less the second; there is no other way on CPUs, where a trace shows
no kernels. The passes alternate, so that what slows the machine for a while slows both.
"""

import time
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from src.batch import MicroBatch
from src.memory import synchronize
from src.profiling.overlap import Estimate, Overlap
from src.random_state import random_states, restore_random_states
from src.strategies.base import Strategy
from src.world import World


class Probe:
    """Times passes of `strategy`, which has taken a step, and leaves it as it was. Collective.

    Weights, optimizer and buffers are untouched, gradients forgotten, random numbers drawn again. Every pass of a
    sample draws the same ones. Kept are lists of seconds, of this rank, an entry a sample: synchronized (forward and
    backward as trained), omitting and alone, of strategies whose `supports.omits` names what they can leave out.
    """

    def __init__(self, strategy: Strategy, world: World) -> None:
        self.strategy, self.world = strategy, world
        self.can_omit = strategy.supports.omits is not None and strategy.data.size > 1
        self.seconds: dict[str, list[float]] = {"synchronized": [], "omitting": [], "alone": []}

    def sample(self, microbatches: Sequence[MicroBatch], valid_targets: int | Tensor) -> None:
        """Take one sample of each timing. The arguments are those of `Strategy.forward_backward`."""
        random = random_states(self.world.device)
        passes = ["synchronized", "omitting"] if self.can_omit else ["synchronized"]
        # Each goes first in turn: the first one finds the caches colder.
        if len(self.seconds["synchronized"]) % 2:
            passes.reverse()
        for name in passes:
            restore_random_states(random, self.world.device)
            self.seconds[name].append(self._timed_pass(microbatches, valid_targets, omitting=name == "omitting"))
        restore_random_states(random, self.world.device)
        if self.can_omit:
            alone = self.strategy.synchronization_alone(len(microbatches))
            self.seconds["alone"].append(timed(alone, self.world))

    def warm_up(self, microbatches: Sequence[MicroBatch], valid_targets: int | Tensor) -> None:
        """A sample that does not count: engines make their final buckets in it, and caches fill."""
        self.sample(microbatches, valid_targets)
        for samples in self.seconds.values():
            samples.clear()

    def _timed_pass(self, microbatches: Sequence[MicroBatch], valid_targets: int | Tensor, omitting: bool) -> float:
        def forward_backward() -> None:
            self.strategy.forward_backward(microbatches, valid_targets)

        self.strategy.remember()
        try:
            if not omitting:
                return timed(forward_backward, self.world)
            with self.strategy.unsynchronized():
                return timed(forward_backward, self.world)
        finally:
            self.strategy.discard()

    def of_all_ranks(self) -> dict[str, list[list[float]]]:
        """`seconds` of every rank: by name, then sample, then rank. Collective."""
        return {name: of_all_ranks(samples, self.world) for name, samples in self.seconds.items() if samples}


def timed(call: Callable[[], None], world: World) -> float:
    """The seconds that this rank takes for `call`, which all begin together. Collective; waits for the device."""
    synchronize(world.device)
    if world.world_size > 1:
        dist.barrier()
    start = time.perf_counter()
    call()
    synchronize(world.device)
    return time.perf_counter() - start


def of_all_ranks(samples: list[float], world: World) -> list[list[float]]:
    """The samples of each rank, by sample. Every rank has as many. Collective."""
    own = torch.tensor(samples, dtype=torch.float64, device=world.device)
    if world.world_size == 1:
        return own[:, None].tolist()
    ranks = [torch.empty_like(own) for _ in range(world.world_size)]
    dist.all_gather(ranks, own)
    return torch.stack(ranks, dim=1).tolist()


def overlap_of(seconds: Mapping[str, list[list[float]]]) -> Overlap:
    """seconds: all three that `Probe.of_all_ranks` may give. A step takes as long as its slowest rank."""
    synchronized, omitting, alone = (
        [max(ranks) for ranks in seconds[name]] for name in ("synchronized", "omitting", "alone")
    )
    # Differences of neighbours in time: what both have in common cancels out.
    exposed = [full - without for full, without in zip(synchronized, omitting, strict=True)]
    return Overlap(Estimate.of(exposed), Estimate.of(alone))
