"""What a rank holds under a strategy, from a model's sizes alone: the general rule, which strategies refine.

Weights, gradients and Adam's two moments take 16 bytes a parameter, in fp32 as in 16-bit precision with fp32 masters
(Rajbhandari et al. 2020, "ZeRO", section 3; 18 where gradients of 16-bit weights are fp32). ZeRO-1, 2 and 3 divide the
optimizer states, the gradients too, the weights too. This project keeps weights in fp32 under every precision, so they
are their own masters.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from torch import Tensor, nn

from src.footprint import FP32_BYTES, NONE, Footprint, ModelSizes, Part
from src.objective import cross_entropy_sum

if TYPE_CHECKING:
    from src.strategies.base import Setting

#: Ranks that share a layer exchange much for each of them, so they stay inside one machine.
MAX_TENSOR_DEGREE = 8

BYTES = {"fp32": 4, "tf32": 4, "bf16": 2, "fp16": 2}  # an element of what is computed with


@dataclass
class ModelPart:
    """What one rank computes with, on the meta device. units: of `model`, in forward's order.

    inputs: what another stage gives it; None: it takes the samples. is_last: its output are the logits, of which, and
    of the targets, `loss` is made.
    """

    model: nn.Module
    units: Sequence[nn.Module]
    inputs: Tensor | None = None
    is_last: bool = True
    loss: Callable[[Tensor, Tensor], Tensor] = cross_entropy_sum

    @property
    def is_first(self) -> bool:
        """Whether it takes the samples."""
        return self.inputs is None


class Shares(NamedTuple):
    """Ranks that each kind of model state is divided by."""

    parameters: int = 1
    gradients: int = 1
    optimizer: int = 1


def shares_of(setting: Setting) -> Shares:
    """By the sharding's level. hybrid: of its shard_size, or the data ranks of one machine, as `make_mesh` has it."""
    ranks = setting.data_parallel_size
    if setting.sharding.level == "hybrid":
        in_machine = (setting.local_size or setting.world_size) // int(setting.arguments.get("tp", 1))
        ranks = setting.sharding.shard_size or math.gcd(ranks, max(1, in_machine))
    return {
        "none": Shares(),
        "zero1": Shares(optimizer=ranks),
        "zero2": Shares(gradients=ranks, optimizer=ranks),
        "zero3": Shares(ranks, ranks, ranks),
        "hybrid": Shares(ranks, ranks, ranks),
    }[setting.sharding.level]


class HasFootprint:
    """The general rule. All of it is asked of the class, before anything is built.

    degrees: the strategy's own arguments that divide the ranks, beside data parallelism, and for each the most that is
    worth a trial; None: any.
    """

    degrees: ClassVar[Mapping[str, int | None]] = {}

    @classmethod
    def casts_weights(cls, setting: Setting) -> bool:
        """Whether 16-bit precision casts whole weights; else autocast does what it sees fit."""
        return False

    @classmethod
    def part(cls, model: nn.Module, example: Tensor, setting: Setting, world_rank: int = 0) -> ModelPart:
        """What a rank computes with. model, example: the whole model and a micro-batch's inputs, on the meta device."""
        return ModelPart(model, getattr(model, "units", list)())

    @classmethod
    def wanted_accumulate(cls, arguments: Mapping[str, Any]) -> int:
        """Micro-batches a step below which ranks idle for a fifth of it or more."""
        return 1

    @classmethod
    def idle_share(cls, setting: Setting) -> float:
        """The share of a step in which a rank waits for others to compute, 0 ... 1, as far as it is designed in."""
        return 0.0

    @classmethod
    def footprint(cls, sizes: ModelSizes, setting: Setting, world_rank: int = 0) -> Footprint:
        """Of one rank in a step after the first. sizes: of `part`."""
        return states(sizes, setting, shares_of(setting)).footprint(
            peak_in_backward=gradients_as_they_come(sizes, setting),
            peak_formula="states at rest + the most of activations and gradients in backward",
        )


