"""Damaged, foreign and hostile checkpoints are named, passed over, and never opened by what could run them."""

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from src.checkpoint.failures import CheckpointDamaged
from src.checkpoint.loading import load
from src.checkpoint.manifest import MANIFEST, FileInfo, Manifest, TensorInfo, file_digest
from src.checkpoint.whole import check, newest_whole, pointed, whole_checkpoints
from tests.checkpoint import parts
from tests.workers import Pool

SHARD = "shard-00001-00001.safetensors"


@pytest.fixture
def folder(pool: Pool, tmp_path: Path) -> Path:
    """With the checkpoints of steps 9 and 10."""
    pool.run(2, parts.save, tmp_path, [9, 10])
    return tmp_path


def newest(folder: Path) -> Path:
    return folder / "step_00000010"


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-4])


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def grow(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\0")


@pytest.mark.parametrize(
    ("file", "damage", "words"),
    [
        (SHARD, truncate, "is truncated: it has"),
        (SHARD, flip, "has changed since it was written: its digest differs"),
        (SHARD, grow, "is too long"),
        (SHARD, Path.unlink, "is missing."),
        ("more.safetensors", Path.touch, "is not in the manifest"),
        (MANIFEST, truncate, "can't be read"),
        (MANIFEST, flip, "can't be read"),
        (MANIFEST, Path.unlink, f"is no checkpoint of shardlab: it has no {MANIFEST}"),
    ],
)
def test_a_damaged_newest_one_is_named_and_the_one_before_is_found(
    file: str, damage: Callable[[Path], Any], words: str, folder: Path
) -> None:
    damage(newest(folder) / file)
    found, [problem] = newest_whole(folder)
    assert found == folder / "step_00000009"
    assert words in problem
    assert str(newest(folder) if "no checkpoint" in words else newest(folder) / file) in problem


def test_a_disk_that_can_not_read_a_file_is_no_reason_to_stop_looking(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = file_digest

    def broken(path: Path) -> str:
        if path.parent == newest(folder):
            raise OSError(5, "Input/output error")
        return real(path)

    monkeypatch.setattr("src.checkpoint.whole.file_digest", broken)
    found, problems = newest_whole(folder)
    assert found == folder / "step_00000009"
    assert problems[0] == f"{newest(folder) / SHARD} can't be read: [Errno 5] Input/output error."


def test_sizes_are_told_of_a_truncated_file(folder: Path) -> None:
    size = (newest(folder) / SHARD).stat().st_size
    truncate(newest(folder) / SHARD)
    assert check(newest(folder)) == [f"{newest(folder) / SHARD} is truncated: it has {size - 4} of {size} bytes."]


def test_whole_ones_are_listed_newest_first_by_number(folder: Path) -> None:
    (folder / "step_00000009").rename(folder / "step_9")  # no name of ours
    (folder / ".tests-1.saving.step_00000011").mkdir()
    (folder / "step_00000012").touch()
    (folder / "step_00000013").mkdir()
    (folder / "step_000000014").mkdir()  # a digit too many
    assert whole_checkpoints(folder) == [newest(folder)]
    assert whole_checkpoints(folder / "nowhere") == []
    assert newest_whole(folder / "nowhere") == (None, [])


def test_a_renamed_one_is_named(folder: Path) -> None:
    newest(folder).rename(folder / "step_00000011")
    found, [problem] = newest_whole(folder)
    assert found == folder / "step_00000009"
    assert "has been renamed: its manifest is of step 10" in problem


@pytest.mark.parametrize("text", ["", "step_00000077", "../step_00000010", "\0", "nothing"])
def test_a_pointer_to_nothing_is_no_pointer(text: str, folder: Path) -> None:
    assert pointed(folder, "last") == newest(folder)
    (folder / "last").write_text(text)
    assert pointed(folder, "last") is None
    assert pointed(folder, "best") is None
    assert newest_whole(folder) == (newest(folder), [])


class Hostile:
    """Creates a file when it is unpickled."""

    def __init__(self, victim: Path) -> None:
        self.victim = victim

    def __reduce__(self) -> Any:
        return Path.touch, (self.victim,)


def test_a_pickle_is_never_opened_whatever_its_name(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    checkpoint = tmp_path / "step_00000001"
    checkpoint.mkdir()
    for name in (".metadata", "__0_0.distcp", "model.pt", SHARD):
        (checkpoint / name).write_bytes(pickle.dumps(Hostile(victim)))
    foreign, [problem] = newest_whole(tmp_path)
    assert foreign is None
    assert "is no checkpoint of shardlab" in problem
    tensors = {"a": torch.zeros(2)}
    with pytest.raises(CheckpointDamaged, match="is no checkpoint of shardlab"):
        load(checkpoint, tensors)
    # With a manifest that vouches for it, which anybody could write:
    files = {SHARD: FileInfo((checkpoint / SHARD).stat().st_size, file_digest(checkpoint / SHARD))}
    manifest = Manifest("r", 1, {"a": TensorInfo((2,), "float32")}, files)
    (checkpoint / MANIFEST).write_text(manifest.to_text())
    assert check(checkpoint, contents=False) == []
    [problem] = check(checkpoint)
    assert f"{checkpoint / SHARD} can't be read: Error while deserializing header" in problem
    with pytest.raises(CheckpointDamaged, match="can't be read: SafetensorError"):
        load(checkpoint, tensors)
    assert not victim.exists()
    pickle.loads(pickle.dumps(Hostile(victim)))  # it does bite
    assert victim.exists()
