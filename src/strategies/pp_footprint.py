"""What a rank of a pipeline holds: some of the layers, and the activations of several micro-batches at once."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from src.footprint import Footprint, ModelSizes, Part
from src.objective import cross_entropy_sum
from src.parallel.cutting import cut_twins
from src.parallel.pipeline import Cuttable, predicted_bubble, stage_layers, stages_of_rank
from src.strategies.base import Setting
from src.strategies.footprint import MAX_TENSOR_DEGREE, HasFootprint, ModelPart
from src.strategies.pp_problems import degree, num_stages, schedule_name, tensor_degree
from src.strategies.unit_footprint import layer_traffic, part_footprint

#: GPipe and 1F1B idle (p - 1) / (m + p - 1) of a step: with 4 p micro-batches less than a fifth.
MICRO_BATCHES_A_STAGE = 4


def pipeline_rank(setting: Setting, world_rank: int) -> int:
    """The pipeline is the mesh's first axis."""
    return world_rank * degree(setting) // setting.world_size


def passes_in_flight(setting: Setting, rank_in_pipeline: int) -> int:
    """Passes of a micro-batch through one stage whose activations a rank keeps at once.

    GPipe: all. 1F1B and zero bubble: those that the stages behind have begun (Narayanan et al. 2021, section 2.2);
    interleaved: x (1 + (p - 1) / (p v)) on the first rank (Korthikanti et al. 2022).
    """
    count, ranks, schedule = setting.accumulate, degree(setting), schedule_name(setting)
    several = num_stages(setting) // ranks
    if schedule == "gpipe":
        return count * several
    if schedule == "interleaved_1f1b":
        return min(count * several, 2 * (ranks - rank_in_pipeline - 1) + (several - 1) * ranks + 1)
    return min(count, ranks - rank_in_pipeline) * several


class PipelineFootprint(HasFootprint):
    """Mixed into the strategy."""

    degrees: ClassVar[Mapping[str, int | None]] = {"pp": None, "tp": MAX_TENSOR_DEGREE}

    @classmethod
    def wanted_accumulate(cls, arguments: Mapping[str, Any]) -> int:
        return MICRO_BATCHES_A_STAGE * int(arguments.get("pp", 2))

    @classmethod
    def idle_share(cls, setting: Setting) -> float:
        ranks = degree(setting)
        return (
            predicted_bubble(schedule_name(setting), setting.accumulate, ranks, num_stages(setting) // ranks)
            or (ranks - 1) / ranks
        )

    @classmethod
    def casts_weights(cls, setting: Setting) -> bool:
        return True

    @classmethod
    def part(cls, model: nn.Module, example: Tensor, setting: Setting, world_rank: int = 0) -> ModelPart:
        layers = stage_layers(
            cast(Cuttable, model).layer_parameters(), num_stages(setting), setting.arguments.get("split_points")
        )
        numbers = stages_of_rank(
            degree(setting), num_stages(setting) // degree(setting), pipeline_rank(setting, world_rank)
        )
        # What goes from stage to stage has one shape: that of what the first layer gives.
        first, *stages = cut_twins(model, [range(1), *(layers[number] for number in numbers)])
        loss: Callable[[Tensor, Tensor], Tensor] = cross_entropy_sum
        if (tp := tensor_degree(setting)) > 1:
            from src.parallel.narrow import narrowed, objective

            sequence_parallel = bool(setting.arguments.get("sequence_parallel"))
            loss = objective(stages[-1], sequence_parallel)
            first, *stages = [narrowed(stage, tp, sequence_parallel) for stage in (first, *stages)]
        with torch.no_grad():
            inputs = first(example) if numbers[0] > 0 else None
        units = [unit for stage in stages for unit in getattr(stage, "units", list)()]
        return ModelPart(nn.Sequential(*stages), units, inputs, numbers[-1] == num_stages(setting) - 1, loss)

    @classmethod
    def footprint(cls, sizes: ModelSizes, setting: Setting, world_rank: int = 0) -> Footprint:
        place, ranks = pipeline_rank(setting, world_rank), degree(setting)
        flying, stages = passes_in_flight(setting, place), num_stages(setting) // ranks
        # torch's stages reduce gradients once, after the last micro-batch.
        setting = replace(setting, arguments={**setting.arguments, "sync_each_microbatch": False})
        made = part_footprint(sizes, setting)
        # Those that wait keep all that backward needs. Of stages that go round, the last has nobody to wait for.
        waiting = (flying - stages) * sizes.activations // stages
        if stages == 1:
            waiting += (flying - 1) * sizes.logits
        peak = made.peak.bytes + waiting
        if flying == setting.accumulate * stages:  # all wait when the first backward begins, before any gradient
            first = part_footprint(sizes, replace(setting, accumulate=1))
            others = made.batch.bytes - first.batch.bytes
            peak = max(first.peak.bytes + others + waiting, peak - (sizes.activations + sizes.logits) // stages)
        ends = (place == 0) + (place == ranks - 1)  # of the pipeline, where nothing comes from or goes to
        boundary = sizes.stream * setting.accumulate
        # Into each stage its inputs, of which the batch has the first stage's; back into each the output's gradients.
        arriving = stages - 1 + stages - (place == ranks - 1)
        received = arriving * boundary
        buffers = Part(
            made.communication_buffers.bytes + received,
            f"{made.communication_buffers.formula}; {arriving} x {setting.accumulate} x {sizes.stream:,} received",
        )
        kept = (sizes.activations - sizes.weight_copies) * flying // stages
        links = 2 * stages - ends
        sent = Part(links * boundary, f"{links} link(s) x {setting.accumulate} micro-batches x {sizes.stream:,}")
        return replace(
            made,
            activations=Part(kept, f"{made.activations.formula} x {flying} / {stages} micro-batches in flight"),
            communication_buffers=buffers,
            peak=Part(
                peak + received,
                f"{made.peak.formula} + {flying} / {stages} - 1 micro-batches that wait + what neighbours send",
            ),
            traffic={**made.traffic, **layer_traffic(sizes, setting, tensor_degree(setting)), "send": sent},
        )
