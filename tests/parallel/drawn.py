"""Layers beside the nn.Linear of the same draw, and whole gradients to compare."""

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from src.parallel.linear import ColumnParallelLinear, RowParallelLinear

LAYERS = {"column": ColumnParallelLinear, "row": RowParallelLinear}


def tensor_mesh(world):
    return init_device_mesh("cpu", (world.world_size,), mesh_dim_names=("tensor",))


def own(tensor, mesh):
    return tensor.chunk(mesh.size(), dim=-1)[mesh.get_local_rank()]


def drawn(kind, in_features, out_features, mesh, bias=True, whole=False, seed=0):
    """(nn.Linear, the split layer) of one draw."""
    torch.manual_seed(seed)
    plain = nn.Linear(in_features, out_features, bias)
    torch.manual_seed(seed)
    option = {"gather_output": whole} if kind == "column" else {"input_is_split": not whole}
    return plain, LAYERS[kind](in_features, out_features, bias, mesh=mesh, **option)


def whole_gradients(model):
    return {name: p.grad.full_tensor() for name, p in model.named_parameters()}


def gradients(model):
    return {name: p.grad for name, p in model.named_parameters()}
