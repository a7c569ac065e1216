"""model=tp_mlp: two linear layers that tensor parallelism splits column- then row-wise (Megatron-LM's MLP).

The smallest model that carries a plan: under any other strategy it is an ordinary MLP.
"""

import math
from typing import TYPE_CHECKING

import torch.nn.functional as F
from torch import Tensor, nn

from src.parallel.linear import ColumnParallelLinear, RowParallelLinear

if TYPE_CHECKING:
    from torch.distributed.tensor.parallel.style import ParallelStyle


class TPMLP(nn.Module):
    """Classifier over flattened images with one hidden layer.

    image_shape: (channels, height, width). hidden: the hidden layer's width, over all ranks.
    """

    inputs = "images"

    def __init__(self, image_shape: list[int], hidden: int, num_classes: int) -> None:
        super().__init__()
        self.flatten = nn.Flatten()
        self.up = ColumnParallelLinear(math.prod(image_shape), hidden)
        self.down = RowParallelLinear(hidden, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        """images: (batch, channels, height, width). Returns logits, (batch, num_classes), whole on every rank."""
        logits: Tensor = self.down(F.relu(self.up(self.flatten(images))))
        return logits

    def tensor_plan(self, sequence_parallel: bool) -> "dict[str, ParallelStyle]":
        """How each module is split over the tensor axis, for torch's `parallelize_module`.

        sequence_parallel: no matter here; images have no sequence, and the strategy has refused it by `inputs`.
        """
        from src.parallel.own_split import OwnSplit  # 0.5 s to import, paid only where the model is split

        return {"up": OwnSplit(), "down": OwnSplit()}

    def tensor_counts(self) -> dict[str, int]:
        """What the tensor axis must divide, by the configuration's key."""
        return {"model.hidden": self.up.out_features}
