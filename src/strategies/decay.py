"""Which parameters weight decay leaves alone: norms' and biases', which are those of fewer than two dims.

Decay keeps the weights of products small, whose scale the loss hardly feels; a norm's gain and a bias have no such
freedom, and are drawn towards a value that means nothing (as GPT-3's and Llama's training left them alone). Embeddings
are tables of two dims and decay, tied to the head or not, as they do in nanoGPT.
"""

from collections.abc import Callable, Collection, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from src.strategies.base import OptimizerFactory


def norms_and_biases(model: nn.Module) -> frozenset[str]:
    """Their names. model: as it was made; engines flatten parameters and give them other shapes."""
    return frozenset(name for name, parameter in model.named_parameters() if parameter.ndim < 2)


def sparing(
    optimizer: "OptimizerFactory", named: Callable[[], Iterable[tuple[str, nn.Parameter]]], names: Collection[str]
) -> "OptimizerFactory":
    """`optimizer`, with a group of its own, without weight decay, for those of `named` parameters that are in `names`.

    named: asked when the optimizer is made, since an engine may put others in the place of a model's until then. A
    group that would be empty is left out.
    """
    if not names:
        return optimizer

    def make(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        given, spared = list(parameters), {parameter for name, parameter in named() if name in names}
        groups: list[dict[str, Any]] = [
            {"params": [parameter for parameter in given if parameter not in spared]},
            {"params": [parameter for parameter in given if parameter in spared], "weight_decay": 0.0},
        ]
        return optimizer([group for group in groups if group["params"]])  # type: ignore[misc]

    return make
