"""strategy=pp: pipeline parallelism (GPipe, Huang et al. 2019), alone or with tensor and data parallelism beside it.

The layers are cut into stages, which `pp` ranks hold; micro-batches follow each other through them. Each stage may be
split over `tp` ranks; the ranks that are left are data parallel, and `sharding` says how, as for strategy=tp.
"""

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from src.batch import IGNORED, MicroBatch
from src.mesh import make_mesh
from src.objective import EvalSums
from src.parallel.clock import StepClock
from src.parallel.cutting import cut, shared_by_stages
from src.parallel.data import data_parallel
from src.parallel.draws import own_draws
from src.parallel.pipeline import (
    Cuttable,
    ScheduleName,
    predicted_bubble,
    stage_layers,
    stages_of_rank,
    usual_stages,
)
from src.strategies import pp_footprint, pp_problems
from src.strategies.autograd import AutogradStrategy, average_buffers
from src.strategies.base import Axis, BuildSpec, OptimizerFactory, Setting, Support
from src.strategies.degrees import axis, data_axis, data_ranks
from src.strategies.run_state import State


class PipelineParallel(pp_footprint.PipelineFootprint, AutogradStrategy):
    """pp: ranks of a pipeline. tp, sequence_parallel: as for strategy=tp, inside each stage.

    schedule: the order of forwards and backwards. split_points: stages begin before these layers; None: even by
    parameters. stages_per_rank: None: what the schedule usually has.
    """

    supports = Support(
        layout="cuts the layers into stages, and its data ranks hold copies or shards of theirs",
        sharding=frozenset({"none", "zero2", "zero3", "hybrid"}),
        model_carries={"keep_layers": "how it is cut into stages", "layer_parameters": "how large its layers are"},
    )

    def __init__(
        self,
        pp: int = 2,
        tp: int = 1,
        sequence_parallel: bool = False,
        schedule: ScheduleName = "1f1b",
        split_points: list[int] | None = None,
        stages_per_rank: int | None = None,
    ) -> None:
        self.arguments = (pp, tp, sequence_parallel, schedule, split_points, stages_per_rank)
        self.pp, self.tp, self.sequence_parallel = pp, tp, sequence_parallel
        self.schedule_name, self.split_points = schedule, split_points
        self.stages_per_rank = stages_per_rank or usual_stages(schedule)

    @classmethod
    def data_parallel_size(cls, world_size: int, arguments: Mapping[str, Any]) -> int:
        return data_ranks(world_size, pp=arguments.get("pp", 2), tp=arguments.get("tp", 1))

    @classmethod
    def different_ranks(cls, world_size: int, arguments: Mapping[str, Any]) -> list[int]:
        return list(range(0, world_size, world_size // arguments.get("pp", 2)))

    @classmethod
    def problems(cls, setting: Setting) -> list[str]:
        return pp_problems.problems(setting)

    @classmethod
    def model_problems(cls, model: nn.Module, setting: Setting) -> list[str]:
        return pp_problems.model_problems(model, setting)

    def build(self, model: nn.Module, optimizer: OptimizerFactory, spec: BuildSpec) -> None:
        from src.parallel.stages import ForwardPass, training_schedule  # 2 s to import

        self.mesh = make_mesh(spec.world, spec.sharding, tensor=self.tp if self.tp > 1 else None, pipeline=self.pp)
        self.pipeline = axis(self.mesh, "pipeline")
        self.num_stages = self.pp * self.stages_per_rank
        self.stage_numbers = stages_of_rank(self.pp, self.stages_per_rank, self.pipeline.rank)
        super().build(model, optimizer, spec)
        self.clock = StepClock(spec.world.device)
        self.steps = 0
        self.losses: list[Tensor] = []
        stages = dict(zip(self.stage_numbers, cast(nn.ModuleList, self.model), strict=True))
        where = (stages, self.num_stages, self.mesh["pipeline"], spec.world.device)
        self.schedule = training_schedule(self.schedule_name, *where, spec.accumulate, self.weighed_loss, self.clock)
        self.forward_pass = ForwardPass(*where)
        if self.scaler is not None:
            # Ranks without the loss scale nothing, and a scaler that never did has no scale to take away.
            self.scaler.scale(torch.zeros((), device=spec.world.device))

    def imagined(self) -> "PipelineParallel":
        from src.strategies.pp_imagined import ImaginedPipeline

        return ImaginedPipeline(*self.arguments)

    def data_axis(self, spec: BuildSpec) -> Axis:
        return data_axis(self.mesh)

    @property
    def holds_loss(self) -> bool:
        """Whether the last stage is on this rank."""
        return self.num_stages - 1 in self.stage_numbers

    def wrap(self, model: nn.Module, spec: BuildSpec) -> nn.Module:
        """This rank's stages, in a list."""
        counts = cast(Cuttable, model).layer_parameters()
        layers = stage_layers(counts, self.num_stages, self.split_points)
        if shared := shared_by_stages(model, layers):
            # Said before the start (`pp_problems`), but of a model that can't be built without memory.
            raise ValueError(
                f"several stages would train a copy of their own of {', '.join(shared)}. Give each stage its own"
                " parameter, or use a strategy without stages."
            )
        if self.tp > 1:
            from src.parallel.plan import refuse_unknown_keys

            refuse_unknown_keys(model, self.sequence_parallel)  # of the whole; a stage lacks what others hold
        stages = cut(model, [layers[number] for number in self.stage_numbers])
        return nn.ModuleList(
            self.placed(stage, number, spec) for number, stage in zip(self.stage_numbers, stages, strict=True)
        )

    def placed(self, stage: nn.Module, number: int, spec: BuildSpec) -> nn.Module:
        """A stage split, sharded and on its device, in the order in which these must come."""
        # Stages share the seed of their pipeline; each draws its own dropout from it. Before tensor parallelism,
        # whose ranks share the stage's stream in turn.
        own_draws(stage, number, spec.world.device.type)
        if self.tp > 1:
            from src.parallel.tensor import tensor_parallel

            tensor_parallel(stage, self.mesh["tensor"], self.sequence_parallel)
        # A lone data rank in fp32 has nobody to meet and nothing to cast.
        if self.data.size > 1 or spec.precision.compute_dtype is not None:
            data_parallel(stage, self.mesh, spec.precision, spec.sharding)
        return stage.to(spec.world.device)

    def forward_backward(self, microbatches: Sequence[MicroBatch], valid_targets: int | Tensor) -> Tensor | None:
        from torch.distributed.tensor.parallel import loss_parallel

        from src.parallel.tensor import settle_gradients

        self.valid_targets = valid_targets
        self.losses.clear()
        self.steps += 1
        full = padded(microbatches, self.spec.accumulate)
        with self.clock.step(), loss_parallel():
            self.schedule.step(
                arg_mbs=[(batch.inputs,) for batch in full],
                target_mbs=[batch.targets for batch in full],
                return_outputs=False,
            )
        settle_gradients(self.trained)
        # In its first step the schedule calls the loss once more, to learn the shapes.
        return torch.stack(self.losses[-len(full) :]).sum() if self.holds_loss else None

    def weighed_loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        """The micro-batch's share of the step's mean loss, times the loss scale."""
        loss = self.loss(logits, targets)
        self.losses.append(loss.detach())
        if self.scaler is not None:
            return self.scaler.scale(loss / self.valid_targets)
        return loss * self.loss_weight(self.valid_targets, loss)

    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        from src.parallel.vocabulary import split_cross_entropy_sum

        return split_cross_entropy_sum(logits, targets)

    def clip(self, max_norm: float) -> Tensor:
        from src.parallel.norm import total_norm

        # Over this stage's axes: parts are added up, what is replicated counts once.
        norm = total_norm([p.grad for p in self.trained if p.grad is not None])
        norm = self.pipeline.sum(norm.square()).sqrt()
        nn.utils.clip_grads_with_norm_(self.trained, max_norm, norm)
        return norm

    def sum(self, tensor: Tensor) -> Tensor:
        return self.pipeline.sum(super().sum(tensor))

    def evaluate(self, batch: MicroBatch) -> EvalSums | None:
        from torch.distributed.tensor.parallel import loss_parallel

        from src.parallel.vocabulary import split_evaluation_sums

        logits = self.forward_pass(batch.inputs)
        if logits is None:
            return None
        with torch.no_grad(), loss_parallel():
            return split_evaluation_sums(logits, batch.targets)

    def extra_metrics(self) -> dict[str, float]:
        found = super().extra_metrics()
        predicted = predicted_bubble(self.schedule_name, self.spec.accumulate, self.pp, self.stages_per_rank)
        if predicted is not None:
            found["bubble_predicted"] = predicted
        if self.steps > 1:  # the first one also works out the shapes
            found["bubble"] = self.measured_bubble()
        return found

    def measured_bubble(self) -> float:
        """The share of the last step in which the ranks did not compute, 0 ... 1, their mean. Collective; waits."""
        busy, step = self.clock.read()
        device = self.spec.world.device
        # The last stage is through first; what counts is when all are.
        longest = torch.tensor(step, device=device)
        dist.all_reduce(longest, dist.ReduceOp.MAX, group=self.pipeline.group)
        return float(self.sum(1 - busy / longest)) / (self.data.size * self.pp)

    def weights(self) -> dict[str, Tensor] | None:
        from src.parallel.stages import receive_weights, send_weights
        from src.parallel.tensor import whole_weights

        average_buffers(self.model, self.data)
        place = self.mesh.get_coordinate() or ()
        sends = not any(place[1:])  # of the ranks of a stage, the first; the pipeline is the mesh's first axis
        whole: dict[str, Tensor] = {}
        for stage in cast(nn.ModuleList, self.model):
            whole |= whole_weights(stage, keep=sends)
        if self.spec.world.is_main:
            others = range(1, self.pp)
            return whole | receive_weights(other * self.spec.world.world_size // self.pp for other in others)
        if sends:
            send_weights(whole, world_rank=0)
        return None

    def bare_modules(self) -> list[nn.Module]:
        return list(cast(nn.ModuleList, self.model))

    def take_state(self) -> State:
        state = super().take_state()
        steps: list[Any] = [None] * self.pp  # of every stage; their tensors stay where they are
        dist.all_gather_object(steps, state.plain["steps"], group=self.pipeline.group)
        return State(state.tensors, {"steps": {name: count for stage in steps for name, count in stage.items()}})


def padded(microbatches: Sequence[MicroBatch], count: int) -> list[MicroBatch]:
    """`count` micro-batches: schedules are made for a number, and the end of an epoch may have fewer."""
    first = microbatches[0]
    masked = MicroBatch(first.inputs, torch.full_like(first.targets, IGNORED))
    return [*microbatches, *[masked] * (count - len(microbatches))]
