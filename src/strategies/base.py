"""What a strategy is: it turns one optimizer step, given as a list of micro-batches, into an engine's calls.

A strategy gets the whole list because pipeline schedules expose nothing smaller, and because accumulation
(no_sync, gradient-sync flags, boundaries) is then its own business: the trainer knows no strategy.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from src.batch import MicroBatch
from src.compression.base import Compression
from src.objective import EvalSums
from src.precision import Precision
from src.sharding import Sharding
from src.strategies.footprint import HasFootprint
from src.strategies.run_state import State
from src.world import World

OptimizerFactory = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


@dataclass(frozen=True)
class Axis:
    """This process's place on one axis of the mesh. group: its process group; None for a lone process."""

    rank: int = 0
    size: int = 1
    group: dist.ProcessGroup | None = None

    def sum(self, tensor: Tensor) -> Tensor:
        """Sum over the axis, in place; the same value on every member."""
        if self.size > 1:
            dist.all_reduce(tensor, group=self.group)
        return tensor


class StepReport(NamedTuple):
    """grad_norm: global L2 norm before clipping, scalar, None where nobody asked for it. skipped: fp16 overflow."""

    grad_norm: Tensor | None
    skipped: bool = False


@dataclass(frozen=True)
class Support:
    """What a strategy can do, read by the checks; the class is never built for it.

    layout: what it does with the weights, to complete "sharding=zero3 shards parameters, but strategy=ddp ...".
    offload: the values of sharding.offload other than none. packages: what must be installed, by import name.
    can_be_traced: whether its engine runs on fake tensors. compiles: whether it trains compiled layers as others.
    model_carries: methods that a model must have, and what each says, to complete "model cnn does not say ...".
    omits: the communication that `unsynchronized` leaves out of a step, in words; None: it can leave out none.
    omits_not: what it has to keep beside that. compresses: whether a compressor can stand before its links.
    """

    layout: str
    sharding: frozenset[str]
    precision: frozenset[str] = frozenset({"fp32", "tf32", "bf16", "fp16"})
    offload: frozenset[str] = frozenset()
    many_processes: bool = True
    packages: tuple[str, ...] = ()
    can_be_traced: bool = True
    compiles: bool = False
    model_carries: Mapping[str, str] = field(default_factory=dict)
    omits: str | None = None
    omits_not: str | None = None
    compresses: bool = False


@dataclass(frozen=True)
class Setting:
    """What a strategy's own rules may look at: plain values of the experiment, before anything is built.

    arguments, optimizer, data: the nodes' own keys and values; compression: the compressor's arguments.
    data_parallel_size: ranks that read different samples. local_size: ranks of one machine; None: all of them.
    """

    strategy_name: str
    arguments: Mapping[str, Any]
    world_size: int
    data_parallel_size: int
    device_type: str
    precision: str
    sharding: Sharding
    micro_batch_size: int
    accumulate: int
    max_grad_norm: float | None
    activation_checkpointing: str = "none"
    compile: bool = False
    optimizer: Mapping[str, Any] = field(default_factory=dict)
    data: Mapping[str, Any] = field(default_factory=dict)
    local_size: int | None = None
    compressor: type[Compression] | None = None  # the class behind the node compression; None: it builds nothing
    compression: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class BuildSpec:
    """Everything a strategy needs beside model and optimizer. max_grad_norm: global L2; None: no clipping."""

    world: World
    precision: Precision = Precision("fp32")
    sharding: Sharding = Sharding()
    micro_batch_size: int = 1
    accumulate: int = 1
    max_grad_norm: float | None = None
    compression: Compression | None = None  # None: gradients travel as they are
    compile: bool = False
    decay_norms_and_biases: bool = True  # False: the optimizer's weight_decay leaves them alone


