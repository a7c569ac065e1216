"""The global norm of gradients that are split over the axes of a mesh."""

from collections import defaultdict
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement


def total_norm(gradients: Sequence[Tensor]) -> Tensor:
    """The L2 norm of all of them together, fp32, scalar, plain; the same on every rank. Collective.

    gradients: DTensors on one mesh, split or replicated but no partial sums, and plain ones, which count as they are.
    Each rank squares its own parts; of every axis the parts are added up in one all-reduce, what is replicated there
    counts once. (`get_total_norm` reduces over several axes at once, and says in a warning that this is slow.)
    """
    groups: dict[tuple[DeviceMesh | None, tuple[Placement, ...]], list[Tensor]] = defaultdict(list)
    for gradient in gradients:
        if isinstance(gradient, DTensor):
            assert not any(isinstance(place, Partial) for place in gradient.placements), gradient.placements
            groups[gradient.device_mesh, tuple(gradient.placements)].append(gradient.to_local())
        else:
            groups[None, ()].append(gradient)
    if not groups:
        return torch.zeros(())
    squares = [_square(parts) for parts in groups.values()]
    for mesh in dict.fromkeys(mesh for mesh, _ in groups if mesh is not None):
        for axis in range(mesh.ndim):
            split = [
                number
                for number, (at, places) in enumerate(groups)
                if at == mesh and mesh.size(axis) > 1 and not places[axis].is_replicate()
            ]
            if split:
                summed = torch.stack([squares[number] for number in split])
                dist.all_reduce(summed, group=mesh.get_group(axis))
                for number, square in zip(split, summed, strict=True):
                    squares[number] = square
    return torch.stack(squares).sum().sqrt()


def _square(parts: list[Tensor]) -> Tensor:
    """The sum of all squares. The norm of norms, as torch has it: one pass, and no copy of the gradients."""
    norm: Tensor = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(parts)))
    return norm.float().square()
