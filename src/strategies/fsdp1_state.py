"""FSDP1's state: torch's own translation takes it out of the flat parameters and puts it back."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictType,
)

from src.strategies.run_state import State
from src.strategies.state import STEP, Slots, at_least_1d, fresh_slots

WRAPPER = "_fsdp_wrapped_module."
STEPPED = "stepped"  # a slot of our own, for the way through torch: whether the others were there, or are made up


def take(model: FullyShardedDataParallel, optimizer: torch.optim.Optimizer) -> State:
    """As `state.take`, but of copies, sharded on the first dim; gathers a unit at a time. Collective."""
    with _sharded(model):
        weights = model.state_dict()
        held = FullyShardedDataParallel.optim_state_dict(model, optimizer, _completed(optimizer))
    tensors = {f"model.{name}": at_least_1d(tensor) for name, tensor in weights.items()}
    steps: dict[str, int] = {}
    for name, slots in held["state"].items():
        if STEP in slots or not slots[STEPPED]:
            steps[name] = int(slots.get(STEP, 0))
        for slot, tensor in slots.items():
            if slot not in (STEP, STEPPED):
                tensors[f"optimizer.{name}.{slot}"] = at_least_1d(tensor)
    return State(tensors, {"steps": steps})


def _completed(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The optimizer's state dict, with what it has not made yet. The rank's parameters are its parts of the whole."""
    held = optimizer.state_dict()
    for group, numbers in zip(optimizer.param_groups, held["param_groups"], strict=True):
        for parameter, number in zip(group["params"], numbers["params"], strict=True):
            if parameter.numel() == 0:
                continue  # other ranks have all of it
            slots: Slots | None = held["state"].get(number)
            completed = slots or fresh_slots(optimizer, group, parameter)
            if completed:
                held["state"][number] = {**completed, STEPPED: torch.tensor(float(bool(slots)))}
    return held


@torch.no_grad()
def put_back(state: State, model: FullyShardedDataParallel, optimizer: torch.optim.Optimizer) -> None:
    """As `state.put_back`. Collective."""
    steps = state.plain["steps"]
    names = {p: name.replace(WRAPPER, "") for name, p in model.named_parameters()}
    groups = [{**group, "params": [names[p] for p in group["params"]]} for group in optimizer.param_groups]
    slots: dict[str, dict[str, Any]] = {}
    for key, tensor in state.tensors.items():
        name, _, slot = key.removeprefix("optimizer.").rpartition(".")
        if key.startswith("optimizer.") and steps.get(name) != 0:  # else the optimizer's own beginning is right
            slots.setdefault(name, {STEP: torch.tensor(float(steps[name]))} if name in steps else {})[slot] = tensor
    with _sharded(model):
        weights = {key.removeprefix("model."): t for key, t in state.tensors.items() if key.startswith("model.")}
        model.load_state_dict(weights)
        if not slots:
            optimizer.state.clear()
            return
        loadable = FullyShardedDataParallel.optim_state_dict_to_load(
            model, optimizer, {"state": slots, "param_groups": groups}
        )
        optimizer.load_state_dict(loadable)


@contextmanager
def _sharded(model: FullyShardedDataParallel) -> Iterator[None]:
    """State dicts of DTensors meanwhile."""
    with warnings.catch_warnings():
        # torch's own get_state_dict still works by this.
        warnings.filterwarnings("ignore", message="FSDP.state_dict_type", category=FutureWarning)
        with FullyShardedDataParallel.state_dict_type(
            model,
            StateDictType.SHARDED_STATE_DICT,
            ShardedStateDictConfig(offload_to_cpu=False),
            ShardedOptimStateDictConfig(offload_to_cpu=False),
        ):
            yield
