"""The stages of a pipeline, and torch's schedules over them (`torch.distributed.pipelining`).

Importing this costs 2 s: torch's pipelining brings dynamo and inductor.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
)
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, PipelineScheduleSingle

from src.parallel.clock import StepClock

Schedule = PipelineScheduleSingle | PipelineScheduleMulti
Loss = Callable[[Tensor, Tensor], Tensor]

SCHEDULES: dict[str, type[Schedule]] = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved_1f1b": ScheduleInterleaved1F1B,
    "zero_bubble": ScheduleInterleavedZeroBubble,
}


class TimedStage(PipelineStage):
    """A stage that tells `clock` when it computes."""

    def __init__(self, clock: StepClock, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.clock = clock

    def forward_one_chunk(self, *arguments: Any, **named: Any) -> Any:
        with self.clock.busy():
            return super().forward_one_chunk(*arguments, **named)

    def backward_one_chunk(self, *arguments: Any, **named: Any) -> Any:
        with self.clock.busy():
            return super().backward_one_chunk(*arguments, **named)

    def backward_weight_one_chunk(self, *arguments: Any, **named: Any) -> Any:
        with self.clock.busy():
            return super().backward_weight_one_chunk(*arguments, **named)


class ForwardStage(PipelineStage):
    """Keeps what its last forward gave; a schedule would hand out a copy."""

    output: Any = None

    def forward_one_chunk(self, *arguments: Any, **named: Any) -> Any:
        self.output = super().forward_one_chunk(*arguments, **named)
        return self.output


def training_schedule(
    name: str,
    modules: dict[int, nn.Module],
    num_stages: int,
    mesh: DeviceMesh,
    device: torch.device,
    num_microbatches: int,
    loss: Loss,
    clock: StepClock,
) -> Schedule:
    """The schedule of this name for steps of `num_microbatches`; gradients are summed over them.

    modules: this rank's, by the number of their stage. mesh: the pipeline axis. loss: (output, targets) to a scalar,
    called where the last stage is.
    """

    def timed_loss(output: Tensor, targets: Tensor) -> Tensor:
        with clock.busy():
            return loss(output, targets)

    group = mesh.get_group()
    stages = [TimedStage(clock, module, index, num_stages, device, group=group) for index, module in modules.items()]
    kind = SCHEDULES[name]
    arguments: dict[str, Any] = {"n_microbatches": num_microbatches, "loss_fn": timed_loss, "scale_grads": False}
    if issubclass(kind, PipelineScheduleSingle):
        (stage,) = stages
        return kind(stage, **arguments)
    return kind(stages, **arguments)  # type: ignore[arg-type]


class ForwardPass:
    """One micro-batch through all stages without gradients. modules, mesh: as for `training_schedule`.

    Has stages of its own over the same modules: torch binds a stage to its schedule's number of micro-batches.
    """

    def __init__(self, modules: dict[int, nn.Module], num_stages: int, mesh: DeviceMesh, device: torch.device) -> None:
        group = mesh.get_group()
        self.stages = [
            ForwardStage(module, index, num_stages, device, group=group) for index, module in modules.items()
        ]
        self.schedule: Schedule = (
            ScheduleGPipe(self.stages[0], 1) if len(self.stages) == 1 else ScheduleLoopedBFS(list(self.stages), 1)
        )

    def __call__(self, inputs: Tensor) -> Any:
        """The last stage's output on its rank, None elsewhere."""
        with torch.no_grad():
            self.schedule.step(arg_mbs=[(inputs,)], return_outputs=False)
        last = self.stages[-1]
        output = last.output if last.is_last else None
        for stage in self.stages:
            stage.output = None
            stage.clear_runtime_states()
        return output


def send_weights(weights: dict[str, Tensor], world_rank: int) -> None:
    """To the world rank that calls `receive_weights`. weights: on the CPU."""
    described = [(name, tensor.shape, tensor.dtype) for name, tensor in weights.items()]
    dist.send_object_list([described], dst=world_rank, device=torch.device("cpu"))
    for tensor in weights.values():
        dist.send(tensor, dst=world_rank)


def receive_weights(world_ranks: Iterable[int]) -> dict[str, Tensor]:
    """What the given world ranks send by `send_weights`, in this order."""
    weights: dict[str, Tensor] = {}
    for world_rank in world_ranks:
        described: list[Any] = [None]
        dist.recv_object_list(described, src=world_rank, device=torch.device("cpu"))
        for name, shape, dtype in described[0]:
            weights[name] = torch.empty(shape, dtype=dtype)
            dist.recv(weights[name], src=world_rank)
    return weights
