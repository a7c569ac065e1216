"""The part of a model that one tensor-parallel rank computes with, on the meta device: for estimates of memory."""

from typing import cast

from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from torch.distributed.tensor.parallel.style import ParallelStyle

from src.parallel.linear import ColumnParallelLinear, RowParallelLinear
from src.parallel.own_split import OwnSplit
from src.parallel.plan import Both, Splittable, resolved
from src.parallel.tensor import VocabularyParallel


def narrowed(model: nn.Module, degree: int, sequence_parallel: bool) -> nn.Module:
    """`model`, whose weights are cut to the first rank's part as its plan says. In place, and on meta only."""
    plan = resolved(model, cast(Splittable, model).tensor_plan(sequence_parallel))
    for name, style in plan.items():
        cut(model.get_submodule(name), style, degree)
    return model


def cut(module: nn.Module, style: ParallelStyle, degree: int) -> None:
    """Of torch's styles those that a plan may use; what else there is leaves weights whole."""
    is_table, splits_itself = isinstance(module, nn.Embedding), isinstance(style, OwnSplit)
    if isinstance(style, Both):
        for part in style.styles:
            cut(module, part, degree)
    elif isinstance(style, ColwiseParallel) or (splits_itself and isinstance(module, ColumnParallelLinear)):
        cut_dim(module, "weight", 1 if is_table else 0, degree)
        cut_dim(module, "bias", 0, degree)
    elif isinstance(style, RowwiseParallel) or (splits_itself and isinstance(module, RowParallelLinear)):
        cut_dim(module, "weight", 0 if is_table else 1, degree)
    elif isinstance(style, VocabularyParallel):
        cut_dim(module, "weight", 0, degree)


def cut_dim(module: nn.Module, name: str, dim: int, degree: int) -> None:
    """A parameter to its first ceil(size / degree) places, as DTensor cuts."""
    whole = module._parameters.get(name)
    if whole is not None:
        part = whole.detach().narrow(dim, 0, -(-whole.shape[dim] // degree)).contiguous()
        module._parameters[name] = nn.Parameter(part, whole.requires_grad)
