"""A warning before the first step, where the disk looks too small for what a run is to keep."""

import logging
import shutil

import torch
from torch import nn

from src.memory import memory
from src.run import Experiment
from src.strategies.base import OptimizerFactory

log = logging.getLogger(__name__)

BYTES = 4  # a number in a checkpoint: weights and the optimizer's slots are fp32 whatever the precision
BEYOND_KEEP = 2  # the one that is being written, and the best


def warn_if_short(experiment: Experiment, parameters: int) -> None:
    """On rank 0, say so if the run folder's disk has less room than the checkpoints to keep will take.

    parameters: of the whole model. An estimate: the random states and the manifest are not in it.
    """
    plan = experiment.snapshots.plan
    if plan.every is None or not experiment.world.is_main:
        return
    each = BYTES * parameters * (1 + slots_of(experiment.optimizer))
    needed, free = (plan.keep + BEYOND_KEEP) * each, shutil.disk_usage(experiment.run_dir).free
    if free < needed:
        log.warning(
            "The disk of %s may be too small: %d checkpoints of about %s each (checkpoint.keep=%d, the best and the one"
            " being written) take %s, and %s are free. Lower checkpoint.keep, or make room.",
            experiment.run_dir,
            plan.keep + BEYOND_KEEP,
            memory(each),
            plan.keep,
            memory(needed),
            memory(free),
        )


def slots_of(optimizer: OptimizerFactory) -> int:
    """How many tensors of a parameter's own shape the optimizer keeps beside it: 2 for Adam. Learnt from a step."""
    probe = nn.Parameter(torch.ones(2))
    probe.grad = torch.zeros(2)
    made = optimizer([probe])
    made.step()
    return sum(isinstance(slot, torch.Tensor) and slot.shape == probe.shape for slot in made.state[probe].values())
