"""Saving, at once and in the background: what is written, when, and what a failure leaves."""

import os
import re
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from src.checkpoint import writer
from src.checkpoint.failures import CheckpointFailed
from src.checkpoint.loading import load
from src.checkpoint.store import Store
from src.checkpoint.whole import BEST, LAST, newest_whole, pointed, step_name
from src.world import World
from tests.checkpoint import parts
from tests.workers import Pool


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_keep_and_best_hold_for_what_ranks_save(pool: Pool, tmp_path: Path) -> None:
    pool.run(2, parts.save, tmp_path, [1, 2, 3, 4], 1, 2)
    assert names(tmp_path) == [BEST, LAST, step_name(2), step_name(4)]
    for pointer in (BEST, LAST):
        checkpoint = pointed(tmp_path, pointer)
        assert pool.run(2, parts.differences, checkpoint) == [[], []]


def save_and_change_meanwhile(world: World, folder: Path) -> None:
    store = Store(folder, parts.RUN)
    tensors = parts.parts(world, parts.whole())
    state = {**parts.STATE, "list": [1]}
    with parts.Gate() as gate:
        store.save(1, tensors, state, asynchronous=True)
        for tensor in tensors.values():  # no file is written before the gate opens
            parts.own(tensor).zero_()
        state["list"].append(2)  # type: ignore[attr-defined]
        dist.barrier()  # training's collectives go on meanwhile
        assert newest_whole(folder) == (None, [])
        gate.open.set()
        store.wait()
    expected = parts.parts(world, parts.whole())
    assert load(folder / step_name(1), tensors).state == {**parts.STATE, "list": [1]}
    assert all(torch.equal(parts.own(tensor), parts.own(expected[name])) for name, tensor in tensors.items())
    buffers = {index: buffer.data_ptr() for index, buffer in store.buffers.buffers.items()}
    store.save(2, tensors, parts.STATE, asynchronous=True)
    store.close()
    assert {index: buffer.data_ptr() for index, buffer in store.buffers.buffers.items()} == buffers


def test_the_state_is_that_of_the_call_whatever_happens_meanwhile(pool: Pool, tmp_path: Path) -> None:
    pool.run(2, save_and_change_meanwhile, tmp_path)
    assert pool.run(2, parts.differences, tmp_path / step_name(2)) == [[], []]


def save_twice(world: World, folder: Path) -> None:
    store = Store(folder, parts.RUN)
    with parts.Gate() as gate:
        store.save(1, {"a": parts.counted(4)}, {}, asynchronous=True)
        threading.Timer(0.3, gate.open.set).start()
        store.save(2, {"a": parts.counted(4)}, {}, asynchronous=True)
        assert newest_whole(folder)[0] in (folder / step_name(1), folder / step_name(2))
    store.close()


def test_a_second_save_waits_for_the_first(pool: Pool, tmp_path: Path) -> None:
    pool.run(2, save_twice, tmp_path)
    assert names(tmp_path) == [LAST, step_name(1), step_name(2)]


def fail_on_one_rank(world: World, folder: Path, told_by: str) -> str:
    """Save 1, fail in saving 2 on rank 1, save 3. Returns what the failure said. told_by: the call that raises."""

    class Strange(Exception):  # noqa: N818 - can't be pickled, as some extensions' exceptions can't
        pass

    def broken(*args: Any, **kwargs: Any) -> None:
        raise Strange("the disk has a bad day")

    store = Store(folder, parts.RUN)
    tensors = parts.parts(world, parts.whole())
    asynchronous = told_by != "save"
    store.save(1, tensors, parts.STATE, asynchronous=asynchronous)
    store.wait()
    real = writer.save_file
    if world.world_rank == 1:
        writer.save_file = broken
    try:
        if asynchronous:
            store.save(2, tensors, parts.STATE, asynchronous=True)  # does not raise yet
        with pytest.raises(CheckpointFailed) as caught:
            store.wait() if told_by == "wait" else store.save(2 if told_by == "save" else 5, tensors, parts.STATE)
    finally:
        writer.save_file = real
    assert pointed(folder, LAST) == folder / step_name(1)
    dist.barrier()
    store.save(3, tensors, parts.STATE, asynchronous=asynchronous)
    store.close()
    return str(caught.value)


@pytest.mark.parametrize("told_by", ["save", "wait", "next save"])
def test_a_failure_on_one_rank_is_raised_on_all_and_leaves_nothing(told_by: str, pool: Pool, tmp_path: Path) -> None:
    first, second = pool.run(2, fail_on_one_rank, tmp_path, told_by)
    assert first == second
    assert first == (
        f"The checkpoint of step 2 was not written to {tmp_path}: rank 1: Strange: the disk has a bad day. "
        "The last whole one there is step_00000001."
    )
    assert names(tmp_path) == [LAST, step_name(1), step_name(3)]


