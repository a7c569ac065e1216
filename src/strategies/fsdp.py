"""strategy=fsdp: FSDP2, torch's `fully_shard` (Zhao et al. 2023, "PyTorch FSDP", VLDB; per-parameter sharding).

Parameters, gradients and optimizer states are sharded over the ranks; a unit's weights are gathered for its
forward and backward and freed again (zero3), or kept between the two (zero2).
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn

from src.footprint import Footprint, ModelSizes
from src.mesh import make_mesh
from src.parallel.batchnorm import synchronize_batchnorm
from src.parallel.data import data_parallel, forget_whole_gradients, gradient_reductions, omit_sync, sync_gradients
from src.strategies.autograd import AutogradStrategy, average_buffers, gathered_weights
from src.strategies.base import BuildSpec, Setting, Support
from src.strategies.plan_problems import fused_sgd_problems
from src.strategies.unit_footprint import unit_footprint
from src.weights import Values, is_unread

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


class FSDP2(AutogradStrategy):
    """sync_each_microbatch: reduce-scatter after every micro-batch (least memory), or once a step (least traffic).

    sync_batchnorm: BatchNorm by the samples of all ranks.
    """

    supports = Support(
        layout="always shards gradients and optimizer states",
        sharding=frozenset({"zero2", "zero3", "hybrid"}),
        offload=frozenset({"all"}),
        omits="the reductions of gradients",
        omits_not="the gathering of weights",
        compiles=True,
    )
    synchronizes = True  # but in `unsynchronized`

    def __init__(self, sync_each_microbatch: bool = True, sync_batchnorm: bool = False) -> None:
        self.sync_each_microbatch = sync_each_microbatch
        self.sync_batchnorm = sync_batchnorm

    @classmethod
    def problems(cls, setting: Setting) -> list[str]:
        return fused_sgd_problems(setting)

    @classmethod
    def casts_weights(cls, setting: Setting) -> bool:
        return True

    @classmethod
    def footprint(cls, sizes: ModelSizes, setting: Setting, world_rank: int = 0) -> Footprint:
        return unit_footprint(sizes, setting)

    def with_values(self, model: nn.Module, spec: BuildSpec) -> nn.Module:
        return model  # `wrap` fills the shards

    def wrap(self, model: nn.Module, spec: BuildSpec) -> nn.Module:
        if self.sync_batchnorm:
            model = synchronize_batchnorm(model, spec.world.device)
        data_parallel(model, make_mesh(spec.world, spec.sharding), spec.precision, spec.sharding)
        if is_unread(model):
            on_host = torch.device("cpu") if spec.sharding.offload == "all" else None
            Values(model, spec.world, on_host).fill_all(model)
        return model

    def compute_context(self) -> AbstractContextManager[None]:
        return nullcontext()  # the mixed-precision policy casts

    def gradient_sync(self, is_last: bool) -> AbstractContextManager[None]:
        if self.synchronizes:
            sync_gradients(self.model, is_last, self.sync_each_microbatch)
        else:
            omit_sync(self.model, is_last)
        return nullcontext()

    @contextmanager
    def unsynchronized(self) -> Iterator[None]:
        self.synchronizes = False
        try:
            yield
        finally:
            self.synchronizes = True
            forget_whole_gradients(self.model)

    def synchronization_alone(self, num_microbatches: int) -> Callable[[], None]:
        reduce = gradient_reductions(self.model)
        times = num_microbatches if self.sync_each_microbatch else 1

        def all_of_a_step() -> None:
            for _ in range(times):
                reduce()

        return all_of_a_step

    def clip(self, max_norm: float) -> Tensor:
        # A DTensor: summed over the shards only when it is asked for its full value.
        return cast("DTensor", super().clip(max_norm)).full_tensor()

    def weights(self) -> dict[str, Tensor] | None:
        average_buffers(self.model, self.data)
        return gathered_weights(self.model, self.spec.world)
