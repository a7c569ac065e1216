"""strategy=fsdp1: the FullyShardedDataParallel wrapper (Zhao et al. 2023, "PyTorch FSDP", VLDB).

Kept for set-ups that still use it: flat parameters, wrapped by size. `strategy=fsdp` is today's form of the idea.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from src.footprint import Footprint, ModelSizes
from src.mesh import make_mesh
from src.parallel.batchnorm import synchronize_batchnorm
from src.strategies.autograd import AutogradStrategy, average_buffers, gathered_weights
from src.strategies.base import BuildSpec, Setting, Support
from src.strategies.flat_footprint import flat_footprint, wrapped
from src.strategies.footprint import ModelPart
from src.strategies.run_state import State
from src.weights import Values, is_unread

if TYPE_CHECKING:
    from torch.distributed.fsdp import FullyShardedDataParallel


class FSDP1(AutogradStrategy):
    """min_unit_parameters: a submodule with at least as many becomes a unit of its own; of a model whose layers must
    not be split (`keeps_units_whole`), the layers do, whatever their size. sync_batchnorm: BatchNorm by the samples of
    all ranks.
    """

    supports = Support(
        layout="always shards gradients and optimizer states",
        sharding=frozenset({"zero2", "zero3", "hybrid"}),
        offload=frozenset({"all"}),
        compiles=True,
    )

    @classmethod
    def problems(cls, setting: Setting) -> list[str]:
        found = []
        if setting.compile and setting.activation_checkpointing != "none":
            # Its hooks inside a layer end the graph there, and torch 2.14 then recomputes outside of any.
            found.append(
                f"trainer.compile=true with trainer.activation_checkpointing={setting.activation_checkpointing}: the"
                " units that FSDP1 makes inside a layer keep it from being compiled with its recomputation."
                " Use strategy=fsdp, trainer.compile=false, or trainer.activation_checkpointing=none."
            )
        if setting.sharding.offload == "all" and setting.device_type == "cpu":
            found.append(
                "sharding.offload=all: FSDP1 pins what it offloads for a GPU, and launch.device is cpu."
                " Use sharding.offload=none, or strategy=fsdp."
            )
        return found

    def __init__(
        self,
        min_unit_parameters: int = 1_000_000,
        sync_each_microbatch: bool = True,
        sync_batchnorm: bool = False,
    ) -> None:
        self.min_unit_parameters = min_unit_parameters
        self.sync_each_microbatch = sync_each_microbatch
        self.sync_batchnorm = sync_batchnorm

    @classmethod
    def casts_weights(cls, setting: Setting) -> bool:
        return True

    @classmethod
    def part(cls, model: nn.Module, example: Tensor, setting: Setting, world_rank: int = 0) -> ModelPart:
        return ModelPart(model, wrapped(model, setting.arguments.get("min_unit_parameters", 1_000_000)))

    @classmethod
    def footprint(cls, sizes: ModelSizes, setting: Setting, world_rank: int = 0) -> Footprint:
        return flat_footprint(sizes, setting)

    def with_values(self, model: nn.Module, spec: BuildSpec) -> nn.Module:
        return model  # `wrap` fills a unit at a time

    def wrap(self, model: nn.Module, spec: BuildSpec) -> nn.Module:
        from torch.distributed.fsdp import (
            CPUOffload,
            FullyShardedDataParallel,
            MixedPrecision,
            ShardingStrategy,
        )

        if self.sync_batchnorm:
            model = synchronize_batchnorm(model, spec.world.device)
        # FSDP1 averages gradients over the ranks; the step's loss is a sum of the ranks' shares.
        self.gradient_factor = float(spec.world.world_size)
        dtype = spec.precision.compute_dtype
        return FullyShardedDataParallel(
            model,
            device_mesh=make_mesh(spec.world, spec.sharding),
            sharding_strategy={
                "zero2": ShardingStrategy.SHARD_GRAD_OP,
                "zero3": ShardingStrategy.FULL_SHARD,
                "hybrid": ShardingStrategy.HYBRID_SHARD,
            }[spec.sharding.level],
            cpu_offload=CPUOffload(offload_params=spec.sharding.offload == "all"),
            auto_wrap_policy=self.policy(model),
            # BatchNorm keeps fp32 throughout: torch wraps it on its own, outside the mixed precision.
            mixed_precision=None
            if dtype is None
            else MixedPrecision(
                param_dtype=dtype,
                reduce_dtype=torch.float32,
                # Rounded, a rotary embedding's frequencies would be off by radians at the far end of a sequence.
                buffer_dtype=None if getattr(model, "keeps_buffers", False) else dtype,
            ),
            device_id=spec.world.device,
            param_init_fn=Values(model, spec.world).fill if is_unread(model) else None,
            # On CPUs torch refuses it; there the ranks' equal draws have to do, as they do for fsdp.
            sync_module_states=spec.world.device.type == "cuda",
            use_orig_params=True,
        )

    def imagined(self) -> "FSDP1":
        from src.strategies.fsdp1_imagined import ImaginedFSDP1

        return ImaginedFSDP1(self.min_unit_parameters, self.sync_each_microbatch)

    def policy(self, model: nn.Module) -> Callable[..., Any]:
        """What torch asks of each submodule: whether to make it a unit."""
        from torch.distributed.fsdp.wrap import lambda_auto_wrap_policy, size_based_auto_wrap_policy

        if getattr(model, "keeps_units_whole", False):
            return partial(lambda_auto_wrap_policy, lambda_fn=set(wrapped(model, 0)).__contains__)
        return partial(size_based_auto_wrap_policy, min_num_params=self.min_unit_parameters)

    def compute_context(self) -> AbstractContextManager[None]:
        return nullcontext()  # the wrapper's mixed precision casts

    def gradient_sync(self, is_last: bool) -> AbstractContextManager[None]:
        if is_last or self.sync_each_microbatch:
            return nullcontext()
        return cast("FullyShardedDataParallel", self.model).no_sync()

    def clip(self, max_norm: float) -> Tensor:
        # The wrapper's own method: torch.nn.utils' would take the norm of this rank's shards.
        return cast("FullyShardedDataParallel", self.model).clip_grad_norm_(max_norm)

    def weights(self) -> dict[str, Tensor] | None:
        average_buffers(self.model, self.data)
        return gathered_weights(self.model, self.spec.world)

    def bare_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        from src.strategies.fsdp1_state import WRAPPER

        for name, parameter in self.model.named_parameters():
            yield name.replace(WRAPPER, ""), parameter

    def take_state(self) -> State:
        from src.strategies.fsdp1_state import take

        return take(cast("FullyShardedDataParallel", self.model), self.optimizer)

    def put_back_state(self, state: State) -> None:
        from src.strategies.fsdp1_state import put_back

        put_back(state, cast("FullyShardedDataParallel", self.model), self.optimizer)
