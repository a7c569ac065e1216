"""When a loop stops, logs, evaluates and measures itself."""

from dataclasses import dataclass
from typing import Literal

from src.batch import BatchPlan
from src.position import Position


@dataclass(frozen=True)
class Limits:
    """All in optimizer steps but epochs. eval_every None: after each epoch.

    on_nonfinite: what a NaN or infinite loss does: end the run at the next logged or saved step, or skip its own step
    (for which every step waits for its loss), until too many in a row are. profile_every None: never.
    """

    epochs: int
    max_steps: int | None = None
    log_every: int = 10
    eval_every: int | None = None
    on_nonfinite: Literal["stop", "skip"] = "stop"
    profile_every: int | None = None

    def last_step(self, position: Position, plan: BatchPlan) -> int:
        """The step to stop at: what is left of the epochs in today's batches, or max_steps where that is less."""
        epoch, done = position.in_epoch(plan.num_samples)
        left = -(-(plan.num_samples - done) // plan.global_batch_size)
        later = max(0, self.epochs - epoch - 1) * plan.steps_per_epoch
        steps = position.step + (left + later if epoch < self.epochs else 0)
        return steps if self.max_steps is None else max(position.step, min(steps, self.max_steps))
