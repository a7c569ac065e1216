"""What one rank holds while it trains, part by part, in bytes: arithmetic on a model's sizes, and nothing else.

The strategies fill it in (`Strategy.footprint`), since each knows what it divides and which buffers it keeps. What no
formula here counts: workspaces inside kernels, the buffers of gloo and NCCL, what an allocator can't use between its
blocks, the CUDA context, and the data set.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

#: What `Footprint` leaves out, for those who read one.
NOT_COUNTED = (
    "workspaces inside kernels, buffers of gloo and NCCL, what the allocator can't use between its blocks,"
    " the CUDA context, the data set"
)

FP32_BYTES = 4


class Part(NamedTuple):
    """Bytes, and the arithmetic that gave them."""

    bytes: int
    formula: str


NONE = Part(0, "none")


class Interval(NamedTuple):
    """A stretch of backward, up to the moment when one parameter's gradient is there.

    activations: the most bytes alive in it beside weights, batch and the gradients finished before it. left: those
    alive when it ends, without the new gradient. parameter: of which the gradient comes, in elements. unit: which of
    the model's units holds it; None: none of them does. shape: of the gradient.
    """

    activations: int
    left: int
    parameter: int
    unit: int | None
    shape: tuple[int, ...] = ()

    def deeper(self, more: int) -> "Interval":
        """With so many bytes of activations more beneath it."""
        return self._replace(activations=self.activations + more, left=self.left + more)


@dataclass(frozen=True)
class ModelSizes:
    """Of a model, or the part of it that one rank computes with, for one micro-batch on one device. Bytes, if not said.

    parameters: elements of each, with the unit that holds it (None: none). trained: elements that get a gradient.
    buffers: of the model. batch: inputs and targets. activations: kept for backward at the end of forward,
    weight_copies among them: the 16-bit copies that autocast makes and backward needs. logits: what output and loss
    hold beyond. output: what the part gives; stream: what a unit gives to the next. backward: in its order.
    optimizer_slots: states of a parameter's shape. flops: of a forward and a backward, without recomputation.
    in_forward: the most alive in it beside weights and batch. in_loss: from there until the output's gradient is there,
    and after_loss then; 0: no more than `backward` says.
    """

    parameters: tuple[tuple[int, int | None], ...]
    trained: int
    buffers: int
    batch: int
    activations: int
    weight_copies: int
    logits: int
    output: int
    stream: int
    backward: tuple[Interval, ...]
    optimizer_slots: int
    flops: int
    in_forward: int = 0
    in_loss: int = 0
    after_loss: int = 0

    @cached_property
    def num_parameters(self) -> int:
        """Elements."""
        return sum(size for size, _ in self.parameters)

    @cached_property
    def units(self) -> dict[int | None, int]:
        """Elements of each unit; of None, what is in no unit."""
        sizes: dict[int | None, int] = {None: 0}
        for size, unit in self.parameters:
            sizes[unit] = sizes.get(unit, 0) + size
        return sizes

    @cached_property
    def rest(self) -> int:
        """Elements that are in no unit."""
        return self.units[None]

    @cached_property
    def largest_unit(self) -> int:
        """Elements; 0 without units."""
        return max((size for unit, size in self.units.items() if unit is not None), default=0)

    @cached_property
    def most_activations(self) -> int:
        """The most that is alive at once beside weights, batch and finished gradients."""
        backward = max((interval.activations for interval in self.backward), default=self.activations + self.logits)
        return max(self.in_forward, self.in_loss, backward)

    @cached_property
    def before_gradients(self) -> int:
        """The most that is alive until the first gradient is there."""
        return max(self.in_forward, self.in_loss, self.backward[0].activations)


@dataclass(frozen=True)
class Footprint:
    """Of one rank. Each part is the most that there is of it; `peak` the most that there is of all at one moment.

    Parts reach their most at different moments (activations go as gradients come), so the peak is less than their sum.
    master_copies: fp32 weights beside those of `parameters`, where these are 16 bits. weight_copies: 16-bit weights
    that only computation needs. host: in the host's memory instead of the device's, counted in no other part. traffic:
    bytes a step by collective, as nccl-tests counts: of all_gather and reduce_scatter the whole of all ranks.
    """

    parameters: Part
    gradients: Part
    optimizer_states: Part
    master_copies: Part
    activations: Part
    weight_copies: Part
    logits: Part
    communication_buffers: Part
    batch: Part
    host: Part
    peak: Part
    traffic: Mapping[str, Part] = field(default_factory=dict)

    @property
    def model_states(self) -> int:
        """Bytes of weights, gradients, optimizer states and masters: the "16 bytes a parameter" of Adam."""
        return sum(part.bytes for part in (self.parameters, self.gradients, self.optimizer_states, self.master_copies))

    def parts(self) -> dict[str, Part]:
        """Those on the device, by name."""
        return {name: getattr(self, name) for name in PARTS}


PARTS = (
    "parameters",
    "gradients",
    "optimizer_states",
    "master_copies",
    "activations",
    "weight_copies",
    "logits",
    "communication_buffers",
    "batch",
)
