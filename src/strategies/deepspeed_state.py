"""The state of a ZeRO engine of stages 1 to 3, by the bare model's names (DeepSpeed 0.19.8).

The engine holds fp32 masters and moments in flat partitions that cross parameters. By its `safe_get_*` they are
gathered a parameter at a time, and each rank keeps its part of the first dim; `safe_set_*` put them back.
"""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from src.strategies.deepspeed_engine import whole_parameter
from src.strategies.run_state import State
from src.strategies.state import STEP, Slots, at_least_1d, fresh_slots, shaped_as


class Partition(NamedTuple):
    """This rank's part of some parameters, as the optimizer has it. flat: their fp32 masters, one after the other.

    slots: the optimizer's state of `flat`; None before its first step.
    """

    parameters: list[nn.Parameter]
    flat: Tensor
    group: dict[str, Any]
    slots: Slots | None


def partitions(engine: Any) -> list[Partition]:
    """In an order that all ranks share."""
    zero = engine.optimizer
    groups = zero.optimizer.param_groups
    if engine.zero_optimization_stage() == 3:
        members = zip(zero.fp16_groups, zero.fp32_partitioned_groups_flat, strict=True)
        numbers = [zero.sub_group_to_group_id[i] for i in range(len(zero.fp16_groups))]
    else:
        members = zip(zero.bit16_groups, zero.single_partition_of_fp32_groups, strict=True)
        numbers = list(range(len(groups)))
    return [
        Partition(parameters, flat, groups[number], zero.optimizer.state.get(flat) or None)
        for (parameters, flat), number in zip(members, numbers, strict=True)
    ]


def take(engine: Any, dtypes: Mapping[str, torch.dtype], mesh: DeviceMesh) -> State:
    """Copies on the CPU, split over `mesh` (one axis, all ranks), of parameters gathered one by one. Collective.

    dtypes: the model's own, by name, for what the engine has cast.
    """
    tensors: dict[str, Tensor] = {}
    for name, tensor in engine.module.state_dict(keep_vars=True).items():
        if isinstance(tensor, nn.Parameter):
            tensors[f"model.{name}"] = own_part(whole_parameter(tensor).to(dtypes[name]), mesh)
        else:
            tensors[f"model.{name}"] = at_least_1d(tensor.detach().to(dtypes[name]))
    names = parameter_names(engine.module)
    steps: dict[str, int] = {}
    link_slots(engine)
    for partition in partitions(engine):
        slots = partition.slots or fresh_slots(engine.optimizer.optimizer, partition.group, partition.flat)
        for parameter in partition.parameters:
            name = names[parameter]
            if STEP in slots or (slots and not partition.slots):
                steps[name] = int(slots[STEP]) if STEP in slots else 0
            for slot in slots:
                if slot != STEP:
                    tensors[f"optimizer.{name}.{slot}"] = own_part(whole_slot(partition, parameter, slot), mesh)
    plain: dict[str, Any] = {"steps": steps}
    if engine.fp16_enabled():
        plain["scaler"] = scaler_state(engine.optimizer.loss_scaler)
    return State(tensors, plain)


def whole_slot(partition: Partition, parameter: nn.Parameter, slot: str) -> Tensor:
    """A slot of one parameter, gathered; zeros where the optimizer has not begun. Collective."""
    from deepspeed.utils import safe_get_full_optimizer_state

    if partition.slots is None:
        return torch.zeros(whole_shape(parameter))
    full: Tensor = safe_get_full_optimizer_state(parameter, slot)
    return full


@torch.no_grad()
def put_back(state: State, engine: Any) -> None:
    """Make `state`, of `take`, what the engine goes on from. Collective; gathers a parameter at a time."""
    zero, device = engine.optimizer, engine.device
    if engine.zero_optimization_stage() == 3:
        zero._partition_all_parameters()  # whole copies that it keeps would be the old ones
    for name, tensor in engine.module.state_dict(keep_vars=True).items():
        given = state.tensors[f"model.{name}"]
        if isinstance(tensor, nn.Parameter):
            set_weights(tensor, gathered(given, device))
        else:
            tensor.copy_(shaped_as(tensor, given))
    names = parameter_names(engine.module)
    for partition in begun_partitions(engine, state.plain["steps"], names):
        assert partition.slots is not None, "begun"
        for slot, tensor in partition.slots.items():
            if slot == STEP:
                # A partition counts once; a parameter that another engine had left out goes along.
                tensor.fill_(max(state.plain["steps"][names[p]] for p in partition.parameters))
                continue
            for parameter in partition.parameters:
                set_slot(parameter, slot, gathered(state.tensors[f"optimizer.{names[parameter]}.{slot}"], device))
    refresh_weights(engine)
    if engine.fp16_enabled() and "scaler" in state.plain:
        put_back_scaler(state.plain["scaler"], zero.loss_scaler)


