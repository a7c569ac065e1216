"""What strategy=pp refuses, before anything is built: one line each, of choice, reason and remedy."""

from itertools import pairwise
from typing import cast

from torch import nn

from src.parallel.cutting import cut_twins, shared_by_stages
from src.parallel.pipeline import (
    SEVERAL_STAGES,
    Cuttable,
    nearest_counts,
    stage_layers,
    takes_microbatches,
    usual_stages,
)
from src.strategies.base import Setting
from src.strategies.degrees import lone_sequence_problems, tensor_problems
from src.strategies.plan_problems import fused_sgd_problems, lacking_problems, stage_plan_problems


def problems(setting: Setting) -> list[str]:
    """Without asking the model."""
    pp, tp, schedule = degree(setting), tensor_degree(setting), schedule_name(setting)
    found = []
    if pp == 1:
        found.append(
            "strategy.pp=1 makes a pipeline of one stage, with nothing to cut. Use strategy.pp=2 or more,"
            " strategy=tp to split the layers themselves, or strategy=ddp or strategy=fsdp."
        )
    elif not takes_microbatches(schedule, setting.accumulate, pp):
        found.append(_count_problem(schedule, setting.accumulate, pp))
    found += lone_sequence_problems(tp, setting)
    level = setting.sharding.level
    if schedule == "zero_bubble" and level in ("zero3", "hybrid"):
        # torch 2.14 lists the weights whose gradients it puts off before backward has gathered them again.
        found.append(
            f"sharding={level} frees gathered weights between forward and backward, and strategy.schedule=zero_bubble"
            " would leave out their gradients. Use sharding=zero2, or another schedule."
        )
    if schedule == "zero_bubble" and setting.activation_checkpointing != "none":
        # torch 2.14 asks for the gradients of each layer's inputs, and then of each weight, in a backward of its own:
        # a block of a GPT was recomputed nine times.
        found.append(
            f"trainer.activation_checkpointing={setting.activation_checkpointing} recomputes a layer in each backward"
            " through it, and strategy.schedule=zero_bubble goes through it once for every weight."
            " Use trainer.activation_checkpointing=none, or another schedule."
        )
    if setting.data_parallel_size > 1 or tp > 1 or setting.precision in ("bf16", "fp16"):
        found += fused_sgd_problems(setting)
    return found + _stage_problems(setting)


def model_problems(model: nn.Module, setting: Setting) -> list[str]:
    """Of a model that can be cut. model: on the meta device."""
    tp, sequence_parallel = tensor_degree(setting), bool(setting.arguments.get("sequence_parallel", False))
    splits = tp > 1
    found = lacking_problems(model, f"strategy.tp={tp}", "strategy.tp=1") if splits else []
    splits = splits and not found
    if splits:
        found += tensor_problems(model, tp, sequence_parallel, setting)
    uncut = _layer_problems(model, setting)
    if uncut or _stage_problems(setting):  # the latter `problems` says
        return found + uncut
    counts = cast(Cuttable, model).layer_parameters()
    layers = stage_layers(counts, num_stages(setting), setting.arguments.get("split_points"))
    found += _shared_problems(model, layers)
    if splits and not found:
        found += stage_plan_problems(cut_twins(model, layers), sequence_parallel)
    return found


def _layer_problems(model: nn.Module, setting: Setting) -> list[str]:
    layers, stages = len(cast(Cuttable, model).layer_parameters()), num_stages(setting)
    points = setting.arguments.get("split_points")
    if layers < stages:
        return [
            f"the model has {layers} layer(s), fewer than the {stages} stages of strategy.pp={degree(setting)} with"
            f" {stages // degree(setting)} a rank. Use fewer stages, or a model of {stages} layers or more."
        ]
    if points and not all(1 <= point < layers for point in points):
        choice = "points from 1 to " + str(layers - 1) if layers > 2 else "1"
        return [f"strategy.split_points={points} must lie between the model's {layers} layers; choose {choice}."]
    return []


def _shared_problems(model: nn.Module, layers: list[range]) -> list[str]:
    if getattr(model, "tie_embeddings", False):
        return [
            "model.tie_embeddings=true shares one table between the first stage and the last, whose copies would drift"
            " apart. Use model.tie_embeddings=false, or a strategy without stages."
        ]
    if shared := shared_by_stages(model, layers):
        return [
            f"model {type(model).__name__} shares {', '.join(shared)} between stages, whose copies would drift apart."
            " Give each stage parameters of its own, or use a strategy without stages."
        ]
    return []


def _count_problem(schedule: str, count: int, pp: int) -> str:
    reason = (
        f"runs a micro-batch in each of strategy.pp={pp} stages at once"
        if schedule == "1f1b"
        else f"runs equal rounds of at least strategy.pp={pp} micro-batches"
    )
    near = f"{pp} or more" if count < pp else " or ".join(str(n) for n in nearest_counts(schedule, count, pp))
    return (
        f"trainer.accumulate={count} does not suit strategy.schedule={schedule}, which {reason}."
        f" Use trainer.accumulate={near}, or strategy.schedule=gpipe."
    )


def _stage_problems(setting: Setting) -> list[str]:
    schedule, several = schedule_name(setting), setting.arguments.get("stages_per_rank")
    if several is not None and several < 1:
        return [f"strategy.stages_per_rank={several} is no number of stages; choose 1 or more, or null."]
    if several is not None and several > 1 and schedule not in SEVERAL_STAGES:
        return [
            f"strategy.stages_per_rank={several}: strategy.schedule={schedule} has one stage a rank."
            " Use strategy.stages_per_rank=null, or strategy.schedule=interleaved_1f1b or zero_bubble."
        ]
    points, stages = setting.arguments.get("split_points"), num_stages(setting)
    if points is None:
        return []
    if len(points) != stages - 1:
        return [
            f"strategy.split_points={points} makes {len(points) + 1} stage(s), but strategy.pp={degree(setting)} with"
            f" {stages // degree(setting)} a rank has {stages}. Give {stages - 1} point(s), or null to split evenly."
        ]
    if any(first >= second for first, second in pairwise(points)):
        return [f"strategy.split_points={points} must go up. Give {stages - 1} different points, in order."]
    return []


def degree(setting: Setting) -> int:
    return int(setting.arguments.get("pp", 2))


def tensor_degree(setting: Setting) -> int:
    return int(setting.arguments.get("tp", 1))


def schedule_name(setting: Setting) -> str:
    return str(setting.arguments.get("schedule", "1f1b"))


def num_stages(setting: Setting) -> int:
    return degree(setting) * (setting.arguments.get("stages_per_rank") or usual_stages(schedule_name(setting)))
