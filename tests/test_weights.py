"""Weights that rank 0 reads: given out whole, or not at all."""

import pytest
import torch
from torch import Tensor, nn

from src.weights import filled
from src.world import World


class Unread(nn.Module):
    """Two layers on meta, and what it says that they hold."""

    def __init__(self, **values: Tensor) -> None:
        super().__init__()
        with torch.device("meta"):
            self.first, self.second = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)
        self.values = values

    def read_weights(self) -> dict[str, Tensor]:
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