def begun_partitions(engine: Any, steps: Mapping[str, int], names: Mapping[Tensor, str]) -> Iterator[Partition]:
    """The partitions, given slots where the optimizer has not begun; none where the saved one had not, either."""
    zero = engine.optimizer
    found = partitions(engine)
    begun = any(partition.slots for partition in found)
    if not begun and all(steps.get(names[p]) == 0 for partition in found for p in partition.parameters):
        return
    for partition in found:
        if partition.slots is None:
            slots = fresh_slots(zero.optimizer, partition.group, partition.flat)
            if slots:
                zero.optimizer.state[partition.flat] = slots
    link_slots(engine)
    yield from (partition for partition in partitions(engine) if partition.slots)


def link_slots(engine: Any) -> None:
    """Let `safe_get_*` and `safe_set_*` find the slots of stages 1 and 2.

    The engine does it by itself in its first step, but after the first group, and so for that group alone.
    """
    if engine.zero_optimization_stage() < 3:
        engine.optimizer._hp_optimizer_states_linked = False
        engine.optimizer._lazy_init_hp_params_optimizer_state()


def set_weights(parameter: nn.Parameter, full: Tensor) -> None:
    """The fp32 master; of a frozen parameter, which has none, the weights themselves."""
    from deepspeed.utils import safe_set_full_fp32_param, safe_set_local_fp32_param

    if hasattr(parameter, "ds_id"):
        part = padded_part(parameter, full)
        if parameter.requires_grad:
            safe_set_local_fp32_param(parameter, part)
        else:
            cast(Any, parameter).ds_tensor.copy_(part)
    elif parameter.requires_grad:
        safe_set_full_fp32_param(parameter, full)
    else:
        parameter.copy_(full)


def set_slot(parameter: nn.Parameter, slot: str, full: Tensor) -> None:
    """This rank's part of one slot of the optimizer."""
    from deepspeed.utils import safe_set_full_optimizer_state, safe_set_local_optimizer_state

    if hasattr(parameter, "ds_id"):
        # Its twin for whole values fails on the last rank where the ranks don't divide the size.
        safe_set_local_optimizer_state(parameter, padded_part(parameter, full), slot)
    else:
        safe_set_full_optimizer_state(parameter, full, slot)


def refresh_weights(engine: Any) -> None:
    """The weights that forward uses, from the masters, as after a step. Collective."""
    zero = engine.optimizer
    if engine.zero_optimization_stage() < 3:
        zero.update_lp_params()
        return
    for number in range(len(zero.fp16_groups)):
        zero._reassign_or_swap_out_partitioned_parameters(number)


def scaler_state(scaler: Any) -> dict[str, Any]:
    """As `state.scaler_state`, of DeepSpeed's own; hysteresis: overflows to come before the scale gives in."""
    if not scaler.dynamic:
        return {"scale": scaler.cur_scale, "growth_tracker": 0}
    steps = scaler.cur_iter - scaler.last_overflow_iter - 1  # without an overflow; a multiple of the window grows it
    tracker = (steps - 1) % scaler.scale_window + 1 if steps else 0
    return {"scale": scaler.cur_scale, "growth_tracker": tracker, "hysteresis": scaler.cur_hysteresis}


def put_back_scaler(learnt: Mapping[str, Any], scaler: Any) -> None:
    """learnt: of `scaler_state`, or of torch's scaler, which has no hysteresis."""
    if scaler.dynamic:  # a static scale is the configuration's
        scaler.cur_scale = learnt["scale"]
        scaler.last_overflow_iter = scaler.cur_iter - 1 - learnt["growth_tracker"]
        scaler.cur_hysteresis = learnt.get("hysteresis", scaler.delayed_shift)


def parameter_names(module: nn.Module) -> dict[Tensor, str]:
    """A parameter with two names (tied) has the first, as for other engines."""
    return {parameter: name for name, parameter in module.named_parameters()}


def whole_shape(parameter: nn.Parameter) -> torch.Size:
    """Whatever the stage."""
    return cast(torch.Size, getattr(parameter, "ds_shape", parameter.shape))


def padded_part(parameter: nn.Parameter, full: Tensor) -> Tensor:
    """Stage 3's part of this rank: equal parts of the flattened parameter, the last one padded."""
    zero3 = cast(Any, parameter)
    size, number = zero3.partition_numel(), torch.distributed.get_rank(zero3.ds_process_group)
    flat = F.pad(full.flatten(), (0, size * torch.distributed.get_world_size(zero3.ds_process_group) - full.numel()))
    return flat.narrow(0, size * number, size)


def own_part(full: Tensor, mesh: DeviceMesh) -> DTensor:
    """A tensor that every rank has whole, as one of which each keeps a copy of its own part on the CPU."""
    split = distribute_tensor(at_least_1d(full.detach()), mesh, [Shard(0)], src_data_rank=None)
    local = split.to_local().to("cpu", copy=True)
    return DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=split.shape, stride=split.stride())


def gathered(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor of `own_part`, whole on `device`. Collective."""
    return cast(DTensor, tensor).full_tensor().to(device)
