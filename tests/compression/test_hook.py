"""DDP's buckets are made once, before the first step, whatever DDP and the model look like."""

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from src.compression.topk import TopK
from src.parallel.recompute import Recomputed, recompute_activations
from src.strategies.base import Axis
from src.strategies.ddp_hook import Hook
from tests.compression.building import linear_model


@pytest.mark.parametrize("device_ids", [None, [0]], ids=["host", "device"])
def test_buckets_are_arranged_where_ddp_moves_its_inputs(
    alone_in_the_world: None, device_ids: list[int] | None
) -> None:
    wrapped = DistributedDataParallel(linear_model())
    wrapped.device_ids = device_ids  # as on a GPU; "cpu:0" is a device, too
    Hook(TopK()).register(wrapped, Axis())
    assert wrapped(torch.ones(2, 4)).shape == (2, 3)
    assert all(parameter.grad is None for parameter in wrapped.parameters())


def test_a_model_that_recomputes_goes_on_doing_so(alone_in_the_world: None) -> None:
    model = recompute_activations(linear_model(), "full")
    Hook(TopK()).register(DistributedDataParallel(model), Axis())
    assert isinstance(model.forward, Recomputed)
