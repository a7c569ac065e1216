"""strategy=fsdp: FSDP2, torch's `fully_shard` (Zhao et al. 2023, "PyTorch FSDP", VLDB; per-parameter sharding).

Parameters, gradients and optimizer states are sharded over the ranks; a unit's weights are gathered for its
forward and backward and freed again (zero3), or kept between the two (zero2).
"""

from contextlib import AbstractContextManager, contextmanager, nullcontext
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from src.mesh import data_mesh
from src.strategies.autograd import AutogradStrategy, average_buffers
from src.strategies.base import BuildSpec, Setting, Support


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
            return ["optimizer.fused=true: torch has no fused SGD for the sharded tensors of FSDP2. Use optimizer.fused=false."]
        return []

    def wrap(self, model: nn.Module, spec: BuildSpec) -> nn.Module:
        from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

        mesh = data_mesh(spec.world, spec.sharding)
        dtype = spec.precision.compute_dtype
        options = {
            "mesh": mesh,
            "reshard_after_forward": spec.sharding.level != "zero2",
            "offload_policy": CPUOffloadPolicy(pin_memory=spec.world.device.type == "cuda")
            if spec.sharding.offload == "all"
            else OffloadPolicy(),
        }
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
        for module in model.modules():
            if isinstance(module, _BatchNorm):
                # Running statistics must stay fp32, and weight and statistics of one type: a unit of its own.
                fully_shard(module, mp_policy=MixedPrecisionPolicy(), **options)
        for unit in getattr(model, "units", list)():
            fully_shard(unit, mp_policy=policy, **options)
        fully_shard(model, mp_policy=policy, **options)
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
        self.model.set_is_last_backward(is_last)
        self.model.set_requires_gradient_sync(is_last or self.sync_each_microbatch)
        yield

    def clip(self, max_norm: float) -> Tensor:
        # A DTensor: summed over the shards only when it is asked for its full value.
        return super().clip(max_norm).full_tensor()

    def weights(self) -> dict[str, Tensor] | None:
        from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict  # 1.2 s to import

        average_buffers(self.model, self.data)
        whole = get_model_state_dict(self.model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        return whole if self.spec.world.is_main else None
