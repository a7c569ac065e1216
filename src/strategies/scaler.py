"""The loss scaler of ranks that share their verdict on overflow. Importing this costs 0.9 s."""

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.tensor import DTensor


class SharedScaler(ShardedGradScaler):  # type: ignore[misc]
    """torch's, which looks at each rank's own parts of the gradients before it shares its verdict.

    Given DTensors, torch 2.14 would share it over each of their axes first, and warn of that; and of its verdict's
    shape (1,), which DTensor takes for a value that someone forgot to distribute. Here it is a scalar.
    """

    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool = True
    ) -> dict[torch.device, Tensor]:
        groups = [{"params": [_own_part(p) for p in group["params"]]} for group in optimizer.param_groups]
        verdicts: dict[torch.device, Tensor] = super()._unscale_grads_(
            SimpleNamespace(param_groups=groups),  # type: ignore[arg-type]
            inv_scale,
            found_inf.reshape(()),
            allow_fp16,
        )
        return verdicts


def _own_part(parameter: Tensor) -> Any:
    """A stand-in with this rank's part of the gradient, in the same memory."""
    gradient = parameter.grad
    return SimpleNamespace(grad=gradient.to_local() if isinstance(gradient, DTensor) else gradient)
