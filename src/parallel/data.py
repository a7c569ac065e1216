"""Data parallelism by `fully_shard` (Zhao et al. 2023, "PyTorch FSDP", VLDB; per-parameter) and by `replicate`.

`replicate` is the same machinery with whole copies: it all-reduces gradients, casts to 16 bits by the same policy, and
unlike DistributedDataParallel it takes parameters that are split over other axes of the mesh.
"""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.modules.batchnorm import _BatchNorm

from src.mesh import data_part
from src.precision import Precision
from src.sharding import Sharding

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule, OffloadPolicy
    from torch.distributed.tensor import DTensor


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


def omit_sync(model: nn.Module, is_last: bool) -> None:
    """Let the next backward of a `data_parallel` model keep whole gradients, even if it is the step's last."""
    wrapped = cast("FSDPModule", model)
    wrapped.set_is_last_backward(is_last)
    wrapped.set_requires_gradient_sync(False)


def forget_whole_gradients(model: nn.Module) -> None:
    """Drop what backwards that did not reduce have kept; else the next one would add to it and reduce both.

    torch 2.14 keeps it where only private names reach: a parameter's own `grad` is the shard's.
    """
    from torch.distributed.fsdp import FSDPModule

    for module in model.modules():
        if isinstance(module, FSDPModule):
            for group in module._get_fsdp_state()._fsdp_param_groups:
                for parameter in group.fsdp_params:
                    parameter.unsharded_accumulated_grad = None
                    if hasattr(parameter, "_unsharded_param"):  # there since its first gathering
                        parameter._unsharded_param.grad = None


def gradient_reductions(model: nn.Module) -> Callable[[], None]:
    """The reductions of one backward of a sharded `data_parallel` model, on buffers of their own; to be called.

    As `fully_shard` sends them: unit by unit from the last, in fp32, dim 0 padded to a multiple of the shards.
    """
    calls = []
    for parameters in reversed(_parameters_of_units(model)):
        mesh = parameters[0].device_mesh
        shards = mesh["shard"].size()
        count = sum(-(-p.shape[0] // shards) * shards * p.shape[1:].numel() for p in parameters)
        whole = torch.zeros(count, device=mesh.device_type)
        calls.append((whole, whole.new_zeros(count // shards), mesh))

    def reduce() -> None:
        for whole, shard, mesh in calls:
            dist.reduce_scatter_single(shard, whole, group=mesh.get_group("shard"))
            if "replicate" in (mesh.mesh_dim_names or ()):
                dist.all_reduce(shard, group=mesh.get_group("replicate"))

    return reduce


def _parameters_of_units(model: nn.Module) -> list[list["DTensor"]]:
    """The trained parameters of each `fully_shard` unit, without those of the units inside it."""
    from torch.distributed.fsdp import FSDPModule

    units: list[list[DTensor]] = []
    taken: set[nn.Parameter] = set()
    for module in reversed(list(model.modules())):  # what is inside comes before what it is in
        if isinstance(module, FSDPModule):
            own = [p for p in module.parameters() if p not in taken and p.requires_grad]
            taken.update(own)
            if own:
                units.append([cast("DTensor", p) for p in own])
    return units[::-1]


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
