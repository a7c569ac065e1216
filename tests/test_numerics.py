"""The process-wide switches of torch's arithmetic."""

import pytest
import torch

from src.run import apply_numerics
from src.world import World
from tests.composing import composed


@pytest.mark.parametrize(("precision", "allowed"), [("fp32", False), ("tf32", True), ("bf16", False)])
def test_only_tf32_lets_products_and_convolutions_use_it(precision, allowed):
    config, _ = composed("tracking=off", f"precision={precision}")
    try:
        apply_numerics(config, World(world_rank=1))
        assert torch.backends.cudnn.allow_tf32 is allowed
        assert torch.backends.cuda.matmul.allow_tf32 is allowed
    finally:
        apply_numerics(composed("tracking=off")[0], World(world_rank=1))
