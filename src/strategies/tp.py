"""strategy=tp: tensor parallelism (Megatron-LM, Shoeybi et al. 2019), alone or with data parallelism beside it.

Each layer's weights and arithmetic are split over `tp` ranks, which read the same samples; the ranks that are left are
data parallel, and `sharding` says how: whole copies (none), or sharded once more (zero2, zero3, hybrid).
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from src.batch import MicroBatch
from src.footprint import Footprint, ModelSizes
from src.mesh import make_mesh
from src.objective import EvalSums
from src.parallel.data import data_parallel, sync_gradients
from src.strategies.autograd import AutogradStrategy, average_buffers
from src.strategies.base import Axis, BuildSpec, Setting, Support
from src.strategies.degrees import data_axis, data_ranks, lone_sequence_problems, tensor_problems
from src.strategies.footprint import MAX_TENSOR_DEGREE, ModelPart
from src.strategies.plan_problems import CARRIES, fused_sgd_problems
from src.strategies.unit_footprint import layer_traffic, part_footprint


class TensorParallel(AutogradStrategy):
    """tp: ranks that share each layer. sequence_parallel: between the split layers each holds its part of a sequence.

    sync_each_microbatch: as for fsdp, on the data axis.
    """

    supports = Support(
        layout="splits each layer, and its data ranks hold copies or shards of their parts",
        sharding=frozenset({"none", "zero2", "zero3", "hybrid"}),
        model_carries=CARRIES,
    )

    degrees: ClassVar[Mapping[str, int | None]] = {"tp": MAX_TENSOR_DEGREE}

    def __init__(self, tp: int = 2, sequence_parallel: bool = False, sync_each_microbatch: bool = True) -> None:
        self.tp = tp
        self.sequence_parallel = sequence_parallel
        self.sync_each_microbatch = sync_each_microbatch

    @classmethod
    def data_parallel_size(cls, world_size: int, arguments: Mapping[str, Any]) -> int:
        return data_ranks(world_size, tp=arguments.get("tp", 2))

    @classmethod
    def problems(cls, setting: Setting) -> list[str]:
        return fused_sgd_problems(setting) + lone_sequence_problems(setting.arguments.get("tp", 2), setting)

    @classmethod
    def model_problems(cls, model: nn.Module, setting: Setting) -> list[str]:
        arguments = setting.arguments
        return tensor_problems(model, arguments.get("tp", 2), arguments.get("sequence_parallel", False), setting)

    @classmethod
    def casts_weights(cls, setting: Setting) -> bool:
        return True

    @classmethod
    def part(cls, model: nn.Module, example: Tensor, setting: Setting, world_rank: int = 0) -> ModelPart:
        from src.parallel.narrow import narrowed, objective

        degree, sequence_parallel = setting.arguments.get("tp", 2), setting.arguments.get("sequence_parallel", False)
        loss = objective(model, sequence_parallel)
        narrowed(model, degree, sequence_parallel)
        return replace(super().part(model, example, setting, world_rank), loss=loss)

    @classmethod
    def footprint(cls, sizes: ModelSizes, setting: Setting, world_rank: int = 0) -> Footprint:
        made = part_footprint(sizes, setting)
        return replace(made, traffic={**made.traffic, **layer_traffic(sizes, setting, setting.arguments.get("tp", 2))})

    def build(self, model: nn.Module, optimizer: Any, spec: BuildSpec) -> None:
        self.mesh = make_mesh(spec.world, spec.sharding, tensor=self.tp)
        super().build(model, optimizer, spec)

    def data_axis(self, spec: BuildSpec) -> Axis:
        return data_axis(self.mesh)

    def wrap(self, model: nn.Module, spec: BuildSpec) -> nn.Module:
        from src.parallel.plan import refuse_unknown_keys  # imports DTensor, 1 s
        from src.parallel.tensor import tensor_parallel

        refuse_unknown_keys(model, self.sequence_parallel)
        tensor_parallel(model, self.mesh["tensor"], self.sequence_parallel)
        # A lone data rank in fp32 has nobody to meet and nothing to cast.
        self.is_wrapped = self.data.size > 1 or spec.precision.compute_dtype is not None
        if self.is_wrapped:
            data_parallel(model, self.mesh, spec.precision, spec.sharding)
        return model.to(spec.world.device)

    def compute_context(self) -> AbstractContextManager[None]:
        return nullcontext()  # the mixed-precision policy casts

    @contextmanager
    def gradient_sync(self, is_last: bool) -> Iterator[None]:
        from torch.distributed.tensor.parallel import loss_parallel

        if self.is_wrapped:
            sync_gradients(self.model, is_last, self.sync_each_microbatch)
        with loss_parallel():
            yield

    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        from src.parallel.vocabulary import split_cross_entropy_sum

        return split_cross_entropy_sum(logits, targets)

    def forward_backward(self, microbatches: Sequence[MicroBatch], valid_targets: int | Tensor) -> Tensor | None:
        from src.parallel.tensor import settle_gradients

        loss = super().forward_backward(microbatches, valid_targets)
        settle_gradients(self.trained)
        return loss

    def clip(self, max_norm: float) -> Tensor:
        from src.parallel.norm import total_norm

        # Over all axes of the mesh: parts are added up, and what is replicated counts once.
        norm = total_norm([p.grad for p in self.trained if p.grad is not None])
        nn.utils.clip_grads_with_norm_(self.trained, max_norm, norm)
        return norm

    def evaluate(self, batch: MicroBatch) -> EvalSums:
        from torch.distributed.tensor.parallel import loss_parallel

        from src.parallel.vocabulary import split_evaluation_sums

        with torch.no_grad(), loss_parallel():
            return split_evaluation_sums(self.model(batch.inputs), batch.targets)

    def weights(self) -> dict[str, Tensor] | None:
        from src.parallel.tensor import whole_weights

        average_buffers(self.model, self.data)
        weights = whole_weights(self.model, keep=self.spec.world.is_main)
        return weights if self.spec.world.is_main else None
