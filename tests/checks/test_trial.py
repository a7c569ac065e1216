"""What building parts on trial refuses."""

import pytest
from torch import nn

from src.checks.trial import prepare
from src.errors import Refused
from tests.composing import composed


class Frozen(nn.Module):
    """A model with nothing to train."""

    inputs = "images"

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 10).requires_grad_(False)


def test_a_model_with_nothing_to_train_is_refused():
    config, _ = composed("model=mlp", "launch.device=cpu")
    config["model"] = {"_target_": "tests.checks.test_trial.Frozen"}
    with pytest.raises(Refused, match="has no parameter that asks for a gradient"):
        prepare(config)
