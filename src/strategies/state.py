"""A run's state out of modules and their optimizer, and back, by the bare model's names (`run_state.State`).

For every engine that leaves the optimizer's state with the parameters: whole ones, and DTensors.
"""

import copy
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from src.strategies.run_state import State

Slots = dict[str, Tensor]
STEP = "step"  # torch's name for the slot that counts; kept as a number, since an optimizer may hold it anywhere


def take(modules: Sequence[nn.Module], optimizer: torch.optim.Optimizer) -> State:
    """The state of modules whose own names are the bare model's; nothing is copied, gathered or changed.

    modules: the model, or a pipeline's stages of it. optimizer: of all of them.
    """
    tensors = {f"model.{name}": at_least_1d(tensor.detach()) for name, tensor in named_tensors(modules).items()}
    steps: dict[str, int] = {}
    for name, parameter, group in named_parameters(modules, optimizer):
        held = optimizer.state.get(parameter)
        slots = held or fresh_slots(optimizer, group, parameter)
        if STEP in slots:
            steps[name] = int(slots[STEP])
        elif slots and not held:
            steps[name] = 0  # a momentum that never was begins otherwise than one of zeros, if there is dampening
        for slot, tensor in slots.items():
            if slot != STEP:
                tensors[f"optimizer.{name}.{slot}"] = at_least_1d(tensor)
    return State(tensors, {"steps": steps})


@torch.no_grad()
def put_back(state: State, modules: Sequence[nn.Module], optimizer: torch.optim.Optimizer) -> None:
    """Make `state` what these modules and their optimizer go on from. state: of `take`, of the like."""
    for name, tensor in named_tensors(modules).items():
        tensor.copy_(shaped_as(tensor, state.tensors[f"model.{name}"]))
    steps = state.plain["steps"]
    for name, parameter, group in named_parameters(modules, optimizer):
        slots = optimizer.state.get(parameter) or {}
        if not slots and steps.get(name) == 0:
            continue  # the optimizer's own beginning is the right one
        slots = slots or fresh_slots(optimizer, group, parameter)
        for slot, tensor in slots.items():
            if slot == STEP:
                tensor.fill_(steps[name])
            else:
                tensor.copy_(shaped_as(tensor, state.tensors[f"optimizer.{name}.{slot}"]))
        if slots:
            optimizer.state[parameter] = slots


def named_tensors(modules: Sequence[nn.Module]) -> dict[str, Tensor]:
    """Parameters and persistent buffers, themselves and not copies. Sharded modules give their shards."""
    return {name: tensor for module in modules for name, tensor in module.state_dict(keep_vars=True).items()}


def named_parameters(
    modules: Sequence[nn.Module], optimizer: torch.optim.Optimizer
) -> Iterator[tuple[str, Tensor, dict[str, Any]]]:
    """(name, parameter, its group) of what the optimizer trains. A parameter with two names (tied) has the first."""
    names: dict[Tensor, str] = {}
    for name, tensor in named_tensors(modules).items():
        names.setdefault(tensor, name)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            yield names[parameter], parameter, group


def fresh_slots(optimizer: torch.optim.Optimizer, group: dict[str, Any], parameter: Tensor) -> Slots:
    """The state that the optimizer would make for `parameter`, all zeros, before its first step.

    What slots there are is learnt from a step of a copy of the optimizer on a parameter of two elements a dim:
    a step of the real one, even by zero, would count, and round zeros.
    Raises ValueError for optimizers whose slots have other shapes than the parameters, which no sharding can place.
    """
    probe = nn.Parameter(torch.ones([2] * parameter.ndim, dtype=parameter.dtype, device=parameter.device))
    probe.grad = torch.zeros_like(probe)
    trial = copy.copy(optimizer)
    trial.state = defaultdict(dict)
    trial.param_groups = [{**group, "params": [probe]}]
    trial.step()
    slots: Slots = {}
    for slot, tensor in trial.state[probe].items():
        if not isinstance(tensor, Tensor) or (tensor.ndim > 0 and tensor.shape != probe.shape):
            raise ValueError(
                f"{type(optimizer).__name__} keeps {slot!r}, which is no tensor of its parameter's shape, so it can't"
                " be saved. Use optimizer=adamw, adam or sgd."
            )
        whole = tensor.shape == probe.shape and slot != STEP
        slots[slot] = torch.zeros_like(parameter.detach() if whole else tensor, dtype=tensor.dtype)
    return slots


def at_least_1d(tensor: Tensor) -> Tensor:
    """A view of shape (1,) where there is no dim: checkpoints hold parts of dims."""
    return tensor.view(1) if tensor.ndim == 0 else tensor


def shaped_as(tensor: Tensor, given: Tensor) -> Tensor:
    """The inverse of `at_least_1d`. What has its shape already stays as it is: `given` may be `tensor` itself, and a
    view of it, of other strides, could not be copied into it."""
    return given if given.shape == tensor.shape else given.view(tensor.shape)


def scaler_state(scaler: torch.amp.GradScaler) -> dict[str, Any]:
    """What a loss scaler has learnt, in plain types; its factors and its interval are the configuration's."""
    held = scaler.state_dict()
    return {"scale": held["scale"], "growth_tracker": held["_growth_tracker"]}


def put_back_scaler(learnt: dict[str, Any], scaler: torch.amp.GradScaler) -> None:
    """learnt: of `scaler_state`, or of another engine's scaler."""
    # The scale grows when the tracker *reaches* the interval: from beyond it, it never would again.
    tracker = min(learnt["growth_tracker"], scaler.get_growth_interval() - 1)
    scaler.load_state_dict({**scaler.state_dict(), "scale": learnt["scale"], "_growth_tracker": tracker})
