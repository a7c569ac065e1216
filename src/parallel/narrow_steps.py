"""What a tensor-parallel rank does between its parts of layers, in the sizes of one rank: for estimates of memory.

Each stands for a collective of DTensor (torch 2.14), or for an operation that it does in parts, and allocates what that
allocates. The numbers mean nothing.
"""

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import Placement, Shard


def enlarge(tensor: Tensor, placement: Placement, degree: int) -> Tensor:
    """The whole of a part; its gradient is a part again. As it is where the placement is no part."""
    return Resized.apply(tensor, placement.dim, degree, True) if isinstance(placement, Shard) else tensor


def lessen(tensor: Tensor, placement: Placement, degree: int) -> Tensor:
    """A part of the whole; its gradient is whole again."""
    return Resized.apply(tensor, placement.dim, degree, False) if isinstance(placement, Shard) else tensor


class Resized(torch.autograd.Function):
    """A dim times or by the degree; negative ones count from the end."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, dim: int, degree: int, is_larger: bool) -> Tensor:
        ctx.given = (dim, degree, is_larger)
        return resized(tensor, dim, degree, is_larger)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        dim, degree, is_larger = ctx.given
        return resized(gradient, dim, degree, not is_larger), None, None, None


def resized(tensor: Tensor, dim: int, degree: int, is_larger: bool) -> Tensor:
    shape = list(tensor.shape)
    shape[dim] = shape[dim] * degree if is_larger else -(-shape[dim] // degree)
    return tensor.new_empty(shape)


def embed(tokens: Tensor, table: Tensor, num_rows: int) -> Tensor:
    """Vectors of a table of which this is one rank's part, of so many rows in all."""
    vectors: Tensor = Embedded.apply(tokens, table, num_rows)
    return vectors


class Embedded(torch.autograd.Function):
    """Backward makes the gradient of all rows, and cuts this rank's part out of it: DTensor 2.14 has no other way."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, table: Tensor, num_rows: int) -> Tensor:
        ctx.save_for_backward(tokens)
        ctx.rows = (num_rows, table.shape[0])
        return table.new_empty((*tokens.shape, table.shape[1]))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        num_rows, num_own = ctx.rows
        whole = gradient.new_empty((num_rows, gradient.shape[-1]))
        return None, whole.narrow(0, 0, num_own).clone(), None


def split_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """The summed cross-entropy of a rank's part of the logits under torch's `loss_parallel`, scalar."""
    loss: Tensor = SplitLoss.apply(logits.float().flatten(0, -2))
    return loss


class SplitLoss(torch.autograd.Function):
    """Keeps the part's log-softmax; backward puts the gradient together in three more tensors of its size."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor) -> Tensor:
        shifted = logits - logits.amax(-1, keepdim=True)
        result: Tensor = shifted - shifted.exp().sum(-1, keepdim=True)
        ctx.save_for_backward(result)
        return result.sum()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (result,) = ctx.saved_tensors
        hits = torch.zeros_like(result)
        return (hits + result.exp()) * gradient
