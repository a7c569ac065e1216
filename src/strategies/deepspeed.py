"""strategy=deepspeed: the DeepSpeed engine, ZeRO stages 0 to 3 (Rajbhandari et al. 2020, "ZeRO", SC20).

sharding=none, zero1, zero2, zero3 are the stages; sharding.offload keeps optimizer states, or parameters too,
in the host's memory (Ren et al. 2021, "ZeRO-Offload", USENIX ATC). Checked against DeepSpeed 0.19.8.
"""

import json
import logging
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from src.batch import MicroBatch
from src.footprint import Footprint, ModelSizes
from src.logs import ONLY_IN_RANK_LOG
from src.mesh import make_mesh
from src.objective import EvalSums, cross_entropy_sum, evaluation_sums
from src.sharding import Sharding
from src.strategies import state as states
from src.strategies.autograd import average_buffers, kept_buffers, put_back_buffers
from src.strategies.base import Axis, BuildSpec, OptimizerFactory, Setting, StepReport, Strategy, Support
from src.strategies.decay import norms_and_biases, sparing
from src.strategies.deepspeed_config import Given, contradictions, engine_config
from src.strategies.deepspeed_engine import forget_gradients, start_engine, whole_parameter
from src.strategies.deepspeed_footprint import engine_footprint, weight_bytes
from src.strategies.run_state import State

log = logging.getLogger(__name__)


