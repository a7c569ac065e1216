"""strategy=fsdp: FSDP2, torch's `fully_shard` (Zhao et al. 2023, "PyTorch FSDP", VLDB; per-parameter sharding).

Parameters, gradients and optimizer states are sharded over the ranks; a unit's weights are gathered for its
forward and backward and freed again (zero3), or kept between the two (zero2).
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from src.mesh import data_mesh
from src.strategies.autograd import AutogradStrategy, average_buffers, gathered_weights
from src.strategies.base import BuildSpec, Setting, Support

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule, OffloadPolicy
    from torch.distributed.tensor import DTensor


class FSDP2(AutogradStrategy):
    """sync_each_microbatch: reduce-scatter after every micro-batch (least memory), or once a step (least traffic)."""

    supports = Support(
        layout="always shards gradients and optimizer states",
        sharding=frozenset({"zero2", "zero3", "hybrid"}),
        offload=frozenset({"all"}),
    )

    def __init__(self, sync_each_microbatch: bool = True) -> None:
        self.sync_each_microbatch = sync_each_microbatch

    @classmethod
    def problems(cls, setting: Setting) -> list[str]:
        if setting.optimizer.get("_target_") == "torch.optim.SGD" and setting.optimizer.get("fused"):
            return [
                "optimizer.fused=true: torch has no fused SGD for FSDP2's sharded tensors. Use optimizer.fused=false."
            ]
        return []

    def wrap(self, model: nn.Module, spec: BuildSpec) -> nn.Module:
        from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

        mixed = MixedPrecisionPolicy(param_dtype=spec.precision.compute_dtype, reduce_dtype=torch.float32)
        shard = partial(
            fully_shard,
            mesh=data_mesh(spec.world, spec.sharding),
            reshard_after_forward=spec.sharding.level != "zero2",
            offload_policy=offload_policy(spec),
        )
        for module in model.modules():
            if isinstance(module, _BatchNorm):
                # Running statistics must stay fp32, and weight and statistics of one type: a unit of its own.
                shard(module, mp_policy=MixedPrecisionPolicy())
        for unit in getattr(model, "units", list)():
            shard(unit, mp_policy=mixed)
        shard(model, mp_policy=mixed)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                # Sum instead of mean: the loss is normalised once, over all ranks. gloo needs both calls.
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)
        return model

    def compute_context(self) -> AbstractContextManager[None]:
        return nullcontext()  # the mixed-precision policy casts

    @contextmanager
    def gradient_sync(self, is_last: bool) -> Iterator[None]:
        model = cast("FSDPModule", self.model)
        model.set_is_last_backward(is_last)
        model.set_requires_gradient_sync(is_last or self.sync_each_microbatch)
        yield

    def clip(self, max_norm: float) -> Tensor:
        # A DTensor: summed over the shards only when it is asked for its full value.
        return cast("DTensor", super().clip(max_norm)).full_tensor()

    def weights(self) -> dict[str, Tensor] | None:
        average_buffers(self.model, self.data)
        return gathered_weights(self.model, self.spec.world)


def offload_policy(spec: BuildSpec) -> "OffloadPolicy":
    """Shards in the host's memory, pinned where a GPU copies from it; or on the device."""
    from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy

    if spec.sharding.offload == "all":
        return CPUOffloadPolicy(pin_memory=spec.world.device.type == "cuda")
    return OffloadPolicy()
