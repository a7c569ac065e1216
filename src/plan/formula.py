"""Footprints by the closed formulas: of any model, under any strategy, at any size, in a second or a few."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import nn

from src.batch import MicroBatch
from src.data.base import Data
from src.errors import Refused
from src.footprint import Footprint, ModelSizes
from src.plan.sizes import model_sizes, optimizer_slots
from src.precision import Precision
from src.strategies.base import OptimizerFactory, Setting, Strategy


class Planned(NamedTuple):
    """Of one rank, which holds as much as any other of its kind."""

    world_rank: int
    sizes: ModelSizes
    footprint: Footprint


def plan(
    strategy: type[Strategy],
    make_model: Callable[[], nn.Module],
    optimizer: OptimizerFactory,
    data: Data,
    setting: Setting,
) -> list[Planned]:
    """One for each kind of rank that the strategy has. Raises Refused where the data don't tell a micro-batch's shapes.

    Nothing is allocated: the model is built on the meta device.
    """
    slots = optimizer_slots(optimizer)
    return [
        plan_rank(strategy, make_model, slots, data, setting, world_rank)
        for world_rank in strategy.different_ranks(setting.world_size, setting.arguments)
    ]


def plan_rank(
    strategy: type[Strategy],
    make_model: Callable[[], nn.Module],
    slots: int,
    data: Data,
    setting: Setting,
    world_rank: int,
) -> Planned:
    """slots: states of a parameter's shape that the optimizer keeps."""
    sizes = walk(strategy, make_model, slots, data, setting, world_rank)
    return Planned(world_rank, sizes, strategy.footprint(sizes, setting, world_rank))


def walk(
    strategy: type[Strategy],
    make_model: Callable[[], nn.Module],
    slots: int,
    data: Data,
    setting: Setting,
    world_rank: int,
) -> ModelSizes:
    """The sizes of what a rank computes with."""
    with torch.device("meta"):
        model = make_model()
        batch = example(data, setting.micro_batch_size)
    part = strategy.part(model, batch.inputs, setting, world_rank)
    if part.inputs is not None:
        batch = batch._replace(inputs=part.inputs)
    return model_sizes(part, batch, slots, Precision(setting.precision), strategy.casts_weights(setting))


def fullest(plans: list[Planned]) -> Planned:
    """The rank with the highest peak: all others have room where it has."""
    return max(plans, key=lambda planned: planned.footprint.peak.bytes)


def example(data: Data, micro_batch_size: int) -> MicroBatch:
    """A micro-batch's shapes. Raises Refused where nobody can tell them."""
    batch = data.example(micro_batch_size)
    if batch is None:
        raise Refused(
            f"data {type(data).__name__} tells no micro-batch's shapes without reading samples, so nothing can be"
            " planned. Use data=synthetic_images or data=synthetic_tokens of the same shapes, or give the class an"
            " example() (src/data/base.py)."
        )
    return batch
