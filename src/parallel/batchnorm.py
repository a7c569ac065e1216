"""Batch normalisation over the whole batch of all data ranks (Ioffe & Szegedy 2015, "Batch Normalization").

Each rank alone would normalise by the statistics of its own samples, and so learn something else than one process. On
GPUs torch's SyncBatchNorm does it; of CPUs torch 2.14's refuses tensors, so there it is computed here.
"""

import logging
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

log = logging.getLogger(__name__)


def synchronize_batchnorm(model: nn.Module, device: torch.device) -> nn.Module:
    """`model` with all its BatchNorms over the ranks of the default process group. Before any strategy wraps it.

    device: where it will be. Names and values of weights and statistics stay.
    """
    norms = [module for module in model.modules() if isinstance(module, _BatchNorm)]
    if not norms:
        log.warning("strategy.sync_batchnorm=true changes nothing: %s has no BatchNorm.", type(model).__name__)
    if device.type == "cuda":
        converted: nn.Module = nn.SyncBatchNorm.convert_sync_batchnorm(model)  # type: ignore[no-untyped-call]
        return converted
    for module in norms:
        # The same object: whoever holds it already (a layer that is recomputed) goes on with the right one.
        module.__class__ = GlobalBatchNorm
    return model


class GlobalBatchNorm(_BatchNorm):
    """BatchNorm1d, 2d or 3d by the mean and variance over all ranks' samples, which must be equally many on each.

    Four sums of one number a channel in a forward and backward, in fp32 whatever the input's type. What a short step
    is padded with counts as samples, as it does without ranks.
    """

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"BatchNorm takes (batch, channels, ...), and this is of {input.dim()} dim(s).")

    def forward(self, input: Tensor) -> Tensor:
        """input: (batch, channels, ...), and the same back."""
        self._check_input_dim(input)
        if not self.training:
            return super().forward(input)
        x = input.float()
        dims = [dim for dim in range(x.dim()) if dim != 1]
        count = x.numel() // x.shape[1] * dist.get_world_size()
        # The squares of what is left of the mean, and not the mean of squares: that difference would lose digits.
        mean = sum_over_ranks(x.sum(dims)) / count
        centred = x - per_channel(mean, x)
        variance = sum_over_ranks(centred.square().sum(dims)) / count
        if self.track_running_stats:
            self.follow(mean.detach(), variance.detach() * (count / max(count - 1, 1)))
        scale = (variance + self.eps).rsqrt()
        if self.weight is not None:
            scale = scale * self.weight
        out = centred * per_channel(scale, x)
        return (out if self.bias is None else out + per_channel(self.bias, x)).to(input.dtype)

    @torch.no_grad()
    def follow(self, mean: Tensor, variance: Tensor) -> None:
        """Move the running statistics. variance: unbiased, as torch's own keeps it."""
        assert self.running_mean is not None
        assert self.running_var is not None
        assert self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)
        share = 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), share)
        self.running_var.lerp_(variance.to(self.running_var.dtype), share)


def sum_over_ranks(x: Tensor) -> Tensor:
    """The sum over the default process group. Backward: the gradients' sum, since each rank's loss uses the result."""
    return cast(Tensor, _Sum.apply(x))  # type: ignore[no-untyped-call]


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        total = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return sum_over_ranks(gradient)


def per_channel(values: Tensor, x: Tensor) -> Tensor:
    """values: (channels,), shaped so that they meet dim 1 of `x`."""
    return values.view(1, -1, *[1] * (x.dim() - 2))