class Strategy(HasFootprint, ABC):
    """One way to train a model over the ranks of a world. All methods but `problems` are collective."""

    supports: ClassVar[Support]
    data: Axis = Axis()
    optimizer: torch.optim.Optimizer

    @classmethod
    def problems(cls, setting: Setting) -> list[str]:
        """What this strategy refuses beyond `supports`: one line each, of choice, reason and remedy."""
        return []

    @classmethod
    def model_problems(cls, model: nn.Module, setting: Setting) -> list[str]:
        """What this strategy refuses in a model. model: on the meta device, so only its structure can be asked."""
        return []

    @classmethod
    def data_parallel_size(cls, world_size: int, arguments: Mapping[str, Any]) -> int:
        """Ranks that read different samples; `arguments` are the strategy's own (degrees of other axes).

        Raises Refused where the degrees don't divide the world.
        """
        return world_size

    @classmethod
    def different_ranks(cls, world_size: int, arguments: Mapping[str, Any]) -> list[int]:
        """World ranks that hold differently much; each of the others holds no more than one of these."""
        return [0]

    @abstractmethod
    def build(self, model: nn.Module, optimizer: OptimizerFactory, spec: BuildSpec) -> None:
        """Place `model` (on the CPU, the same weights on every rank) on the devices and make the optimizer."""

    @abstractmethod
    def forward_backward(self, microbatches: Sequence[MicroBatch], valid_targets: int | Tensor) -> Tensor | None:
        """Gradients of the step's mean loss, ready for optimizer_step.

        microbatches: this data rank's, at least one, all of one shape.
        valid_targets: targets that count in the whole step, over all micro-batches and data ranks; at least 1.
        Returns the loss summed over this data rank's valid targets, in nats, scalar, detached (so that the sums of
        all data ranks add up). None where this rank does not hold the loss.
        """

    @abstractmethod
    def optimizer_step(self, lr_factor: float, want_grad_norm: bool) -> StepReport:
        """Clip by the global norm, update, zero the gradients. lr_factor multiplies the optimizer's own lr."""

    @abstractmethod
    def evaluate(self, batch: MicroBatch) -> EvalSums | None:
        """Forward without gradients, in evaluation mode. None where this rank does not hold the logits."""

    @abstractmethod
    def train_mode(self, training: bool) -> None:
        """Switch dropout and batch statistics on or off; before evaluation, make buffers equal on all ranks."""

    @abstractmethod
    def weights(self) -> dict[str, Tensor] | None:
        """The whole model's weights and buffers on the CPU, under the bare model's names; None but on world rank 0."""

    @abstractmethod
    def state(self) -> State:
        """What a run needs to go on, whatever strategy and world goes on with it. Collective.

        Between steps. Its tensors may be the live ones, so they hold until the next step. As an evaluation does, it
        makes buffers equal on all ranks.
        """

    @abstractmethod
    def load_state(self, state: State) -> None:
        """Take back what `state()` of this very strategy gave, its tensors filled from a checkpoint. Collective.

        plain: as the saving run's `state()` gave it, whatever its strategy.
        """

    @abstractmethod
    def remember(self) -> None:
        """Before a step that may be discarded: keep what forward itself changes, which is the buffers."""

    @abstractmethod
    def discard(self) -> None:
        """Instead of optimizer_step: forget gradients, put back what `remember` kept. Every rank calls it, or none."""

    def unsynchronized(self) -> AbstractContextManager[None]:
        """A step inside does all but what `supports.omits` names; `discard` its gradients afterwards."""
        raise NotImplementedError(f"{type(self).__name__} declares in its Support that it omits nothing")

    def synchronization_alone(self, num_microbatches: int) -> Callable[[], None]:
        """What `supports.omits` names, of a step of so many micro-batches, to be called with nothing beside it.

        After the first step. Collective, as the call is: all that is made only once, as buffers are, is made here. What
        the call leaves in them is not what it was given, so it is timed once.
        """
        raise NotImplementedError(f"{type(self).__name__} declares in its Support that it omits nothing")

    def sum(self, tensor: Tensor) -> Tensor:
        """Sum of what the ranks hold of the loss, in place; the same value on every rank.

        Ranks that don't hold the loss give zeros; of those that hold copies of it, one counts.
        """
        return self.data.sum(tensor)

    def learning_rates(self) -> list[float]:
        """The lr in use, one a parameter group."""
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    def extra_metrics(self) -> dict[str, float]:
        """What a logged step says beyond the usual, such as the loss scale. Every rank asks, and may communicate."""
        return {}

    def totals(self) -> dict[str, Any]:
        """What summary.json says of the run so far beyond the usual, in JSON's types."""
        return {}

    def settling_steps(self) -> int:
        """Steps to come that need less memory than those after them, beside the first (a compressor's warm-up)."""
        return 0

    def imagined(self) -> "Strategy":
        """What is built on fake tensors in this one's place, unbuilt: itself, unless its engine reads from memory."""
        return self

    def close(self) -> None:
        """Release what build took; must not communicate, since peers may be gone."""
        return None
