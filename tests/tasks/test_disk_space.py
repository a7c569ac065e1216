"""What a run's checkpoints will take, as the warning before the first step estimates it."""

from functools import partial

import pytest
import torch

from src.strategies.base import OptimizerFactory
from src.tasks.disk_space import slots_of


@pytest.mark.parametrize(
    ("optimizer", "slots"),
    [
        (partial(torch.optim.AdamW, lr=0.1, fused=True), 2),
        (partial(torch.optim.Adam, lr=0.1, amsgrad=True), 3),
        (partial(torch.optim.SGD, lr=0.1, momentum=0.9), 1),
        (partial(torch.optim.SGD, lr=0.1), 0),
    ],
)
def test_an_optimizers_slots_are_counted(optimizer: OptimizerFactory, slots: int) -> None:
    assert slots_of(optimizer) == slots
