"""Weights that one rank reads and the others receive, for models that come without any.

A model with a `read_weights()` is built on the meta device. Rank 0 reads it, once, while the others wait; every other
rank is given one tensor at a time, and keeps what the strategy leaves it of that.
"""

import time
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from src.world import World

LOOK_SECONDS = 0.1  # between two looks whether rank 0 has read


class Unread(Protocol):
    """A model on the meta device that knows where its values come from."""

    def read_weights(self) -> dict[str, Tensor]:
        """Every parameter and buffer on the CPU, by name; of one with several names (tied) the first. Rank 0 asks."""


def is_unread(model: nn.Module) -> bool:
    """Whether the model has no values yet, but knows how to read them."""
    return hasattr(model, "read_weights") and any(p.is_meta for p in model.parameters())


def filled(model: nn.Module, world: World) -> nn.Module:
    """`model`, whole on every rank's device; as it is where it has values already. In place. Collective."""
    if is_unread(model):
        Values(model, world).fill_all(model)
    return model


class Values:
    """What the tensors of a model are to hold. Each is given out once and then forgotten. Collective.

    model: unread; whole, or sharded already (DTensors on meta). shard_device: where shards stay; None: where they are
    computed with. Ranks must fill modules in the same order. Of an imagined world nobody reads: the values are any.
    """

    def __init__(self, model: nn.Module, world: World, shard_device: torch.device | None = None) -> None:
        self.world, self.shard_device = world, shard_device
        self.names = {tensor: name for name, tensor in [*model.named_buffers(), *model.named_parameters()]}
        self.filled: dict[Tensor, Tensor] = {}
        self.reads = world.is_main and not world.is_imagined
        self.read = cast(Unread, model).read_weights() if self.reads else {}
        if world.has_peers:
            wait_for_first(world)

    def fill_all(self, model: nn.Module) -> None:
        """Raises ValueError where what was read is not what the model has."""
        for module in model.modules():
            self.fill(module)
        if left := self.read.keys() - {name for tensor, name in self.names.items() if not tensor.is_meta}:
            raise ValueError(
                f"read_weights() gives {len(left)} tensor(s) that the model has no place for:"
                f" {', '.join(sorted(left)[:3])}. Make it give parameters and buffers, tied ones under their first."
            )

    @torch.no_grad()
    def fill(self, module: nn.Module) -> None:
        """Put tensors with values in the place of the module's own on meta. Tied ones stay tied."""
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is not None and tensor.is_meta:
                    if tensor not in self.filled:
                        self.filled[tensor] = self.made(tensor)
                    tensors[name] = self.filled[tensor]  # type: ignore[assignment]

    def made(self, tensor: Tensor) -> Tensor:
        """The like of a tensor on meta, with its values."""
        values = self.received(tensor)
        if hasattr(tensor, "placements"):
            values = shard_of(values, tensor, self.shard_device)
        return nn.Parameter(values, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else values

    def received(self, tensor: Tensor) -> Tensor:
        """The whole values, on this rank's device, from rank 0."""
        whole = self.own(tensor)
        if self.world.has_peers:
            dist.broadcast(whole, src=0)
        return whole

    def own(self, tensor: Tensor) -> Tensor:
        """The whole values on rank 0, and room for them on the others."""
        if not self.reads:
            return torch.empty(tensor.shape, dtype=tensor.dtype, device=self.world.device)
        name = self.names[tensor]
        if name not in self.read:
            raise ValueError(
                f"read_weights() gives no {name}, which the model has. Make it give each, under its first name."
            )
        return self.read.pop(name).detach().to(self.world.device, tensor.dtype).contiguous()


def wait_for_first(world: World) -> None:
    """Come back when rank 0 has come here. Collective, but of no group's time-out: reading may take longer than a step.

    In the store that the ranks met in, and not by a collective, which would give up after launch.timeout_seconds. Where
    rank 0 fails meanwhile, the launcher ends those that wait.
    """
    store = dist.distributed_c10d._get_default_store()
    count = store.add(f"weights/{world.world_rank}", 1)  # counted by each rank, so that a second model waits anew
    key = f"weights/read/{count}"
    if world.is_main:
        store.set(key, "")
    while not store.check([key]):
        time.sleep(LOOK_SECONDS)


def shard_of(whole: Tensor, like: Any, device: torch.device | None) -> Tensor:
    """This rank's part of what every rank has, split as the DTensor `like`; a copy, so that the rest can go."""
    from torch.distributed.tensor import DTensor, distribute_tensor  # 1 s that only sharded models pay

    split = distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=None)
    # Not from_local, which moves a shard of the host to the mesh's device.
    made = cast(DTensor, torch.empty_like(like, device=device or whole.device))
    made.to_local().copy_(split.to_local())
    return made
