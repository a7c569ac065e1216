"""Weights that rank 0 reads: given out whole, or not at all."""

import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from src.weights import filled
from src.world import World
from tests.workers import Pool


class Unread(nn.Module):
    """Two layers on meta, and what it says that they hold."""

    def __init__(self, **values: Tensor) -> None:
        super().__init__()
        with torch.device("meta"):
            self.first, self.second = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)
        self.values, self.read_seconds = values, 0.0

    def read_weights(self) -> dict[str, Tensor]:
        time.sleep(self.read_seconds)
        return {f"{name}.weight": value for name, value in self.values.items()}


ONES = torch.ones(2, 2)


def test_a_tensor_that_was_not_read_is_named_and_not_made_up() -> None:
    for read in ({"first": ONES}, {"second": ONES}, {}):
        lacking = "second" if "first" in read else "first"
        with pytest.raises(ValueError, match=f"gives no {lacking}.weight, which the model has"):
            filled(Unread(**read), World())


def test_a_tensor_that_the_model_has_no_place_for_is_named() -> None:
    with pytest.raises(ValueError, match=r"gives 1 tensor\(s\) that the model has no place for: third.weight"):
        filled(Unread(first=ONES, second=ONES, third=ONES), World())


def test_what_has_its_values_already_keeps_them() -> None:
    model = Unread(first=ONES, second=ONES)
    model.second = nn.Linear(2, 2, bias=False)
    before = model.second.weight.detach().clone()
    filled(model, World())
    assert torch.equal(model.first.weight, ONES)
    assert torch.equal(model.second.weight, before)


def filled_while_rank_0_reads(world: Any, timeout_seconds: float, read_seconds: float) -> list[Tensor]:
    """In a worker: two models' weights, of a group whose collectives wait for `timeout_seconds` only."""
    dist.set_timeout(timedelta(seconds=timeout_seconds))
    weights = []
    for factor in (1, 2):
        model = Unread(first=factor * ONES, second=ONES)
        model.read_seconds = read_seconds
        filled(model, world)
        weights.append(model.first.weight.detach())
    dist.set_timeout(dist.constants.default_pg_timeout)
    return weights


def test_reading_may_take_longer_than_a_collective(pool: Pool) -> None:
    for first, second in pool.run(2, filled_while_rank_0_reads, 1.5, 2.5):
        assert torch.equal(first, ONES)
        assert torch.equal(second, 2 * ONES)
