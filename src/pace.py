"""How fast the training goes: the steps alone, without evaluations and saves."""

import time

import torch
from torch import Tensor

from src.flops import Utilization
from src.memory import synchronize


class Pace:
    """The window since the last logged step, and the time that all windows took.

    steps, samples, targets, slots, data_wait_seconds: of the window; targets are those that count, slots all places of
    a token, whether it counts or not. training_seconds, training_samples: of the windows that are over.
    has_tokens: whether targets are tokens. utilization: None where no share of a peak can be told.
    """

    def __init__(self, device: torch.device, has_tokens: bool = False, utilization: Utilization | None = None) -> None:
        self.device, self.has_tokens, self.utilization = device, has_tokens, utilization
        self.training_seconds = 0.0
        self.training_samples = 0
        self.restart()

    def restart(self) -> None:
        """Begin a window."""
        self.started = time.perf_counter()
        self.steps = self.samples = self.slots = self.sequence_length = 0
        self.targets: int | Tensor = 0
        self.data_wait_seconds = 0.0

    def count(self, samples: int, targets: int | Tensor, sequence_length: int) -> None:
        """A step. targets: over all data ranks; a tensor is waited for on logged steps only."""
        self.steps += 1
        self.samples += samples
        self.targets = self.targets + targets
        self.slots += samples * sequence_length
        self.sequence_length = sequence_length

    def rates(self, seconds: float) -> dict[str, float]:
        """What a logged step says of the window. seconds: as `close_window` gave them."""
        found = {
            "step_seconds": seconds / self.steps,
            "samples_per_second": self.samples / seconds,
            "data_wait_seconds": self.data_wait_seconds / self.steps,
        }
        if self.has_tokens:
            found["tokens_per_second"] = float(self.targets) / seconds
            if self.utilization is not None:
                found["mfu"] = self.utilization.of(self.slots / seconds, self.sequence_length)
        return found

    def close_window(self) -> float:
        """End the window, when the device has done what belongs to it; its seconds."""
        seconds = time.perf_counter() - self.started
        self.training_seconds += seconds
        self.training_samples += self.samples
        return seconds

    def pause(self) -> None:
        """Before something that is not training; what is queued on the device still is."""
        if self.steps:
            synchronize(self.device)
            self.close_window()
            self.restart()

    @property
    def samples_per_second(self) -> float:
        return self.training_samples / max(self.training_seconds, 1e-9)
