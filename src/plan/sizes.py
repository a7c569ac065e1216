"""The sizes of any model: one forward and backward on tensors that have shapes but no memory, followed by the meter.

Of units that are equal and follow each other only two are walked through; each of the others adds what the second added
to the first. So a model of 96 layers is known as soon as one of two.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.modules.batchnorm import _BatchNorm

from src.batch import MicroBatch
from src.footprint import Interval, ModelSizes
from src.meter import StorageMeter
from src.plan.flops import flops_of
from src.precision import Precision
from src.strategies.base import OptimizerFactory
from src.strategies.footprint import ModelPart

WALKED = 2  # of a run of equal units


def model_sizes(
    part: ModelPart, batch: MicroBatch, optimizer_slots: int, precision: Precision, casts_weights: bool = False
) -> ModelSizes:
    """part: on the meta device; it is used up. batch: what it is given, there too.

    casts_weights: 16 bits by casting the weights (as sharding engines do) instead of by autocast.
    Raises whatever the model does when it is given such a batch.
    """
    runs = equal_runs(part.units)
    with FakeTensorMode(allow_non_fake_inputs=True):
        dtype = precision.compute_dtype if casts_weights else None
        materialize(part.model, dtype)
        walk = Walk(part, runs)
        with walk.meter:
            walk.go(on_cpu(batch, dtype), nullcontext() if casts_weights else precision.autocast(torch.device("cpu")))
        return walk.sizes(optimizer_slots)


def optimizer_slots(optimizer: OptimizerFactory) -> int:
    """How many states of its parameter's shape an optimizer keeps; learnt from a step."""
    probe = nn.Parameter(torch.ones(2, 2))
    probe.grad = torch.zeros_like(probe)
    trial = optimizer([probe])
    trial.step()
    return sum(isinstance(slot, Tensor) and slot.shape == probe.shape for slot in trial.state[probe].values())


def equal_runs(units: Sequence[nn.Module]) -> list[range]:
    """Where units of one class and of the same shapes follow each other, their numbers."""

    def kind(number: int) -> Any:
        unit = units[number]
        tensors = [*unit.named_parameters(), *unit.named_buffers()]
        return type(unit), [(name, tensor.shape, tensor.dtype) for name, tensor in tensors]

    groups = [list(numbers) for _, numbers in groupby(range(len(units)), key=kind)]
    return [range(numbers[0], numbers[-1] + 1) for numbers in groups]


def materialize(model: nn.Module, dtype: torch.dtype | None) -> None:
    """Put fake tensors of the CPU in the place of those on meta. dtype: of floating weights; None: as they are."""
    made: dict[int, Tensor] = {}
    for module in model.modules():
        # Running statistics stay fp32, and weights and statistics of one type (as `data_parallel` has it).
        own = None if isinstance(module, _BatchNorm) else dtype
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is None:
                    continue
                if id(tensor) not in made:
                    is_weight = isinstance(tensor, nn.Parameter)
                    kind = own if own is not None and is_weight and tensor.is_floating_point() else tensor.dtype
                    fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=kind, device="cpu")
                    made[id(tensor)] = nn.Parameter(fake, tensor.requires_grad) if is_weight else fake
                tensors[name] = made[id(tensor)]  # type: ignore[assignment]


def on_cpu(batch: MicroBatch, dtype: torch.dtype | None) -> MicroBatch:
    kind = dtype if dtype is not None and batch.inputs.is_floating_point() else batch.inputs.dtype
    return MicroBatch(
        torch.empty(batch.inputs.shape, dtype=kind, device="cpu"),
        torch.empty(batch.targets.shape, dtype=batch.targets.dtype, device="cpu"),
    )


#: A storage's key and the weak reference that stands for it: keys come again, references don't.
Watches = dict[int, Any]


class Mark(NamedTuple):
    """After a unit's forward: bytes alive, FLOPs so far, the storages alive."""

    alive: int
    flops: int
    watches: Watches