@dataclass(frozen=True)
class States:
    """The parts that every strategy has, to be completed to a footprint."""

    sizes: ModelSizes
    setting: Setting
    parameters: Part
    gradients: Part
    optimizer: Part

    @property
    def at_rest(self) -> int:
        """Between two steps, with the step's batch: no gradients."""
        return self.parameters.bytes + self.optimizer.bytes + self.batch.bytes

    @property
    def batch(self) -> Part:
        count = self.setting.accumulate
        return Part(self.sizes.batch * count, f"inputs and targets of {count} micro-batch(es)")

    def footprint(
        self,
        peak_in_backward: int,
        peak_formula: str,
        *,
        in_flight: int = 1,
        in_update: int = 0,
        buffers: Part = NONE,
        buffers_at_rest: int = 0,
        master_copies: Part = NONE,
        host: Part = NONE,
        traffic: Mapping[str, Part] | None = None,
    ) -> Footprint:
        """peak_in_backward: beside what is at rest. in_update: beside states and gradients while the optimizer steps.

        in_flight: micro-batches whose activations are kept at once.
        """
        sizes = self.sizes
        at_rest = self.at_rest + master_copies.bytes + buffers_at_rest
        peak = at_rest + max(peak_in_backward, self.gradients.bytes + in_update)
        times = f" x {in_flight} micro-batches in flight" if in_flight > 1 else ""
        kept = sizes.activations - sizes.weight_copies
        return Footprint(
            parameters=self.parameters,
            gradients=self.gradients,
            optimizer_states=self.optimizer,
            master_copies=master_copies,
            activations=Part(in_flight * kept, f"kept for backward, walked through the model{times}"),
            weight_copies=NONE
            if not sizes.weight_copies
            else Part(sizes.weight_copies, "16-bit copies that autocast makes"),
            logits=Part(sizes.logits, "output, its fp32 copy and log-softmax" if sizes.logits else "another stage's"),
            communication_buffers=buffers,
            batch=self.batch,
            host=host,
            peak=Part(peak, peak_formula),
            traffic=traffic or {},
        )


def states(sizes: ModelSizes, setting: Setting, shares: Shares) -> States:
    """Weights, gradients and optimizer states in fp32, divided."""
    slots = sizes.optimizer_slots
    buffers = f" + {sizes.buffers} of buffers" if sizes.buffers else ""

    def part(size: int, times: int, ranks: int) -> Part:
        by = f" / {ranks}" if ranks > 1 else ""
        return Part(-(-times * FP32_BYTES * size // ranks), f"{times * FP32_BYTES} x {size:,} parameters{by}")

    weights = part(sizes.num_parameters, 1, shares.parameters)
    return States(
        sizes,
        setting,
        Part(weights.bytes + sizes.buffers, weights.formula + buffers),
        part(sizes.trained, 1, shares.gradients),
        part(sizes.trained, slots, shares.optimizer) if slots else NONE,
    )


def gradients_as_they_come(sizes: ModelSizes, setting: Setting) -> int:
    """The most of activations and fp32 gradients that are made one by one, and stay for the next micro-batch."""
    if setting.accumulate > 1:
        return sizes.most_activations + FP32_BYTES * sizes.trained
    done, most = 0, sizes.before_gradients
    for interval in sizes.backward:
        most = max(most, interval.activations + FP32_BYTES * done)
        done += interval.parameter
    return most


def on_device(made: Footprint, setting: Setting, with_gradients: bool = False) -> Footprint:
    """With what is offloaded taken off a GPU; on a CPU it is the same memory.

    with_gradients: whether "all" keeps the shards of gradients on the host as well. While one is made it is on the
    device, so the peak goes without it only between steps.
    """
    offload = setting.sharding.offload
    if offload == "none" or setting.device_type == "cpu":
        return made
    moved = made.optimizer_states.bytes + made.master_copies.bytes
    what = "optimizer states and masters"
    weights, gradients, waiting = made.parameters, made.gradients, 0
    if offload == "all":
        moved, what = moved + weights.bytes, f"{what}, weights"
        weights = Part(0, "offloaded, gathered for their use")
        if with_gradients:
            waiting, what = gradients.bytes, f"{what}, gradients"
            gradients = Part(0, "offloaded, unit by unit")
    return replace(
        made,
        parameters=weights,
        gradients=gradients,
        optimizer_states=Part(0, "offloaded"),
        master_copies=Part(0, "offloaded"),
        host=Part(moved + waiting, what),
        peak=Part(made.peak.bytes - moved, f"{made.peak.formula}, without what is offloaded"),
    )