class DeepSpeed(Strategy):
    """Sizes are in elements, not bytes; a reduce bucket larger than the model is cut to the model.

    communicate_in_fp32: sum 16-bit gradients in fp32. Summed in bf16, which is DeepSpeed's own choice and half the
    traffic, the third loss of a ResNet-18 was 7 % off.
    initial_scale_power, loss_scale_window: the dynamic loss scale of fp16 begins at 2^power and doubles after so
    many steps without an overflow.
    config: anything else of DeepSpeed's JSON, merged in last. The other arguments are its own, under its names.
    """

    supports = Support(
        layout="shards over all ranks (ZeRO 1 to 3), or nothing",
        sharding=frozenset({"none", "zero1", "zero2", "zero3"}),
        offload=frozenset({"optimizer", "all"}),
        packages=("deepspeed",),
        can_be_traced=False,
    )

    def __init__(
        self,
        reduce_bucket_size: float = 5e7,
        allgather_bucket_size: float = 5e7,
        reduce_scatter: bool = True,
        overlap_comm: bool = True,
        contiguous_gradients: bool = True,
        stage3_prefetch_bucket_size: float = 5e7,
        stage3_param_persistence_threshold: float = 1e5,
        communicate_in_fp32: bool = True,
        pin_memory: bool = True,
        initial_scale_power: int = 16,
        loss_scale_window: int = 1000,
        config: dict[str, Any] | None = None,
    ) -> None:
        self.options: dict[str, Any] = {
            "reduce_bucket_size": reduce_bucket_size,
            "allgather_bucket_size": allgather_bucket_size,
            "reduce_scatter": reduce_scatter,
            "overlap_comm": overlap_comm,
            "contiguous_gradients": contiguous_gradients,
            "stage3_prefetch_bucket_size": stage3_prefetch_bucket_size,
            "stage3_param_persistence_threshold": stage3_param_persistence_threshold,
            "communicate_in_fp32": communicate_in_fp32,
            "pin_memory": pin_memory,
            "initial_scale_power": initial_scale_power,
            "loss_scale_window": loss_scale_window,
        }
        self.overrides: Mapping[str, Any] = config or {}
        self.undo = ExitStack()  # nothing to undo before build

    @classmethod
    def problems(cls, setting: Setting) -> list[str]:
        found = []
        offload, level = setting.sharding.offload, setting.sharding.level
        if setting.precision == "fp16" and setting.device_type == "cpu":
            found.append(
                "precision=fp16 needs a GPU under strategy=deepspeed: DeepSpeed's CPU accelerator has no fp16."
                " Use precision=bf16 or precision=fp32."
            )
        if offload == "all" and level in ("none", "zero1", "zero2"):
            found.append(
                "sharding.offload=all keeps the parameters in the host's memory, which DeepSpeed does in ZeRO stage 3"
                f" only, and sharding={level} is another. Use sharding=zero3, or sharding.offload=optimizer or none."
            )
        if offload == "optimizer" and level == "none":
            found.append(
                "sharding.offload=optimizer needs sharded optimizer states, and sharding=none shards nothing."
                " Use sharding=zero1, zero2 or zero3, or sharding.offload=none."
            )
        if setting.activation_checkpointing == "selective" and level == "zero3":
            found.append(
                "trainer.activation_checkpointing=selective keeps products, to which DeepSpeed's linear layer of ZeRO"
                " stage 3 adds the bias in place. Use trainer.activation_checkpointing=full, or sharding=zero2."
            )
        if level in cls.supports.sharding:
            strategy = cls(**setting.arguments)
            found += contradictions(Given.of_setting(setting), strategy.options, strategy.overrides)
        return found

    @classmethod
    def casts_weights(cls, setting: Setting) -> bool:
        return weight_bytes(setting) == 2  # DeepSpeed's fp16 mode; bf16 is autocast

    @classmethod
    def footprint(cls, sizes: ModelSizes, setting: Setting, world_rank: int = 0) -> Footprint:
        return engine_footprint(sizes, setting, cls(**setting.arguments).options)

    def build(self, model: nn.Module, optimizer: OptimizerFactory, spec: BuildSpec) -> None:
        self.spec = spec
        self.data = Axis(spec.world.world_rank, spec.world.world_size)
        given = Given.of_spec(spec)
        self.stage = given.stage
        num_parameters = sum(p.numel() for p in model.parameters())
        self.config = engine_config(given, self.options, self.overrides, num_parameters)
        if spec.world.is_main:
            log.info("DeepSpeed's configuration: %s", json.dumps(self.config), extra=ONLY_IN_RANK_LOG)
        self.dtypes = {name: tensor.dtype for name, tensor in model.state_dict().items()}
        undecayed = frozenset() if spec.decay_norms_and_biases else norms_and_biases(model)
        optimizer = sparing(optimizer, model.named_parameters, undecayed)
        self.engine, self.undo = start_engine(model, optimizer, self.config, spec.world)
        # The very optimizer that `optimizer` made; the engine has put its flat partitions into the groups.
        self.optimizer = self.engine.basic_optimizer
        self.base_learning_rates = [group["lr"] for group in self.optimizer.param_groups]
        self.scaler = self.unsharded_scaler()

    def unsharded_scaler(self) -> torch.amp.GradScaler | None:
        """torch's scaler, which stage 0 uses in fp16; None elsewhere. The other stages have DeepSpeed's own."""
        if self.engine.torch_autocast_z0_gradscaler is None:
            return None
        scaler = torch.amp.GradScaler(
            self.spec.world.device.type,
            init_scale=2.0 ** self.options["initial_scale_power"],
            growth_interval=self.options["loss_scale_window"],
        )
        self.engine.torch_autocast_z0_gradscaler = scaler
        return scaler

    def forward_backward(self, microbatches: Sequence[MicroBatch], valid_targets: int | Tensor) -> Tensor:
        total: Tensor | None = None
        last = len(microbatches) - 1
        for index, batch in enumerate(microbatches):
            # A short last window has fewer micro-batches than the engine was told, so it can't count them itself.
            self.engine.set_gradient_accumulation_boundary(index == last)
            logits = self.engine(batch.inputs)
            loss = cross_entropy_sum(logits, batch.targets)
            # DeepSpeed averages gradients over the ranks, and the step's loss is a sum over them.
            self.engine.backward(loss * (self.data.size / valid_targets), scale_wrt_gas=False)
            total = loss.detach() if total is None else total + loss.detach()
        assert total is not None, "a step has at least one micro-batch"
        return total

    def optimizer_step(self, lr_factor: float, want_grad_norm: bool) -> StepReport:
        for group, base in zip(self.optimizer.param_groups, self.base_learning_rates, strict=True):
            group["lr"] = base * lr_factor
        if self.stage > 0:
            self.engine.step()
            # Before clipping; infinite where fp16 overflowed.
            norm = torch.as_tensor(self.engine.get_global_grad_norm())
            return StepReport(norm, skipped=not self.engine.was_step_applied())
        scale = 1.0 if self.scaler is None else self.scaler.get_scale()
        unsharded_norm = self.unsharded_norm() / scale if want_grad_norm else None
        self.engine.step()
        # The scaler backs off exactly when it skipped; gradients are equal on all ranks, and so is its verdict.
        skipped = self.scaler is not None and self.scaler.get_scale() < scale
        return StepReport(unsharded_norm, skipped)

    def unsharded_norm(self) -> Tensor:
        """Stage 0's global gradient norm, for which the engine has none: gradients are whole and averaged by now."""
        return nn.utils.get_total_norm([p.grad for p in self.engine.module.parameters() if p.grad is not None])

    def evaluate(self, batch: MicroBatch) -> EvalSums:
        with torch.no_grad():
            logits = self.engine(batch.inputs)
        return evaluation_sums(logits, batch.targets)

    def train_mode(self, training: bool) -> None:
        if not training:
            average_buffers(self.engine.module, self.data)
        self.engine.train(training)

    def extra_metrics(self) -> dict[str, float]:
        if not self.spec.precision.needs_scaler:
            return {}
        return {
            "loss_scale": float(self.engine.optimizer.loss_scale if self.scaler is None else self.scaler.get_scale())
        }

    def weights(self) -> dict[str, Tensor] | None:
        average_buffers(self.engine.module, self.data)
        whole = {}
        for name, tensor in self.engine.module.state_dict(keep_vars=True).items():
            # One at a time, so that no rank holds more than one gathered parameter.
            full = whole_parameter(tensor) if isinstance(tensor, nn.Parameter) else tensor
            if self.spec.world.is_main:
                whole[name] = full.detach().to("cpu", self.dtypes[name], copy=True).contiguous()
        return whole if self.spec.world.is_main else None

    @cached_property
    def mesh(self) -> DeviceMesh:
        """All ranks on one axis, for what a checkpoint takes from a partitioned engine.

        Of the host's memory: on a mesh of GPUs a DTensor would move the copies of all its parts back to them.
        """
        return make_mesh(replace(self.spec.world, device=torch.device("cpu")), Sharding("zero3"))

    def state(self) -> State:
        average_buffers(self.engine.module, self.data)
        if self.stage > 0:
            from src.strategies.deepspeed_state import take  # imports DTensor, 1 s

            return take(self.engine, self.dtypes, self.mesh)
        taken = states.take([self.engine.module], self.optimizer)
        if self.scaler is not None:
            taken.plain["scaler"] = states.scaler_state(self.scaler)
        return taken

    def load_state(self, state: State) -> None:
        if self.stage > 0:
            from src.strategies.deepspeed_state import put_back

            put_back(state, self.engine)
            return
        states.put_back(state, [self.engine.module], self.optimizer)
        if self.scaler is not None and "scaler" in state.plain:
            states.put_back_scaler(state.plain["scaler"], self.scaler)

    def remember(self) -> None:
        self.kept = kept_buffers(self.engine.module)

    def discard(self) -> None:
        forget_gradients(self.engine)
        put_back_buffers(self.engine.module, self.kept)

    def close(self) -> None:
        self.undo.close()
