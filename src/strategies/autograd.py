"""The step that single, ddp, fsdp and fsdp1 share: engines that work behind `loss.backward()`."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import cast

import torch
from torch import Tensor, nn

from src.batch import MicroBatch
from src.objective import EvalSums, cross_entropy_sum, evaluation_sums
from src.parallel.compiled import compile_units
from src.strategies import state as states
from src.strategies.base import Axis, BuildSpec, OptimizerFactory, StepReport, Strategy
from src.strategies.decay import norms_and_biases, sparing
from src.strategies.run_state import State
from src.weights import filled
from src.world import World


class AutogradStrategy(Strategy):
    """Forward and backward a micro-batch at a time; the subclass says how gradients meet.

    self.model: the wrapped module that is called. self.gradient_factor: what the engine's own division by the
    ranks takes away from a gradient, and the loss must give back.
    """

    model: nn.Module
    gradient_factor: float = 1.0

    def build(self, model: nn.Module, optimizer: OptimizerFactory, spec: BuildSpec) -> None:
        self.spec = spec
        self.data = self.data_axis(spec)
        undecayed = frozenset() if spec.decay_norms_and_biases else norms_and_biases(model)
        if spec.compile and not spec.world.is_imagined:  # fake tensors can't be compiled for
            compile_units(model, spec.world.device)
        self.model = self.wrap(self.with_values(model, spec), spec)
        # After wrapping: a sharded module's parameters are not the ones it was built with. Listed once, since
        # walking the modules at every step costs as much as the optimizer of a small model.
        self.trained = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = sparing(optimizer, self.bare_parameters, undecayed)(self.trained)
        self.base_learning_rates = [group["lr"] for group in self.optimizer.param_groups]
        self.lr_factor = 1.0
        self.weighed_targets: int | None = None
        self.scaler = self.make_scaler(spec) if spec.precision.needs_scaler else None
        self.scale = 1.0 if self.scaler is None else self.scaler.get_scale()
        if self.scaler is not None and any(p.device.type == "cpu" for p in self.trained):
            # torch 2.14's fused CPU kernels can't take the scaler's verdict (shapes [] and [1] clash); with this
            # off, the scaler decides before it calls the optimizer, as it does for optimizers that aren't fused.
            self.optimizer._step_supports_amp_scaling = False  # type: ignore[attr-defined]

    def data_axis(self, spec: BuildSpec) -> Axis:
        """All ranks of the world, under the default process group."""
        return Axis(spec.world.world_rank, spec.world.world_size)

    def with_values(self, model: nn.Module, spec: BuildSpec) -> nn.Module:
        """A model whose weights are still to be read, whole on every rank; a subclass that shards fills the shards."""
        return filled(model, spec.world)

    def wrap(self, model: nn.Module, spec: BuildSpec) -> nn.Module:
        """The model on its device, inside the engine's wrapper."""
        raise NotImplementedError

    def make_scaler(self, spec: BuildSpec) -> torch.amp.GradScaler:
        """A scaler whose verdict on overflow is shared: with a rank's own, one rank steps and another skips."""
        from src.strategies.scaler import SharedScaler  # 0.9 s to import

        return SharedScaler(spec.world.device.type)

    def gradient_sync(self, is_last: bool) -> AbstractContextManager[None]:
        """Entered around forward *and* backward of a micro-batch; gradients need to meet only at the last."""
        return nullcontext()

    def compute_context(self) -> AbstractContextManager[None]:
        """Entered around forward: autocast, unless there is nothing to cast or the wrapper casts by itself."""
        if self.spec.precision.compute_dtype is None:
            return nullcontext()
        return self.spec.precision.autocast(self.spec.world.device)

    def forward_backward(self, microbatches: Sequence[MicroBatch], valid_targets: int | Tensor) -> Tensor | None:
        total: Tensor | None = None
        last = len(microbatches) - 1
        for index, batch in enumerate(microbatches):
            with self.gradient_sync(is_last=index == last):
                with self.compute_context():
                    logits = self.model(batch.inputs)
                loss = self.loss(logits, batch.targets)
                self.backward(loss, valid_targets)
            total = loss.detach() if total is None else total + loss.detach()
        assert total is not None, "a step has at least one micro-batch"
        return total

    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Summed over the micro-batch's valid targets, scalar, a plain tensor."""
        return cross_entropy_sum(logits, targets)

    def backward(self, loss: Tensor, valid_targets: int | Tensor) -> None:
        """Gradients of loss / valid_targets, times what the engine's averaging takes away."""
        if self.scaler is not None:
            # Without the gradient factor: times the ranks, fp16 would overflow on many where it does not on one.
            torch.autograd.backward(self.scaler.scale(loss / valid_targets))
        else:
            # The weight enters as the gradient of the loss, which saves the graph a division.
            torch.autograd.backward(loss, self.loss_weight(valid_targets, loss))

    def loss_weight(self, valid_targets: int | Tensor, loss: Tensor) -> Tensor:
        """gradient_factor / valid_targets, of the loss's type; the same tensor while steps have as many targets."""
        if isinstance(valid_targets, Tensor):
            return (self.gradient_factor / valid_targets).to(loss.dtype)
        if valid_targets != self.weighed_targets:
            self.weighed_targets = valid_targets
            # A fill on the device; a tensor made of a host's number would be copied, and waited for.
            self.weight = torch.full((), self.gradient_factor / valid_targets, dtype=loss.dtype, device=loss.device)
        return self.weight

    def optimizer_step(self, lr_factor: float, want_grad_norm: bool) -> StepReport:
        self.set_lr_factor(lr_factor)
        if self.scaler is not None:
            # Gradients still carry the loss scale here; clipping first would clip to max_norm / scale.
            self.scaler.unscale_(self.optimizer)
            if self.gradient_factor != 1.0:  # in fp32 by now, where it can't overflow
                torch._foreach_mul_([p.grad for p in self.trained if p.grad is not None], self.gradient_factor)
        limit = self.spec.max_grad_norm
        norm = self.clip(limit if limit is not None else float("inf")) if limit is not None or want_grad_norm else None
        skipped = False
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()
            # The scaler backs off exactly when it skipped. Asking waits for the device: the price of fp16, since the
            # schedule must not advance on a skipped step.
            before, self.scale = self.scale, self.scaler.get_scale()
            skipped = self.scale < before
        self.forget_gradients()
        return StepReport(norm, skipped)

    def clip(self, max_norm: float) -> Tensor:
        """Scale the gradients to `max_norm` where they exceed it; the global L2 norm before, scalar."""
        return nn.utils.clip_grad_norm_(self.trained, max_norm)

    def set_lr_factor(self, factor: float) -> None:
        if factor != self.lr_factor:
            for group, base in zip(self.optimizer.param_groups, self.base_learning_rates, strict=True):
                group["lr"] = base * factor
            self.lr_factor = factor

    def evaluate(self, batch: MicroBatch) -> EvalSums | None:
        with torch.no_grad(), self.compute_context():
            logits = self.model(batch.inputs)
        return evaluation_sums(logits, batch.targets)

    def train_mode(self, training: bool) -> None:
        if not training:
            average_buffers(self.model, self.data)
        self.model.train(training)

    def extra_metrics(self) -> dict[str, float]:
        return {} if self.scaler is None else {"loss_scale": self.scale}

    def weights(self) -> dict[str, Tensor] | None:
        average_buffers(self.model, self.data)
        return whole_weights(self.model) if self.spec.world.is_main else None

    def bare_modules(self) -> list[nn.Module]:
        """What is inside the engine's wrapper: the model under its own names, or this rank's parts of it."""
        return [self.model]

    def bare_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """By the bare model's names."""
        for module in self.bare_modules():
            yield from module.named_parameters()

    def state(self) -> State:
        average_buffers(self.model, self.data)
        state = self.take_state()
        if self.scaler is not None:
            state.plain["scaler"] = states.scaler_state(self.scaler)
        return state

    def load_state(self, state: State) -> None:
        self.put_back_state(state)
        if self.scaler is not None and "scaler" in state.plain:
            states.put_back_scaler(state.plain["scaler"], self.scaler)
            self.scale = self.scaler.get_scale()

    def take_state(self) -> State:
        """`state` of model and optimizer alone."""
        return states.take(self.bare_modules(), self.optimizer)

    def put_back_state(self, state: State) -> None:
        """`load_state` of model and optimizer alone."""
        states.put_back(state, self.bare_modules(), self.optimizer)

    def forget_gradients(self) -> None:
        for parameter in self.trained:
            parameter.grad = None

    def remember(self) -> None:
        self.kept = kept_buffers(self.model)

    def discard(self) -> None:
        self.forget_gradients()
        put_back_buffers(self.model, self.kept)


