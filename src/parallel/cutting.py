"""Cutting a model into the stages of a pipeline.

Apart from `stages`, whose import costs 2 s: the checks cut a model without memory to see what would come of it.
"""

import copy
from collections import defaultdict
from collections.abc import Sequence
from typing import cast

from torch import nn

from src.parallel.pipeline import Cuttable


def cut(model: nn.Module, layers: Sequence[range]) -> list[nn.Module]:
    """Models of the given layers only. `model` itself becomes the last of them, so that nothing holds the rest.

    The parameters are the model's own: no weight is copied or drawn again.
    """
    stages = [_twin(model) for _ in layers[1:]] + [model]
    for stage, kept in zip(stages, layers, strict=True):
        cast(Cuttable, stage).keep_layers(kept)
    return stages


def cut_twins(model: nn.Module, layers: Sequence[range]) -> list[nn.Module]:
    """As `cut`, which `model` itself outlives."""
    return cut(_twin(model), layers)


def _twin(model: nn.Module) -> nn.Module:
    """A deep copy that has "seen" the tensors shares them, and copies only the modules around them."""
    tensors = {id(tensor): tensor for tensor in [*model.parameters(), *model.buffers()]}
    return copy.deepcopy(model, dict(tensors))


def shared_by_stages(model: nn.Module, layers: Sequence[range]) -> list[str]:
    """The parameters that several stages would train, each a copy of its own: by all the names that they have there.

    layers: of all stages. A name: "embedding.weight = head.weight".
    """
    stages = cut_twins(model, layers)
    names: dict[int, dict[str, None]] = defaultdict(dict)
    holders: dict[int, set[int]] = defaultdict(set)
    for number, stage in enumerate(stages):
        for name, parameter in stage.named_parameters(remove_duplicate=False):
            if parameter.requires_grad:
                names[id(parameter)][name] = None
                holders[id(parameter)].add(number)
    return [" = ".join(names[key]) for key, numbers in holders.items() if len(numbers) > 1]
