"""Device meshes with named axes. Meshes have axes, tensors have dims."""

import math

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from src.sharding import Sharding
from src.world import World


def make_mesh(world: World, sharding: Sharding, tensor: int | None = None, pipeline: int | None = None) -> DeviceMesh:
    """All ranks of the world on axes "pipeline", "replicate", "shard", "tensor", in this order.

    tensor, pipeline: degrees whose product divides the world; None: no such axis. What is left is data parallel, on
    "replicate" where nothing is sharded, on "shard" where everything is, on both for hybrid sharding. Neighbours share
    the last axis, so the traffic of every layer (tensor) stays on the fast links inside a machine, then that of every
    unit (shard); stages exchange least.
    """
    data = world.world_size // ((tensor or 1) * (pipeline or 1))
    axes = {} if pipeline is None else {"pipeline": pipeline}
    if sharding.level == "hybrid":
        # With shard_size=null, the data ranks of one machine share a copy.
        shard = sharding.shard_size or math.gcd(data, max(1, world.local_size // (tensor or 1)))
        axes |= {"replicate": data // shard, "shard": shard}
    else:
        axes["replicate" if sharding.level == "none" else "shard"] = data
    if tensor is not None:
        axes["tensor"] = tensor
    return init_device_mesh(world.device.type, tuple(axes.values()), mesh_dim_names=tuple(axes))


def data_part(mesh: DeviceMesh) -> DeviceMesh:
    """Of a mesh of `make_mesh`, the data-parallel axes: ("replicate",), ("shard",) or ("replicate", "shard")."""
    names = tuple(name for name in mesh.mesh_dim_names or () if name in ("replicate", "shard"))
    return mesh if names == mesh.mesh_dim_names else mesh[names]
