"""Data parallelism by `fully_shard` (Zhao et al. 2023, "PyTorch FSDP", VLDB; per-parameter) and by `replicate`.

`replicate` is the same machinery with whole copies: it all-reduces gradients, casts to 16 bits by the same policy, and
unlike DistributedDataParallel it takes parameters that are split over other axes of the mesh.
"""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.modules.batchnorm import _BatchNorm

from src.mesh import data_part
from src.precision import Precision
from src.sharding import Sharding

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule, OffloadPolicy


def data_parallel(model: nn.Module, mesh: DeviceMesh, precision: Precision, sharding: Sharding) -> nn.Module:
    """`model` with its gradients *summed* over the data axes of `mesh` (of `make_mesh`), sharded as `sharding` says.

    In place. Comes after everything that changes the parameters themselves (tensor parallelism). The model's `units()`
    are gathered one by one. Under 16-bit precision activations and gathered weights have that type; gradients are
    reduced, and weights and optimizer states kept, in fp32.
    """
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy  # 0.9 s to import

    wrap = _replicated(mesh) if sharding.level == "none" else _sharded(mesh, sharding)
    mixed = MixedPrecisionPolicy(param_dtype=precision.compute_dtype, reduce_dtype=torch.float32)
    for module in model.modules():
        if isinstance(module, _BatchNorm):
            # Running statistics must stay fp32, and weight and statistics of one type: a unit of its own.
            wrap(module, mp_policy=MixedPrecisionPolicy())
    for unit in getattr(model, "units", list)():
        wrap(unit, mp_policy=mixed)
    wrap(model, mp_policy=mixed)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # Sum instead of mean: the loss is normalised once, over all ranks. gloo needs both calls.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    return model


def sync_gradients(model: nn.Module, is_last: bool, sync_each_microbatch: bool) -> None:
    """Whether the next backward of a `data_parallel` model reduces gradients, and whether it is the step's last."""
    wrapped = cast("FSDPModule", model)
    wrapped.set_is_last_backward(is_last)
    wrapped.set_requires_gradient_sync(is_last or sync_each_microbatch)


def _sharded(mesh: DeviceMesh, sharding: Sharding) -> Callable[..., Any]:
    from torch.distributed.fsdp import fully_shard

    return partial(
        fully_shard,
        mesh=data_part(mesh),
        reshard_after_forward=sharding.level != "zero2",
        offload_policy=_offload_policy(mesh, sharding),
    )


def _replicated(mesh: DeviceMesh) -> Callable[..., Any]:
    from torch.distributed._composable.replicate_with_fsdp import replicate

    return partial(replicate, mesh=data_part(mesh))


def _offload_policy(mesh: DeviceMesh, sharding: Sharding) -> "OffloadPolicy":
    """Shards in the host's memory, pinned where a GPU copies from it; or on the device."""
    from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy

    if sharding.offload == "all":
        return CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda")
    return OffloadPolicy()
