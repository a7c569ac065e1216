"""How much of a step a rank computes, measured without waiting for the device."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

Mark = float | torch.cuda.Event


class StepClock:
    """Times the last step and the work in it. device: whose time counts; what is queued on a GPU has its own clock."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.marks: list[Mark] = []
        self.step_marks: list[Mark] = []

    @contextmanager
    def step(self) -> Iterator[None]:
        """Around a whole step, waits included; forgets the step before."""
        self.marks.clear()
        self.step_marks = [self.mark()]
        yield
        self.step_marks.append(self.mark())

    @contextmanager
    def busy(self) -> Iterator[None]:
        """Around work within the step."""
        self.marks.append(self.mark())
        yield
        self.marks.append(self.mark())

    def mark(self) -> Mark:
        """Now, or when the device gets here."""
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def read(self) -> tuple[float, float]:
        """Seconds of work in the last step, and of the step itself. Waits for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        busy = sum(seconds(*pair) for pair in zip(self.marks[::2], self.marks[1::2], strict=True))
        return busy, seconds(*self.step_marks)


def seconds(start: Mark, end: Mark) -> float:
    """From one mark to another."""
    if isinstance(start, float):
        assert isinstance(end, float)
        return end - start
    assert isinstance(end, torch.cuda.Event)
    return float(start.elapsed_time(end)) / 1e3  # from milliseconds
