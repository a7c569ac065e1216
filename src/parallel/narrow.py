"""The part of a model that one tensor-parallel rank computes with, on the meta device: for estimates of memory."""

from collections.abc import Callable
from typing import Any, cast

from torch import Tensor, nn
from torch.distributed.tensor import Placement, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleInput, RowwiseParallel
from torch.distributed.tensor.parallel.style import ParallelStyle

from src.objective import cross_entropy_sum
from src.parallel.linear import ColumnParallelLinear, RowParallelLinear
from src.parallel.narrow_steps import embed, enlarge, lessen, split_loss
from src.parallel.own_split import OwnSplit
from src.parallel.plan import Both, Splittable, resolved
from src.parallel.tensor import VocabularyParallel, Whole


def narrowed(model: nn.Module, degree: int, sequence_parallel: bool) -> nn.Module:
    """`model`, whose weights and activations are cut to the first rank's part as its plan says. In place, on meta."""
    plan = resolved(model, cast(Splittable, model).tensor_plan(sequence_parallel))
    for name, style in plan.items():
        cut(model.get_submodule(name), style, degree)
    return model


def objective(model: nn.Module, sequence_parallel: bool) -> Callable[[Tensor, Tensor], Tensor]:
    """What makes the loss of the logits that the narrowed model gives: parts, where its plan leaves them so."""
    plan = resolved(model, cast(Splittable, model).tensor_plan(sequence_parallel))
    for style in plan.values():
        if isinstance(style, VocabularyParallel) or (isinstance(style, ColwiseParallel) and not style.use_local_output):
            return split_loss
    return cross_entropy_sum


def cut(module: nn.Module, style: ParallelStyle, degree: int) -> None:
    """Of torch's styles those that a plan may use; what else there is leaves weights whole."""
    is_table, splits_itself = isinstance(module, nn.Embedding), isinstance(style, OwnSplit)
    if isinstance(style, Both):
        for part in style.styles:
            cut(module, part, degree)
    elif isinstance(style, ColwiseParallel) or (splits_itself and isinstance(module, ColumnParallelLinear)):
        cut_dim(module, "weight", 1 if is_table else 0, degree)
        cut_dim(module, "bias", 0, degree)
        take(module, getattr(style, "input_layouts", ()), degree)
    elif isinstance(style, RowwiseParallel) or (splits_itself and isinstance(module, RowParallelLinear)):
        cut_dim(module, "weight", 0 if is_table else 1, degree)
        give(module, getattr(style, "output_layouts", ()), degree)
    elif isinstance(style, VocabularyParallel):
        cut_table(cast(nn.Embedding, module), style.stream, degree)
    elif isinstance(style, PrepareModuleInput):
        take(module, style.input_layouts, degree)
    elif isinstance(style, Whole) and style.outputs != style.inputs:
        give(module, style.outputs, degree)


def cut_dim(module: nn.Module, name: str, dim: int, degree: int) -> None:
    """A parameter to its first ceil(size / degree) places, as DTensor cuts."""
    whole = module._parameters.get(name)
    if whole is not None:
        part = whole.detach().narrow(dim, 0, -(-whole.shape[dim] // degree)).contiguous()
        module._parameters[name] = nn.Parameter(part, whole.requires_grad)


def cut_table(table: nn.Embedding, stream: Placement, degree: int) -> None:
    """Its rows, whose gradient is made whole before it is cut. Vectors give scores, as `forward` has it."""
    rows, score = table.weight.shape[0], table.forward
    cut_dim(table, "weight", 0, degree)

    def forward(tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point():
            return lessen(embed(tensor, table.weight, rows), stream, degree)
        return score(enlarge(tensor, stream, degree))

    table.forward = forward  # type: ignore[method-assign,assignment]


def take(module: nn.Module, layouts: Any, degree: int) -> None:
    """What goes in is a part, and gathered."""
    if isinstance(first := layouts[0] if layouts else None, Shard):
        module.register_forward_pre_hook(lambda _, inputs: (enlarge(inputs[0], first, degree), *inputs[1:]))


def give(module: nn.Module, layouts: Any, degree: int) -> None:
    """What comes out is cut to a part."""
    if isinstance(first := layouts[0] if layouts else None, Shard):
        module.register_forward_hook(lambda _, inputs, output: lessen(output, first, degree))
