"""What a rank of a pipeline holds: some of the layers, and the activations of several micro-batches at once."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from src.footprint import Footprint, ModelSizes, Part
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


def micro_batches_in_flight(setting: Setting, rank_in_pipeline: int) -> int:
    """Whose activations a rank keeps at once, in micro-batches of all its stages.

    GPipe: all. 1F1B and zero bubble: those that the stages behind have begun (Narayanan et al. 2021, section 2.2);
    interleaved: x (1 + (p - 1) / (p v)) on the first rank (Korthikanti et al. 2022).
    """
    count, ranks, schedule = setting.accumulate, degree(setting), schedule_name(setting)
    if schedule == "gpipe":
        return count
    if schedule == "interleaved_1f1b":
        several = num_stages(setting) // ranks
        return min(count, -(-(2 * (ranks - rank_in_pipeline - 1) + (several - 1) * ranks + 1) // several))
    return min(count, ranks - rank_in_pipeline)


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
        inputs = None
        if numbers[0] > 0:
            # What goes from stage to stage has one shape: that of what the first layer gives.
            with torch.no_grad():
                inputs = cut_twins(model, [range(1)])[0](example)
        stages = cut_twins(model, [layers[number] for number in numbers])
        if (tp := tensor_degree(setting)) > 1:
            from src.parallel.narrow import narrowed

            stages = [narrowed(stage, tp, bool(setting.arguments.get("sequence_parallel"))) for stage in stages]
        units = [unit for stage in stages for unit in getattr(stage, "units", list)()]
        return ModelPart(nn.Sequential(*stages), units, inputs, is_last=numbers[-1] == num_stages(setting) - 1)

    @classmethod
    def footprint(cls, sizes: ModelSizes, setting: Setting, world_rank: int = 0) -> Footprint:
        place = pipeline_rank(setting, world_rank)
        flying, ranks = micro_batches_in_flight(setting, place), degree(setting)
        made = part_footprint(sizes, setting)
        # Those that wait keep all that backward needs, and what the stage gave.
        waiting = (flying - 1) * (sizes.activations + sizes.output)
        neighbours = (place > 0) + (place < ranks - 1)
        boundary = sizes.stream * setting.accumulate
        received = neighbours * boundary
        buffers = Part(
            made.communication_buffers.bytes + received,
            f"{made.communication_buffers.formula}; {neighbours} x {setting.accumulate} x {sizes.stream:,} received",
        )
        kept = (sizes.activations - sizes.weight_copies) * flying
        sent = Part(received, f"{neighbours} neighbour(s) x {setting.accumulate} micro-batches x {sizes.stream:,}")
        return replace(
            made,
            activations=Part(kept, f"{made.activations.formula} x {flying} micro-batches in flight"),
            communication_buffers=buffers,
            peak=Part(
                made.peak.bytes + waiting + received,
                f"{made.peak.formula} + {flying - 1} micro-batches that wait + what neighbours send",
            ),
            traffic={**made.traffic, **layer_traffic(sizes, setting, tensor_degree(setting)), "send": sent},
        )
