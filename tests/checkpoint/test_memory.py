"""A rank needs no more memory to save than its own share, so a model that fits on no single rank can be saved."""

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from src.checkpoint.loading import load
from src.checkpoint.store import Store
from src.checkpoint.whole import step_name
from src.world import World
from tests.workers import Pool

NUM_TENSORS, SHAPE = 4, (4096, 2560)
WHOLE_BYTES = NUM_TENSORS * 4096 * 2560 * 4  # 160 MiB, a quarter of it on each of 4 ranks


def memory_bytes(name: str) -> int:
    """VmRSS: what the process has in memory; VmHWM: the most it ever had."""
    [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{name}:")]
    return int(line.split()[1]) * 1024


def growth_bytes(function: Callable[[], Any]) -> int:
    """How far a call's peak stands above what the process had before it.

    The kernel forgets the peak of the past when 5 is written to clear_refs (proc(5)).
    """
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    before = memory_bytes("VmRSS")
    function()
    return memory_bytes("VmHWM") - before


def growths(world: World, folder: Path) -> dict[str, int]:
    mesh = init_device_mesh("cpu", (world.world_size,))
    rows = SHAPE[0] // world.world_size
    tensors: dict[str, torch.Tensor] = {
        f"weight.{n}": DTensor.from_local(torch.full((rows, SHAPE[1]), float(n)), mesh, [Shard(0)])
        for n in range(NUM_TENSORS)
    }
    store = Store(folder, "memory")
    store.save(1, {"small": torch.zeros(1)}, {})  # imports and first collectives
    load(folder / step_name(1), {"small": torch.zeros(1)})

    def save_meanwhile() -> None:
        store.save(3, tensors, {}, asynchronous=True)
        store.wait()

    found = {
        "at once": growth_bytes(lambda: store.save(2, tensors, {})),
        "meanwhile": growth_bytes(save_meanwhile),
        "loading": growth_bytes(lambda: load(folder / step_name(3), tensors)),
        "gathering": growth_bytes(lambda: [tensor.full_tensor() for tensor in tensors.values()]),  # type: ignore[attr-defined]
    }
    store.close()
    return found


def test_saving_takes_less_than_half_of_the_model_on_each_rank(pool: Pool, tmp_path: Path) -> None:
    if not Path("/proc/self/clear_refs").exists():
        pytest.skip("only Linux tells the peak of a single call")
    for found in pool.run(4, growths, tmp_path):
        assert found["at once"] < WHOLE_BYTES / 10, found  # straight from the weights' own memory
        assert found["meanwhile"] < WHOLE_BYTES / 2, found  # a copy of the rank's own quarter
        assert found["loading"] < WHOLE_BYTES / 2, found
        assert found["gathering"] > WHOLE_BYTES / 2, found  # so the bar does tell
