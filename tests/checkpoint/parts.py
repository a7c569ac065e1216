"""Known tensors, and this rank's parts of them under any number of ranks; functions that ranks run."""

import os
import signal
import threading
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from src.checkpoint import shelf, writer
from src.checkpoint.failures import CheckpointFailed, CheckpointMismatch
from src.checkpoint.loading import load
from src.checkpoint.store import Store
from src.world import World

RUN = "tests-1"
STATE = {"samples": 640, "epoch": {"number": 1, "order": [3, 1, 2]}, "scale": 65536.0, "best": None}


def counted(*shape: int, dtype: torch.dtype = torch.float32, first: int = 0) -> Tensor:
    """No two elements are equal, so that a part in the wrong place shows."""
    return torch.arange(first, first + torch.Size(shape).numel()).reshape(shape).to(dtype)


def whole() -> dict[str, Tensor]:
    return {
        "rows.weight": counted(7, 3),  # on 4 ranks 2, 2, 2 and 1 row
        "few.weight": counted(2, 3, first=100),  # on 4 ranks 1, 1, 0 and 0 rows
        "grid.weight": counted(5, 6, first=200),  # cut in both dims
        "half.weight": counted(9, dtype=torch.bfloat16),
        "copied.weight": counted(3, 2, first=300),  # a whole copy on every rank, on a mesh
        "plain.weight": counted(4, first=400),  # the same, without a mesh
        "plain.step": torch.tensor(12.0),
        "plain.none": torch.zeros(0, 4),
        "flags": torch.tensor([True, False, True]),
        **{f"stage.{n}": counted(n + 1, 2, dtype=torch.int64, first=500) for n in range(4)},  # one rank's alone
    }


def parts(world: World, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """This rank's of `tensors`, cut by their names. Each is memory of its own."""
    line = init_device_mesh("cpu", (world.world_size,))
    square = init_device_mesh("cpu", (2, world.world_size // 2)) if world.world_size > 1 else None
    return {name: part for name, tensor in tensors.items() if (part := _part(name, tensor, line, square)) is not None}


def _part(name: str, tensor: Tensor, line: DeviceMesh, square: DeviceMesh | None) -> Tensor | None:
    # src_data_rank=None: every rank cuts its own copy, and nothing is sent.
    if name.startswith("stage."):
        return tensor.clone() if int(name[-1]) % line.size() == line.get_rank() else None
    if name.startswith("copied."):
        return distribute_tensor(tensor.clone(), line, [Replicate()], src_data_rank=None)
    if name.startswith("grid.") and square is not None:
        return distribute_tensor(tensor.clone(), square, [Shard(0), Shard(1)], src_data_rank=None)
    if name.startswith(("plain.", "flags")):
        return tensor.clone()
    return distribute_tensor(tensor.clone(), line, [Shard(0)], src_data_rank=None)


def own(tensor: Tensor) -> Tensor:
    """What lies on this rank."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def save(
    world: World,
    folder: Path,
    steps: list[int],
    keep: int | None = None,
    best: int | None = None,
    run: str = RUN,
    only: list[str] | None = None,
) -> None:
    store = Store(folder, run, keep)
    tensors = parts(world, {name: tensor for name, tensor in whole().items() if only is None or name in only})
    for step in steps:
        store.save(step, tensors, STATE, best=step == best)
    store.close()


def differences(world: World, checkpoint: Path) -> list[str]:
    """The names whose parts on this rank differ, after loading, from those cut from the known tensors."""
    expected = parts(world, whole())
    tensors = {name: torch.zeros_like(tensor) for name, tensor in expected.items()}
    manifest = load(checkpoint, tensors)
    assert manifest.state == STATE
    return [name for name, tensor in tensors.items() if not torch.equal(own(tensor), own(expected[name]))]


def mismatch(world: World, checkpoint: Path, changes: dict[str, Tensor | None], leave: tuple[str, ...]) -> list[str]:
    """The problems of loading the known tensors with `changes` (None: left out)."""
    tensors = whole() | changes
    tensors = parts(world, {name: tensor for name, tensor in tensors.items() if tensor is not None})
    before = {name: own(tensor).clone() for name, tensor in tensors.items()}
    try:
        load(checkpoint, tensors, leave=leave)
    except CheckpointMismatch as error:
        assert all(torch.equal(own(tensor), before[name]) for name, tensor in tensors.items())
        return error.problems
    return []


def save_in_other_dtypes(world: World, folder: Path) -> None:
    Store(folder, RUN).save(1, {"a": counted(4), "b": counted(4, dtype=torch.float64)}, {})
    tensors = {"a": torch.zeros(4, dtype=torch.bfloat16), "b": torch.zeros(4, dtype=torch.int32)}
    load(folder / "step_00000001", tensors)
    assert tensors["a"].tolist() == tensors["b"].tolist() == [0, 1, 2, 3]


def save_of_wrapped_layers(world: World, folder: Path, weight: Tensor, loading: bool) -> list[Tensor]:
    """A layer cut by rows twice over: by tensor parallelism first, by sharding over data ranks then (2 x 2)."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    nn.init.zeros_(layer.weight)
    if not loading:
        layer.weight.data.copy_(weight)
    parallelize_module(layer, mesh["tensor"], ColwiseParallel())
    fully_shard(layer, mesh=mesh["data"])
    tensors = dict(layer.named_parameters())
    if loading:
        load(folder / "step_00000001", tensors)
        return [tensors["weight"].full_tensor().detach()]
    Store(folder, RUN).save(1, tensors, {})
    return []


def failure(world: World, folder: Path, step: int, num_elements: int) -> str:
    """What a save of so many float32 a rank says if it fails, else nothing."""
    store = Store(folder, RUN)
    try:
        store.save(step, {f"rank{world.world_rank}": torch.ones(num_elements)}, {})
    except CheckpointFailed as error:
        return str(error)
    finally:
        store.close()
    return ""


def die_while_saving(world: World, folder: Path, moment: str) -> None:
    """Save step 1, then be killed in the middle of saving step 2."""
    store = Store(folder, RUN)
    tensors = parts(world, whole())
    store.save(1, tensors, STATE)
    synced = 0

    def half_a_file(tensors: Any, path: Path, metadata: Any) -> None:
        path.write_bytes(b"\0" * 100)
        os.kill(os.getpid(), signal.SIGKILL)

    def sync_folder(path: Path) -> None:
        nonlocal synced
        synced += 1
        # 1: all is written, nothing renamed. 2: renamed, `last` not yet.
        if synced == {"publishing": 1, "pointing": 2}[moment]:
            os.kill(os.getpid(), signal.SIGKILL)

    if moment == "writing" and world.world_rank == 1:
        writer.save_file = half_a_file  # type: ignore[assignment]
    if moment != "writing":
        shelf._sync_folder = sync_folder
    store.save(2, tensors, STATE)


class Gate:
    """Holds back this rank's writing until `open` is set."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.real = writer.save_file

    def __enter__(self) -> "Gate":
        def held_back(*args: Any, **kwargs: Any) -> None:
            assert self.open.wait(60)
            self.real(*args, **kwargs)

        writer.save_file = held_back
        return self

    def __exit__(self, *error: Any) -> None:
        self.open.set()
        writer.save_file = self.real
