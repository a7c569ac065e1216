"""Device meshes with named axes. Meshes have axes, tensors have dims."""

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from src.sharding import Sharding
from src.world import World


def data_mesh(world: World, sharding: Sharding) -> DeviceMesh:
    """The data-parallel mesh: ("shard",), or ("replicate", "shard") for hybrid sharding.

    Hybrid: ranks that share a copy are neighbours, so that with shard_size=null they share a machine
    and the gathers stay on its fast links.
    """
    if sharding.level != "hybrid":
        return init_device_mesh(world.device.type, (world.world_size,), mesh_dim_names=("shard",))
    shard = sharding.shard_size or world.local_size
    return init_device_mesh(
        world.device.type, (world.world_size // shard, shard), mesh_dim_names=("replicate", "shard")
    )