def kept_buffers(model: nn.Module) -> list[Tensor]:
    """Copies of the buffers: a forward that meets NaN leaves it in BatchNorm's statistics for good."""
    return [buffer.detach().clone() for buffer in model.buffers()]


@torch.no_grad()
def put_back_buffers(model: nn.Module, kept: list[Tensor]) -> None:
    for buffer, copy in zip(model.buffers(), kept, strict=True):
        buffer.copy_(copy)


def average_buffers(model: nn.Module, axis: Axis) -> None:
    """Make floating-point buffers the mean over the ranks of `axis`.

    BatchNorm statistics differ by rank after a step (each saw its own samples), so an evaluation would
    depend on which rank ran it and a checkpoint would hold one rank's data only.
    """
    if axis.size == 1:
        return
    with torch.no_grad():
        for buffer in model.buffers():
            if buffer.is_floating_point():
                axis.sum(buffer).div_(axis.size)


def whole_weights(model: nn.Module) -> dict[str, Tensor]:
    """A detached CPU copy of an unsharded module's state."""
    return {name: tensor.detach().cpu().contiguous() for name, tensor in model.state_dict().items()}


def gathered_weights(model: nn.Module, world: World) -> dict[str, Tensor] | None:
    """A sharded module's whole state on the CPU, under the bare names; None but on rank 0. Collective."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict  # 1.2 s to import

    whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    return cast(dict[str, Tensor], whole) if world.is_main else None
