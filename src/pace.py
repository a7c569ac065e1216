"""How fast the training goes: the steps alone, without evaluations and saves."""

import time

import torch

from src.memory import synchronize


class Pace:
    """The window since the last logged step, and the time that all windows took.

    steps, samples, data_wait_seconds: of the window. training_seconds, training_samples: of the windows that are over.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.training_seconds = 0.0
        self.training_samples = 0
        self.restart()

    def restart(self) -> None:
        """Begin a window."""
        self.started = time.perf_counter()
        self.steps = self.samples = 0
        self.data_wait_seconds = 0.0

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
