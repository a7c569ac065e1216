"""How far a run has come: what a checkpoint needs beside the strategy's state to go on at the exact sample."""

from dataclasses import asdict, dataclass
from typing import Any


@dataclass
class Position:
    """Counts over all ranks since the run began, whatever sizes it has had since.

    step: optimizer steps. samples: real ones that training has read, so the place in the data. skipped_steps: of these
    steps, those that changed nothing. loss_sum, targets: of the epoch that has begun, in nats and valid targets.
    """

    step: int = 0
    samples: int = 0
    skipped_steps: int = 0
    loss_sum: float = 0.0
    targets: int = 0

    def in_epoch(self, num_samples: int) -> tuple[int, int]:
        """(the epoch to read from, counted from 0; samples of it that have been read). num_samples: of an epoch."""
        return divmod(self.samples, num_samples)

    def plain(self) -> dict[str, Any]:
        return asdict(self)
