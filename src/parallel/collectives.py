"""Collectives over one mesh axis that gradients pass through (Shoeybi et al. 2019, "Megatron-LM", section 3).

An activation is either whole (the same on every rank of the axis, and so is its gradient) or split (each rank holds
its part). Each function here turns one into the other, and its backward is the opposite turn, which is another of
them: gradients of gradients are right as well. torch's own `all_reduce` has no backward at all, and
`torch.distributed.nn`'s sums in both directions: n ranks would get n times the gradient.

mesh: one axis. Every rank of it calls the function, with the same shapes. What the caller passes is never written to.
"""

from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh


def copy_to_axis(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """Megatron's f. Forward: x as it is, no communication. Backward: the gradients' sum over the axis.

    For a whole x that each rank uses with its own part of the weights: each has only its part of the gradient.
    """
    return cast(Tensor, _Copy.apply(x, mesh))  # type: ignore[no-untyped-call]


def reduce_from_axis(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """Megatron's g. Forward: the sum of x over the axis. Backward: the gradient as it is.

    For the terms of a sum, one a rank. Each term's gradient is the sum's, which every rank has.
    """
    return cast(Tensor, _Reduce.apply(x, mesh))  # type: ignore[no-untyped-call]


def gather_from_axis(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """Forward: all ranks' x, (..., k), side by side, (..., n * k). Backward: the own slice of the gradient."""
    return cast(Tensor, _Gather.apply(x, mesh))  # type: ignore[no-untyped-call]


def slice_for_axis(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """Forward: the own slice, (..., k), of a whole x, (..., n * k). Backward: all ranks' gradients side by side."""
    return cast(Tensor, _Slice.apply(x, mesh))  # type: ignore[no-untyped-call]


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, mesh: DeviceMesh) -> Tensor:
        ctx.mesh = mesh
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return reduce_from_axis(gradient, ctx.mesh), None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, mesh: DeviceMesh) -> Tensor:
        ctx.mesh = mesh
        # dist.all_reduce writes into what it is given, and adds memory to memory: all ranks need one layout.
        total = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=mesh.get_group())
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return copy_to_axis(gradient, ctx.mesh), None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, mesh: DeviceMesh) -> Tensor:
        ctx.mesh = mesh
        x = x.contiguous()
        parts = [torch.empty_like(x) for _ in range(mesh.size())]
        dist.all_gather(parts, x, group=mesh.get_group())
        return torch.cat(parts, dim=-1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return slice_for_axis(gradient, ctx.mesh), None


class _Slice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, mesh: DeviceMesh) -> Tensor:
        ctx.mesh = mesh
        return x.chunk(mesh.size(), dim=-1)[mesh.get_local_rank()]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return gather_from_axis(gradient, ctx.mesh), None