class Walk:
    """One forward and backward of a model, and what was alive at each point of it."""

    def __init__(self, part: ModelPart, runs: Sequence[range]) -> None:
        model, units = part.model, part.units
        self.part, self.model, self.runs = part, model, runs
        self.meter = StorageMeter()
        self.meter.seen = self.see
        self.unit_of: dict[int, int] = {}
        for number, unit in enumerate(units):
            for parameter in unit.parameters():
                self.unit_of.setdefault(id(parameter), number)
        self.weights = {parameter.untyped_storage()._cdata for parameter in model.parameters()}
        self.intervals: list[Interval] = []
        self.done = 0  # bytes of finished gradients
        self.flops = 0
        self.copies: Watches = {}
        self.in_forward = True
        self.in_loss = self.after_loss = 0
        self.marks: dict[int, Mark] = {}
        self.stream = 0
        for run in runs:
            for number in run[WALKED:]:
                units[number].forward = first_of  # type: ignore[method-assign]
            for number in run[:WALKED]:
                units[number].register_forward_hook(self.marker(number))
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self.finish)  # type: ignore[no-untyped-call]

    def marker(self, number: int) -> Callable[..., None]:
        def mark(unit: nn.Module, inputs: Any, output: Any) -> None:
            if self.in_forward:
                self.marks[number] = Mark(self.meter.current, self.flops, dict(self.meter.watches))
                self.stream = output.nbytes if isinstance(output, Tensor) else 0

        return mark

    def see(self, func: Any, args: tuple[Any, ...], result: Any) -> None:
        if not self.in_forward:
            return
        self.flops += flops_of(func, args, result)
        if func is torch.ops.aten._to_copy.default and args[0].untyped_storage()._cdata in self.weights:
            key = result.untyped_storage()._cdata
            self.copies[key] = self.meter.watches[key]

    def go(self, batch: MicroBatch, autocast: Any) -> None:
        meter = self.meter
        for tensor in [*self.model.parameters(), *self.model.buffers(), *batch]:
            meter.add(tensor)
        self.batch = batch.inputs.nbytes + batch.targets.nbytes
        self.base = meter.peak = meter.current
        with autocast:
            # Another stage waits for the gradient of what it gives.
            output = self.model(batch.inputs if self.part.is_first else batch.inputs.requires_grad_())
            self.most_in_forward = meter.peak - self.base
        # Without what only autocast's cache held: the copies that no backward needs.
        self.after_forward, self.output = meter.current - self.base, output.nbytes
        self.watches, self.alive = dict(meter.watches), dict(meter.sizes)
        meter.peak = meter.current
        root = self.part.loss(output, batch.targets) if self.part.is_last else output
        self.after_loss = meter.current - self.base
        self.in_forward = False
        output.register_hook(self.begin)
        # The output stays: whoever takes the step has a name for it until backward is over.
        torch.autograd.backward(root, torch.empty_like(root))

    def begin(self, gradient: Tensor) -> None:
        """The output's gradient is there."""
        meter = self.meter
        self.in_loss, self.after_loss = meter.peak - self.base, meter.current - self.base
        meter.peak = meter.current

    def finish(self, parameter: Tensor) -> None:
        """A gradient is there."""
        meter = self.meter
        unit = self.unit_of.get(id(parameter))
        assert parameter.grad is not None
        most = meter.peak - self.base - self.done
        self.done += parameter.grad.untyped_storage().nbytes()
        left = meter.current - self.base - self.done
        self.intervals.append(Interval(most, left, parameter.numel(), unit, tuple(parameter.shape)))
        meter.peak = meter.current

    def sizes(self, optimizer_slots: int) -> ModelSizes:
        """With the units that were passed over."""
        activations, flops, in_forward = self.after_forward, self.flops, self.most_in_forward
        copies, backward = self.bytes_of(self.copies), self.intervals
        for run in self.runs:
            if len(run) > WALKED:
                more = len(run) - WALKED
                before, after = (self.marks[number] for number in run[:WALKED])
                new = {key: watch for key, watch in after.watches.items() if before.watches.get(key) is not watch}
                kept = self.bytes_of(new)
                activations += more * kept
                in_forward += more * (after.alive - before.alive)
                flops += more * (after.flops - before.flops)
                copies += more * self.bytes_of({key: w for key, w in self.copies.items() if new.get(key) is w})
                backward = repeated(backward, run, kept)
        passed_over = activations - self.after_forward
        trained = sum(interval.parameter for interval in backward)
        loss = self.after_loss - self.after_forward
        output = self.output if self.part.is_last else 0
        return ModelSizes(
            parameters=tuple((p.numel(), self.unit_of.get(id(p))) for p in self.model.parameters()),
            trained=trained,
            buffers=sum(buffer.nbytes for buffer in self.model.buffers()),
            batch=self.batch,
            activations=activations - output,
            weight_copies=copies,
            logits=output + loss,
            output=self.output,
            stream=self.stream,
            backward=tuple(backward),
            optimizer_slots=optimizer_slots,
            flops=3 * flops,  # backward multiplies twice for each multiplication of forward
            in_forward=in_forward,
            in_loss=self.in_loss + passed_over,
            after_loss=self.after_loss + passed_over,
        )

    def bytes_of(self, watches: Watches) -> int:
        """Of those storages that forward has left alive."""
        return sum(self.alive[key] for key, watch in watches.items() if self.watches.get(key) is watch)


def first_of(*inputs: Any, **named: Any) -> Any:
    """In the place of a unit's forward."""
    return inputs[0]


def repeated(backward: list[Interval], run: range, step: int) -> list[Interval]:
    """Backward through all units of `run`, of which it has gone through the first two only.

    step: bytes that each unit keeps. In backward the second comes first, and stands for all after it.
    """
    more = len(run) - WALKED
    second = [place for place, interval in enumerate(backward) if interval.unit == run[1]]
    start, stop = second[0], second[-1] + 1
    before = [interval.deeper(more * step) for interval in backward[:start]]
    units = [
        interval.deeper((number - run[1]) * step)._replace(unit=number)
        for number in reversed(run[1:])
        for interval in backward[start:stop]
    ]
    return before + units + backward[stop:]
