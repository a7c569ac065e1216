"""Finding the loss that was not finite, without waiting for the device on a step that is not logged."""

import logging
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from src.world import World

log = logging.getLogger(__name__)

#: Then the weights are at fault rather than the batches: going on would only prune the good checkpoints away.
MOST_SKIPPED_IN_A_ROW = 10
REMEDY = "Lower optimizer.lr, or set trainer.max_grad_norm."


class NonFiniteLoss(RuntimeError):  # noqa: N818 - an outcome, named like the others
    """The loss of a step is NaN or infinite; the message names step, rank and what is left to go on from."""


class LossWatch:
    """Keeps the losses of the steps since the last look; kept tensors cost no kernel and no wait."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.seen: list[tuple[int, Tensor]] = []
        self.skipped_in_a_row = 0

    def skip(self, step: int, what_is_left: Callable[[], str]) -> None:
        """Count a step that was dropped for its loss. Raises NonFiniteLoss where it is time to give up."""
        self.skipped_in_a_row += 1
        log.warning("step %d: the loss is not finite; the step is skipped", step)
        if self.skipped_in_a_row == MOST_SKIPPED_IN_A_ROW:
            raise NonFiniteLoss(
                f"step {step}: the loss of {self.skipped_in_a_row} steps in a row is not finite."
                f" {what_is_left()} {REMEDY}"
            )

    def add(self, step: int, loss_sum: Tensor | None) -> None:
        """loss_sum: this rank's, scalar, detached; None where it holds none."""
        if loss_sum is not None:
            self.seen.append((step, loss_sum))

    def first_bad(self, is_finite: bool) -> tuple[int, int] | None:
        """(step, world rank) of the first loss since the last look that was not finite; None where all were.

        is_finite: of the reduced losses, the same on every rank. Collective only where it is False.
        """
        seen, self.seen = self.seen, []
        if is_finite:
            return None
        bad = [step for step, loss in seen if not torch.isfinite(loss)]
        never = torch.iinfo(torch.int64).max
        # The smallest (step, rank) as one number.
        place = min(bad) * self.world.world_size + self.world.world_rank if bad else never
        first = torch.tensor(place, device=self.world.device)
        if self.world.world_size > 1:
            dist.all_reduce(first, dist.ReduceOp.MIN)
        # Finite parts whose sum is not: nobody's alone.
        found = int(first)
        return None if found == never else divmod(found, self.world.world_size)
