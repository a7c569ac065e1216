"""The clock of a step."""

import time

import pytest
import torch

from src.parallel.clock import StepClock


def test_work_and_waits_of_the_last_step_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = StepClock(torch.device("cpu"))
    # Two steps of two pieces of work each; the first step is forgotten.
    now = iter([0, 1, 2, 3, 4, 5, 10, 11, 14, 16, 18, 20])
    monkeypatch.setattr(time, "perf_counter", lambda: float(next(now)))
    for _ in range(2):
        with clock.step():
            for _ in range(2):
                with clock.busy():
                    pass
    # (14 - 11) + (18 - 16) of 20 - 10
    assert clock.read() == (5.0, 10.0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_a_gpus_work_is_timed_on_the_gpu() -> None:
    clock = StepClock(torch.device("cuda"))
    cycles = 100_000_000  # 0.05 s at 2 GHz; queued in microseconds
    with clock.step():
        with clock.busy():
            torch.cuda._sleep(cycles)
        torch.cuda._sleep(cycles)
    busy, step = clock.read()
    assert busy > 0.01
    assert step == pytest.approx(2 * busy, rel=0.2)
