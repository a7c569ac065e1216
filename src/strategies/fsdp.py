"""strategy=fsdp: FSDP2, torch's `fully_shard` (Zhao et al. 2023, "PyTorch FSDP", VLDB; per-parameter sharding).

Parameters, gradients and optimizer states are sharded over the ranks; a unit's weights are gathered for its
forward and backward and freed again (zero3), or kept between the two (zero2).
"""

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, cast

from torch import Tensor, nn

from src.mesh import make_mesh
from src.parallel.data import data_parallel, sync_gradients
from src.strategies.autograd import AutogradStrategy, average_buffers, gathered_weights
from src.strategies.base import BuildSpec, Setting, Support, fused_sgd_problems

if TYPE_CHECKING:
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
        return fused_sgd_problems(setting)

    def wrap(self, model: nn.Module, spec: BuildSpec) -> nn.Module:
        return data_parallel(model, make_mesh(spec.world, spec.sharding), spec.precision, spec.sharding)

    def compute_context(self) -> AbstractContextManager[None]:
        return nullcontext()  # the mixed-precision policy casts

    def gradient_sync(self, is_last: bool) -> AbstractContextManager[None]:
        sync_gradients(self.model, is_last, self.sync_each_microbatch)
        return nullcontext()

    def clip(self, max_norm: float) -> Tensor:
        # A DTensor: summed over the shards only when it is asked for its full value.
        return cast("DTensor", super().clip(max_norm)).full_tensor()

    def weights(self) -> dict[str, Tensor] | None:
        average_buffers(self.model, self.data)
        return gathered_weights(self.model, self.spec.world)
