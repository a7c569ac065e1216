"""One save as torch.distributed.checkpoint drives it: each rank its own files, then one rank publishes them."""

import json
import os
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

# The reader of the same library looks for the place of a part in its whole under these keys.
from torch.distributed.checkpoint._hf_utils import CUSTOM_METADATA_KEY, SAVED_OFFSETS_KEY
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from src.checkpoint.manifest import SUFFIX, FileInfo, Manifest, TensorInfo, file_digest, plain
from src.checkpoint.planner import HostBuffers, resolve
from src.checkpoint.shelf import Shelf
from src.checkpoint.tied import unshared
from src.errors import in_words

#: What one file holds at most, unless a single part is larger. Written from host memory as it lies there, so it bounds
#: only what is copied first: from a GPU, or to lay out anew what is not contiguous.
MAX_FILE_BYTES = 256 * 2**20


class RankError(Exception):
    """One rank's failure in words. Other ranks get it pickled, which not every exception survives."""


@contextmanager
def told_in_words() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise RankError(in_words(error)) from error


@dataclass(frozen=True)
class WrittenFile:
    name: str
    info: FileInfo


class Writer(HuggingFaceStorageWriter):  # type: ignore[misc]
    """Writes one checkpoint. Differs from its base class in four things.

    Files are bounded and go from the tensors' own memory to the disk (the base class makes a whole file's bytes first);
    their digests are taken; only one rank touches folders; `finish` publishes.

    state: plain values (`manifest.plain`); the coordinator's are kept. best: point `best` to it, too.
    buffers: copy to host memory first, then set `copied`; from then on the caller's tensors may change.
    """

    def __init__(
        self, shelf: Shelf, step: int, state: dict[str, Any], best: bool, buffers: HostBuffers | None = None
    ) -> None:
        super().__init__(str(shelf.saving(step)), save_distributed=True)
        self.shelf, self.step, self.state, self.best, self.buffers = shelf, step, state, best, buffers
        self.copied: Future[None] = Future()
        self.is_coordinator = False

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        super().set_up_storage_writer(is_coordinator, *args, **kwargs)
        self.is_coordinator = is_coordinator

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Refuse what can't be written; on the coordinator, snapshot the state and make the folder."""
        with told_in_words():
            if strange := [item.index.fqn for item in plan.items if item.type == WriteItemType.BYTE_IO]:
                raise TypeError(f"{strange[0]} is no tensor; give plain values as state")
            if self.is_coordinator:
                self.state = plain(self.state)
                self.shelf.begin(self.step)
            return plan

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:  # type: ignore[override]
        """Write this rank's part; plan: what is left after copies that other ranks write were dropped."""
        with told_in_words():
            try:
                if self.buffers is not None:
                    self.buffers.copy(plan.items, planner)
            finally:  # a failure, too, is told to all ranks at the end, at the same call
                self.copied.set_result(None)
            results: list[WriteResult] = []
            for number, items in enumerate(_bounded(plan.items), 1):
                name = f"shard-{plan.storage_data['shard_index']:05d}-{number:05d}{SUFFIX}"
                results += self._write_file(name, items, planner)
        written: torch.futures.Future[list[WriteResult]] = torch.futures.Future()
        written.set_result(results)
        return written  # type: ignore[return-value]

    def _write_file(self, name: str, items: list[WriteItem], planner: SavePlanner) -> list[WriteResult]:
        tensors: dict[str, Tensor] = {}
        places: dict[str, Any] = {}
        spans: dict[int, list[range]] = {}
        for item in items:
            tensor = (resolve(item, planner) if self.buffers is None else self.buffers[item]).cpu().contiguous()
            tensors[item.index.fqn] = unshared(tensor, spans)
            places[item.index.fqn] = {SAVED_OFFSETS_KEY: list(_chunk(item).offsets)}
        path = Path(self.path) / name
        path.touch()
        mode = path.stat().st_mode
        save_file(tensors, path, metadata={CUSTOM_METADATA_KEY: json.dumps(places), "format": "pt"})
        path.chmod(mode)  # safetensors' files are for the owner alone; the user's umask may allow more
        with path.open("rb") as stream:
            os.fsync(stream.fileno())
        written = WrittenFile(name, FileInfo(path.stat().st_size, file_digest(path)))
        return [WriteResult(item.index, _num_bytes(item), written) for item in items]

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """On the coordinator, when every rank has written its part: publish."""
        with told_in_words():
            files = {result.storage_data.name: result.storage_data.info for part in results for result in part}
            for name, info in files.items():
                path = Path(self.path) / name
                if not path.is_file() or path.stat().st_size != info.bytes:
                    raise FileNotFoundError(f"{path} is not to be seen from rank 0; all hosts must share this folder")
            tensors = {}
            for tensor_name, whole in sorted(metadata.state_dict_metadata.items()):
                assert isinstance(whole, TensorStorageMetadata)
                dtype = str(whole.properties.dtype).removeprefix("torch.")
                tensors[tensor_name] = TensorInfo(tuple(whole.size), dtype)
            self.shelf.publish(Manifest(self.shelf.run, self.step, tensors, files, self.state), self.best)


def _bounded(items: list[WriteItem]) -> Iterator[list[WriteItem]]:
    """`items` in groups of at most MAX_FILE_BYTES, or of one item; a name stands once in a group."""
    group: list[WriteItem] = []
    names: set[str] = set()
    num_bytes = 0
    for item in items:
        if group and (num_bytes + _num_bytes(item) > MAX_FILE_BYTES or item.index.fqn in names):
            yield group
            group, names, num_bytes = [], set(), 0
        group.append(item)
        names.add(item.index.fqn)
        num_bytes += _num_bytes(item)
    if group:
        yield group


def _chunk(item: WriteItem) -> Any:
    assert item.tensor_data is not None
    return item.tensor_data.chunk


def _num_bytes(item: WriteItem) -> int:
    """Of the part; the item's own `tensor_storage_size` is the whole tensor's."""
    assert item.tensor_data is not None
    return int(_chunk(item).sizes.numel() * item.tensor_data.properties.dtype.itemsize)
