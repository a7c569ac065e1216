"""Load a checkpoint into live tensors, split in whatever way they are, on whatever number of ranks."""

import math
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.distributed.checkpoint.state_dict_loader import load as load_parts
from torch.futures import Future

from src.checkpoint.failures import CheckpointDamaged, CheckpointMismatch
from src.checkpoint.manifest import Manifest, TensorInfo, read_manifest
from src.checkpoint.writer import told_in_words
from src.errors import in_words


def load(
    checkpoint: Path,
    tensors: Mapping[str, Tensor],
    *,
    leave: tuple[str, ...] = (),
    group: dist.ProcessGroup | None = None,
) -> Manifest:
    """Fill `tensors` in place from a checkpoint, and return its manifest, whose `state` holds the plain values.

    tensors: by the names of the checkpoint. DTensors and plain tensors; a rank gives the names that it holds, and reads
    only its own parts. Other dtypes than the saved ones are converted. All names and shapes must fit first.
    leave: prefixes of names that may stay unread: ("optimizer.",) reads a model alone.
    Collective over `group` (the default one; without any, one process is all there is). Contents are not compared with
    their digests: `whole.check` does that, once for all ranks.
    Raises CheckpointMismatch, CheckpointDamaged; the same on every rank.
    """
    reader, told = None, ""
    try:
        reader = ListedReader(checkpoint, read_manifest(checkpoint))
        reader.look()
    except CheckpointDamaged as error:
        told = str(error)
    asked = _everyones({"shapes": {name: tuple(tensor.shape) for name, tensor in tensors.items()}, "told": told}, group)
    for answer in asked:
        if answer["told"]:
            raise CheckpointDamaged(answer["told"])
    assert reader is not None
    problems = mismatches(reader.manifest.tensors, [answer["shapes"] for answer in asked], leave)
    if problems:
        raise CheckpointMismatch(str(checkpoint), problems)
    with torch.no_grad(), _without_a_word_on_missing_groups():
        try:
            # Flattening would cut names at their dots and, for names that are left out, look for those of torch 2.3.
            planner = DefaultLoadPlanner(flatten_state_dict=False)
            load_parts(dict(tensors), storage_reader=reader, planner=planner, process_group=group)
        except CheckpointException as error:
            raise CheckpointDamaged(f"{checkpoint} can't be loaded: {reasons(error)}.") from error
    return reader.manifest


def mismatches(
    saved: Mapping[str, TensorInfo], asked: list[dict[str, tuple[int, ...]]], leave: tuple[str, ...]
) -> list[str]:
    """How what the ranks ask for differs from what is there, a line a name, sorted by name.

    asked: shapes by name, one mapping a rank.
    """
    shapes: dict[str, set[tuple[int, ...]]] = {}
    for ranks_own in asked:
        for name, shape in ranks_own.items():
            shapes.setdefault(name, set()).add(shape)
    problems = []
    for name in sorted(saved.keys() | shapes.keys()):
        if name not in saved:
            problems.append(f"{name}: missing from the checkpoint")
        elif name not in shapes:
            if not name.startswith(leave):
                problems.append(f"{name}: in the checkpoint, but nothing takes it")
        elif others := shapes[name] - {saved[name].shape}:
            here = " and ".join(str(list(shape)) for shape in sorted(others))
            problems.append(f"{name}: {list(saved[name].shape)} in the checkpoint, {here} here")
    return problems


class ListedFiles(FileSystem):
    """The files that a manifest lists, and no others that somebody put beside them."""

    def __init__(self, names: list[str]) -> None:
        self.names = names

    def ls(self, path: Any) -> list[str]:
        return [str(Path(path) / name) for name in self.names]


class ListedReader(HuggingFaceStorageReader):  # type: ignore[misc]
    """Reads the safetensors files that a manifest lists, and only if they hold all of each of its tensors.

    The base class takes the tensors that it finds for all there are: of a missing file it would leave holes.
    """

    def __init__(self, checkpoint: Path, manifest: Manifest) -> None:
        super().__init__(str(checkpoint))
        self.manifest = manifest
        self.fs = ListedFiles(list(manifest.files))
        self.metadata: Metadata | None = None

    def look(self) -> None:
        """Read the headers of all files. Raises CheckpointDamaged where they don't add up to the manifest."""
        try:
            metadata = super().read_metadata()
        except Exception as error:  # safetensors', the system's, or whatever a header that lies provokes
            raise CheckpointDamaged(f"{self.path} can't be read: {in_words(error)}.") from error
        for name, info in self.manifest.tensors.items():
            found: Any = metadata.state_dict_metadata.get(name)
            parts = sum(math.prod(chunk.sizes) for chunk in found.chunks) if found else 0
            if not found or tuple(found.size) != info.shape or parts != math.prod(info.shape):
                raise CheckpointDamaged(f"{self.path} does not hold all of {name}: its files have changed.")
        self.metadata = metadata

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        assert self.metadata is not None
        return self.metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        with told_in_words():
            return super().read_data(plan, planner)


def reasons(error: CheckpointException) -> str:
    """Which ranks failed, and of what: the first few in a line."""
    told = [f"rank {world_rank}: {failure[0]}" for world_rank, failure in sorted(error.failures.items())]
    return "; ".join(told[:3]) + (f"; and {len(told) - 3} more ranks" if len(told) > 3 else "")


def _everyones(value: Any, group: dist.ProcessGroup | None) -> list[Any]:
    """Each rank's value, in order of ranks."""
    if not dist.is_initialized():
        return [value]
    values = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


@contextmanager
def _without_a_word_on_missing_groups() -> Iterator[None]:
    """Without a process group torch warns that it assumes one process. So do we."""
    with warnings.catch_warnings():
        if not dist.is_initialized():
            warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        yield
