"""Models as a user might write them, sound and not, for `_target_=tests.own_models.X`."""

import math
import time
from typing import Any

import torch
from torch import nn

from src.models.gpt import GPT as GPT
from src.models.mlp import MLP
from src.models.tp_mlp import TPMLP


class TiedGPT(GPT):
    """Ties its head to its embedding, as most tutorials do it."""

    def __init__(self, **gpt: Any) -> None:
        super().__init__(**gpt)
        assert self.head is not None
        assert self.embedding is not None
        self.head.weight = self.embedding.weight


class TiedInsideABlock(GPT):
    """The norms of each block share their weight, which no cut between blocks parts."""

    def __init__(self, **gpt: Any) -> None:
        super().__init__(**gpt)
        for block in self.blocks.values():
            block.mlp_norm.weight = block.attention_norm.weight


class TiedWhereItReadsWeights(TiedGPT):
    """Can't be built without memory."""

    def __init__(self, **gpt: Any) -> None:
        super().__init__(**gpt)
        self.largest = float(next(self.parameters()).max())


class WithoutSizes(GPT):
    """Can be cut, and does not say where to."""

    layer_parameters: Any = property()


class WithoutCounts(GPT):
    """Has a plan, and does not say what its ranks must divide."""

    tensor_counts: Any = property()


class LeavesOutItsNorms(GPT):
    """A plan in which somebody forgot the norms,."""

    def tensor_plan(self, sequence_parallel: bool) -> Any:
        plan = super().tensor_plan(sequence_parallel)
        return {key: style for key, style in plan.items() if "norm" not in key}


class Misspells(GPT):
    """A plan with two letters the wrong way round."""

    def tensor_plan(self, sequence_parallel: bool) -> Any:
        plan = super().tensor_plan(sequence_parallel)
        plan["blocks.*.mlp.donw"] = plan.pop("blocks.*.mlp.down")
        return plan


class PlansForTheWhole(GPT):
    """Its stages give the plan of the whole model: keys for what they have dropped."""

    def __init__(self, **gpt: Any) -> None:
        super().__init__(**gpt)
        self.whole_plan: Any = None

    def tensor_plan(self, sequence_parallel: bool) -> Any:
        if self.whole_plan is None:
            self.whole_plan = super().tensor_plan(sequence_parallel)
        return self.whole_plan

    def keep_layers(self, layers: range) -> None:
        self.tensor_plan(False)
        super().keep_layers(layers)


class WholeMLP(GPT):
    """A whole MLP in each block, by one style that reaches all inside it."""

    def tensor_plan(self, sequence_parallel: bool) -> Any:
        from torch.distributed.tensor import Replicate

        from src.parallel.tensor import Whole

        plan = super().tensor_plan(sequence_parallel)
        ends = {key: style for key, style in plan.items() if not key.startswith("blocks")}
        return (
            ends
            | {f"blocks.*.{name}": Whole(Replicate()) for name in ("attention_norm", "mlp_norm", "mlp")}
            | {key: style for key, style in plan.items() if key.startswith("blocks.*.attention")}
        )


class BatchNormed(TPMLP):
    """A whole BatchNorm, whose running statistics are floating-point buffers."""

    def __init__(self, **mlp: Any) -> None:
        super().__init__(**mlp)
        self.norm = nn.BatchNorm1d(self.up.in_features)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.down(self.up(self.norm(self.flatten(images))).relu())
        return logits

    def tensor_plan(self, sequence_parallel: bool) -> Any:
        from torch.distributed.tensor import Replicate

        from src.parallel.tensor import Whole

        return {**super().tensor_plan(sequence_parallel), "norm": Whole(Replicate())}


class Waiting(torch.autograd.Function):
    """The identity, whose backward takes `seconds` and no core, as it does where a GPU computes."""

    @staticmethod
    def forward(context: Any, inputs: torch.Tensor, seconds: float) -> torch.Tensor:
        context.seconds = seconds
        return inputs.clone()

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        time.sleep(context.seconds)
        return gradient, None


class LayersThatTakeTheirTime(nn.Module):
    """Six layers of 1 MiB of weights each; backward takes `layer_seconds` between them, on the busiest machine too."""

    inputs = "images"

    def __init__(self, image_shape: list[int], num_classes: int, layer_seconds: float) -> None:
        super().__init__()
        self.layer_seconds = layer_seconds
        self.first = nn.Linear(math.prod(image_shape), 512)
        self.layers = nn.ModuleList(nn.Linear(512, 512) for _ in range(6))
        self.head = nn.Linear(512, num_classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        hidden = self.first(images.flatten(1)).relu()
        for layer in self.layers:
            hidden = Waiting.apply(layer(hidden).relu(), self.layer_seconds)
        return self.head(hidden)


class LooksAtItsInputs(MLP):
    """Decides by the sum of what it is given."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return super().forward(images if images.sum() > 0 else -images)


class CountsItsInputs(MLP):
    """Makes a tensor as long as there are inputs above zero."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return super().forward(images) + images[images > 0].sum()


class ForgetsItsHeads(GPT):
    """Does not say that its ranks must divide the heads."""

    def tensor_counts(self) -> dict[str, int]:
        return {}
