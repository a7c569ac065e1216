"""Learning-rate schedules: plain functions of the number of updates made, so there is no state to save.

A step skipped on overflow is no update, so it advances no schedule.
"""

import math
from abc import ABC, abstractmethod


class Schedule(ABC):
    """A linear warm-up over `warmup_steps` updates, then whatever `decay` says."""

    def __init__(self, warmup_steps: int = 0) -> None:
        if warmup_steps < 0:
            raise ValueError(f"schedule.warmup_steps={warmup_steps} is negative; choose 0 or more.")
        self.warmup_steps = warmup_steps

    def factor(self, update: int, total_updates: int) -> float:
        """What the optimizer's lr is multiplied by for update number `update`, counted from 0."""
        if update < self.warmup_steps:
            return (update + 1) / self.warmup_steps
        span = max(1, total_updates - self.warmup_steps)
        return self.decay(min(1.0, (update - self.warmup_steps) / span))

    @abstractmethod
    def decay(self, progress: float) -> float:
        """The factor after the warm-up. progress: 0 at its end, 1 at the last update's end."""


class Constant(Schedule):
    """Factor 1."""

    def decay(self, progress: float) -> float:
        return 1.0


class Linear(Schedule):
    """From 1 to `end_factor` in a straight line."""

    def __init__(self, warmup_steps: int = 0, end_factor: float = 0.0) -> None:
        super().__init__(warmup_steps)
        self.end_factor = end_factor

    def decay(self, progress: float) -> float:
        return 1.0 + (self.end_factor - 1.0) * progress


class Cosine(Linear):
    """From 1 to `end_factor` along half a cosine (Loshchilov and Hutter 2017, eq. 5, without restarts)."""

    def decay(self, progress: float) -> float:
        return self.end_factor + (1.0 - self.end_factor) * 0.5 * (1.0 + math.cos(math.pi * progress))