def refused(world: World, folder: Path, tensors: dict[str, Tensor], own: dict[str, Any], state: Any) -> str:
    """What is said of a save of `tensors`, with `own` beside them on the last rank, and a state on rank 0."""
    store = Store(folder, parts.RUN)
    if world.world_rank == world.world_size - 1:
        tensors = tensors | own
    for asynchronous in (False, True):
        with pytest.raises(CheckpointFailed) as caught:
            store.save(1, tensors, state, asynchronous=asynchronous)
    store.close()
    return str(caught.value)


@pytest.mark.parametrize(
    ("own", "state", "words"),
    [
        ({}, {"loss": float("nan")}, "rank 0: ValueError: state.loss=nan is not finite"),
        ({"plain": 3}, {}, "rank 1: TypeError: plain is no tensor"),
        ({"a": torch.zeros(5)}, {}, r"a is a tensor of \[4\] torch.float32 on rank 0 and a tensor of \[5\]"),
        ({"a": torch.zeros(4).double()}, {}, "a tensor of .* torch.float64 on rank 1"),
    ],
)
def test_what_can_not_be_written_is_refused_on_every_rank(
    own: dict[str, Any], state: dict[str, Any], words: str, pool: Pool, tmp_path: Path
) -> None:
    for said in pool.run(2, refused, tmp_path, {"a": torch.zeros(4)}, own, state):
        assert re.search(words, said)
        assert said.endswith("There is no whole one yet.")
    assert names(tmp_path) == []


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 3 MiB."""
    if os.geteuid() != 0:
        pytest.skip("mounting a small file system needs root")
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", folder], capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"no file system can be mounted here: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", folder], check=True)


def test_a_full_disk_leaves_the_checkpoint_before(small_disk: Path, pool: Pool) -> None:
    assert pool.run(2, parts.failure, small_disk, 1, 2**17) == ["", ""]  # 2 ranks x 2^17 x 4 bytes = 1 MiB
    for said in pool.run(2, parts.failure, small_disk, 2, 2**19):  # 4 MiB
        assert "No space left on device" in said
        assert said.endswith("The last whole one there is step_00000001.")
    assert names(small_disk) == [LAST, step_name(1)]
    assert newest_whole(small_disk) == (small_disk / step_name(1), [])
    assert pool.run(2, parts.failure, small_disk, 3, 2**16) == ["", ""]


def test_a_disk_that_takes_no_writes_is_named(small_disk: Path, pool: Pool) -> None:
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    for said in pool.run(2, parts.failure, small_disk / "checkpoints", 1, 8):
        assert "rank 0: OSError: [Errno 30] Read-only file system" in said
        assert str(small_disk / "checkpoints") in said


def two_names_for_one_tensor(world: World, folder: Path) -> None:
    store = Store(folder, parts.RUN)
    tensor = parts.counted(4, 6)
    views = {"tied": tensor, "whole": tensor, "row": tensor[1], "column": tensor[:, 2], "turned": tensor.t()}
    store.save(1, views, {})
    store.save(2, views, {}, asynchronous=True)
    store.close()
    for step in (1, 2):
        loaded = {name: torch.zeros(view.shape) for name, view in views.items()}
        load(folder / step_name(step), loaded)
        assert all(torch.equal(loaded[name], view) for name, view in views.items())


def test_views_and_tied_tensors_are_written_whole(pool: Pool, tmp_path: Path) -> None:
    pool.run(1, two_names_for_one_tensor, tmp_path)


def many_files(world: World, folder: Path) -> list[int]:
    writer.MAX_FILE_BYTES, real = 100, writer.MAX_FILE_BYTES
    try:
        parts.save(world, folder, [1])
    finally:
        writer.MAX_FILE_BYTES = real
    return [path.stat().st_mode & 0o777 for path in (folder / step_name(1)).iterdir()]


def test_files_are_bounded_and_as_readable_as_the_users_other_files(pool: Pool, tmp_path: Path) -> None:
    [modes] = pool.run(1, many_files, tmp_path)
    (tmp_path / "other").touch()
    assert set(modes) == {(tmp_path / "other").stat().st_mode & 0o777}
    # 100 bytes: rows.weight 84 | few 24 + half 18 | ...: at least a file for each 100 of the 515 bytes of all.
    assert len(modes) - 1 >= 6
    assert pool.run(2, parts.differences, tmp_path / step_name(1)) == [[], []]
