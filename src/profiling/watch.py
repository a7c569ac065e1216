"""trainer.profile_every: what communication adds to a step, measured now and then while a model trains."""

from collections.abc import Sequence

from torch import Tensor

from src.batch import MicroBatch
from src.control import Control
from src.pace import Pace
from src.profiling.probe import Probe, overlap_of
from src.strategies.base import Strategy
from src.tracking.reporter import SilentReporter
from src.world import World

SAMPLES = 6  # and one before them that does not count; of 5, the noise could be told only half as well


class OverlapWatch:
    """every: optimizer steps between two measurements, which take as long as 14 steps; None: never.

    Training goes on as if they had not been: they change no number, and no step's time.
    """

    def __init__(
        self,
        strategy: Strategy,
        world: World,
        every: int | None,
        reporter: SilentReporter,
        control: Control,
        pace: Pace,
    ) -> None:
        self.strategy, self.world, self.every = strategy, world, every
        self.reporter, self.control, self.pace = reporter, control, pace

    def is_due(self, step: int) -> bool:
        # In a compressor's warm-up a step is dense, and what would be timed alone is not.
        return self.every is not None and step % self.every == 0 and self.strategy.settling_steps() == 0

    def measure(self, step: int, microbatches: Sequence[MicroBatch], valid_targets: int | Tensor) -> None:
        """Report the seconds, None for what the noise hides. Collective; after a step, of which the batch is."""
        self.pace.pause()
        probe = Probe(self.strategy, self.world)
        probe.warm_up(microbatches, valid_targets)
        for _ in range(SAMPLES):
            self.control.beat()
            probe.sample(microbatches, valid_targets)
        overlap = overlap_of(probe.of_all_ranks())
        exposed, alone = overlap.exposed, overlap.communication
        found = {
            "exposed_comm_seconds": exposed.seconds if exposed.is_measurable else None,
            "exposed_comm_noise_seconds": exposed.noise_seconds,
            "comm_seconds": alone.seconds if alone.is_measurable else None,
            "hidden_comm_fraction": overlap.hidden_fraction,
            "hidden_comm_noise_fraction": overlap.noise_fraction,
        }
        self.reporter.record("overlap", {"step": step, **found})
        self.pace.restart()
