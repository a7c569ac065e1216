"""Which rank writes which part of which tensor, and copies of the parts so that the tensors may change meanwhile."""

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem


class Planner(DefaultSavePlanner):
    """Each part is written once, by the rank that has least to write of those that hold it.

    Refuses plain tensors of one name that differ in shape or dtype from rank to rank: torch would write one of them.
    """

    def __init__(self) -> None:
        # Names stay as they are: flattening would have them cut at their dots.
        super().__init__(flatten_state_dict=False)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        seen: dict[str, tuple[int, str]] = {}
        for world_rank, plan in enumerate(all_plans):
            for item in plan.items:
                assert item.tensor_data is not None
                size, properties = item.tensor_data.size, item.tensor_data.properties
                words = f"{item.type.name.lower()} of {list(size)} {properties.dtype}"
                first_rank, first = seen.setdefault(item.index.fqn, (world_rank, words))
                if words != first:
                    raise ValueError(
                        f"{item.index.fqn} is a {first} on rank {first_rank} and a {words} on rank {world_rank}; "
                        "a plain tensor must be the same on all ranks that give it"
                    )
        return super().create_global_plan(all_plans)


class HostBuffers:
    """Copies, in host memory, of the parts that this rank writes. The next save reuses them: fresh memory is slow."""

    def __init__(self) -> None:
        self.buffers: dict[MetadataIndex, Tensor] = {}

    def __getitem__(self, item: WriteItem) -> Tensor:
        return self.buffers[item.index]

    def copy(self, items: list[WriteItem], planner: SavePlanner) -> None:
        """Fill the buffers with the values of now; those of other names or shapes are given up first."""
        sources = {item.index: resolve(item, planner) for item in items}
        self.buffers = {
            index: buffer
            for index, source in sources.items()
            if (buffer := self.buffers.get(index)) is not None
            and (buffer.shape, buffer.dtype) == (source.shape, source.dtype)
        }
        for index, source in sources.items():
            if index not in self.buffers:
                # Only pinned memory takes a copy from the GPU at the bus's full speed, and in the background.
                self.buffers[index] = torch.empty(source.shape, dtype=source.dtype, pin_memory=source.is_cuda)
            self.buffers[index].copy_(source, non_blocking=source.is_cuda)
        for device in {source.device for source in sources.values() if source.is_cuda}:
            torch.cuda.current_stream(device).synchronize()


def resolve(item: WriteItem, planner: SavePlanner) -> Tensor:
    """This rank's part of a tensor, where it lives."""
    tensor = planner.resolve_data(item)
    assert isinstance(tensor, Tensor)
    return tensor.detach()
