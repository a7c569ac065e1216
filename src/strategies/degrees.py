"""The degrees of tensor and pipeline parallelism: what they must divide, and this rank's place on their axes."""

import math
from typing import TYPE_CHECKING, cast

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from src.errors import Refused
from src.strategies.base import Axis, Setting
from src.strategies.plan_problems import plan_problems

if TYPE_CHECKING:
    from src.parallel.plan import Splittable


def data_ranks(world_size: int, **degrees: int) -> int:
    """Ranks left for data parallelism. degrees: of the other axes, by the name of the strategy's argument.

    Raises Refused where a degree is less than one, or their product does not divide the world.
    """
    found = [
        f"strategy.{name}={degree} is no degree; choose 1 or more." for name, degree in degrees.items() if degree < 1
    ]
    if found:
        raise Refused(*found)
    product = math.prod(degrees.values())
    if world_size % product:
        named = [f"strategy.{name}={degree}" for name, degree in degrees.items() if degree > 1]
        of = f"{' x '.join(named)} = {product}" if len(named) > 1 else named[0]
        raise Refused(
            f"{world_size} rank(s) can't be split by {of}: the product must divide them."
            f" Use launch.nproc={product} or a multiple of it, or other degrees."
        )
    return world_size // product


def axis(mesh: DeviceMesh, name: str) -> Axis:
    """This rank's place on a named axis; a lone one where the mesh has no such axis."""
    if name not in (mesh.mesh_dim_names or ()):
        return Axis()
    return Axis(mesh.get_local_rank(name), mesh[name].size(), mesh.get_group(name))


def data_axis(mesh: DeviceMesh) -> Axis:
    """This rank's place among those that read different samples, over "replicate" and "shard"."""
    replicate, shard = axis(mesh, "replicate"), axis(mesh, "shard")
    if replicate.size == 1 or shard.size == 1:
        return shard if replicate.size == 1 else replicate
    both = mesh["replicate", "shard"]._flatten("data")
    return Axis(both.get_local_rank(), both.size(), both.get_group())


def lone_sequence_problems(degree: int, setting: Setting) -> list[str]:
    """Sequence parallelism without ranks to split a sequence over."""
    if degree != 1 or not setting.arguments.get("sequence_parallel", False):
        return []
    return [
        "strategy.sequence_parallel=true splits sequences over strategy.tp ranks, and strategy.tp=1."
        " Use strategy.tp=2 or more, or strategy.sequence_parallel=false."
    ]


def tensor_problems(model: nn.Module, degree: int, sequence_parallel: bool, setting: Setting) -> list[str]:
    """Why `model`, which carries a tensor plan, can't be split over `degree` tensor-parallel ranks."""
    found = []
    for key, count in cast("Splittable", model).tensor_counts().items():
        if count % degree:
            choices = ", ".join(str(n) for n in range(1, count + 1) if count % n == 0)
            found.append(f"{key}={count} is not divisible by strategy.tp={degree}. Choose tp from {choices}.")
    vocabulary = getattr(model, "vocab_size", None)
    if vocabulary is not None and (degree - 1) * -(-vocabulary // degree) >= vocabulary:
        # Parts are ceil(vocabulary / degree) rows; torch's embedding and loss can't take a part without any.
        found.append(
            f"model.vocab_size={vocabulary} leaves some of strategy.tp={degree} ranks without a row."
            " Choose a smaller tp."
        )
    if sequence_parallel:
        found += _sequence_problems(model, degree, setting)
    return found + plan_problems(model, sequence_parallel)


def _sequence_problems(model: nn.Module, degree: int, setting: Setting) -> list[str]:
    if getattr(model, "inputs", None) != "tokens":
        return [
            f"strategy.sequence_parallel=true splits sequences, and model {type(model).__name__} has none."
            " Use strategy.sequence_parallel=false."
        ]
    length = setting.data.get("sequence_length")
    if length is not None and length % degree:
        return [
            f"data.sequence_length={length} is not divisible by strategy.tp={degree}, which"
            " strategy.sequence_parallel=true needs. Choose another length, or strategy.sequence_parallel=false."
        ]
    return []
