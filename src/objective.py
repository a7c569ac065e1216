"""The training objective: cross-entropy *summed* over valid targets.

A sum is the only form that adds up over micro-batches and ranks. It is divided once, by the number of
valid targets in the whole step (the one normalisation of the design).
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from src.batch import IGNORED


@dataclass
class EvalSums:
    """Sums over valid targets, as scalar tensors on the rank's device; they add up over batches and ranks."""

    loss: Tensor
    correct: Tensor
    targets: Tensor

    def stacked(self) -> Tensor:
        """(3,), float64: counts stay exact up to 2^53 where float32 would stop at 2^24."""
        return torch.stack([self.loss.double(), self.correct.double(), self.targets.double()])


def cross_entropy_sum(logits: Tensor, targets: Tensor) -> Tensor:
    """Summed cross-entropy in nats, scalar, fp32; zero (never NaN) where every target is masked.

    logits: (batch, classes) or (batch, sequence, vocabulary), any float type.
    targets: (batch,) or (batch, sequence), int64, -100 where nothing is to be predicted.
    """
    return F.cross_entropy(logits.float().flatten(0, -2), targets.flatten(), ignore_index=IGNORED, reduction="sum")


def evaluation_sums(logits: Tensor, targets: Tensor) -> EvalSums:
    """Loss, hits of the arg-max and number of valid targets of one micro-batch; shapes as in cross_entropy_sum."""
    valid = targets != IGNORED
    hits = (logits.argmax(-1) == targets) & valid
    return EvalSums(cross_entropy_sum(logits, targets).detach(), hits.sum(), valid.sum())


def at_least_one(targets: int | Tensor) -> int | Tensor:
    """What a step's summed loss is divided by: one without any valid target has zero loss and gradient."""
    return targets.clamp(min=1) if isinstance(targets, Tensor) else max(targets, 1)
