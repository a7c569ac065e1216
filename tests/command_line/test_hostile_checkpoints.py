"""Checkpoints that somebody made to do harm: refused by name, nothing of them executed, nothing written."""

import json
import pickle
import shutil
import struct
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from safetensors.torch import load

from src.checkpoint.manifest import MANIFEST, FileInfo, Manifest, file_digest
from tests.command import metrics
from tests.command_server import serve

LAST = "step_00000004"


def tree(folder: Path) -> dict[str, bytes | None]:
    """Every file's content, and the folders."""
    return {str(path): path.read_bytes() if path.is_file() else None for path in sorted(folder.rglob("*"))}


class Hostile:
    """Creates a file when it is unpickled."""

    def __init__(self, victim: Path) -> None:
        self.victim = victim

    def __reduce__(self) -> Any:
        return Path.touch, (self.victim,)


def shard_of(checkpoint: Path) -> Path:
    return min(checkpoint.glob("*.safetensors"))


def put_a_pickle_in_its_place(checkpoint: Path, pickled: bytes) -> None:
    shard_of(checkpoint).write_bytes(pickled)


def put_a_pickle_in_its_place_and_vouch_for_it(checkpoint: Path, pickled: bytes) -> None:
    shard_of(checkpoint).write_bytes(pickled)
    vouch(checkpoint)


def name_a_file_elsewhere(checkpoint: Path, pickled: bytes) -> None:
    vouch(checkpoint, {"../../x.safetensors": FileInfo(1, "0")})


def lie_in_a_header(checkpoint: Path, pickled: bytes) -> None:
    """Of a tensor of a few bytes, that it has a tebibyte."""
    path = shard_of(checkpoint)
    content = path.read_bytes()
    [length] = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + length])
    header[max(header)]["data_offsets"][1] += 2**40
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + content[8 + length :])
    vouch(checkpoint)


def leave_out_tensors(checkpoint: Path, pickled: bytes) -> None:
    first, second = sorted(checkpoint.glob("*.safetensors"))
    assert load(first.read_bytes()).keys() != load(second.read_bytes()).keys()
    shutil.copy(first, second)
    vouch(checkpoint)


def vouch(checkpoint: Path, more: Mapping[str, FileInfo] = MappingProxyType({})) -> None:
    """Make the manifest say that the files are as they should be, as anybody can who changes them.

    more: files that it names besides.
    """
    manifest = Manifest.of_text((checkpoint / MANIFEST).read_text())
    files = {p.name: FileInfo(p.stat().st_size, file_digest(p)) for p in checkpoint.glob("*.safetensors")}
    (checkpoint / MANIFEST).write_text(replace(manifest, files={**files, **more}).to_text())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (put_a_pickle_in_its_place, ".safetensors is truncated"),
        (put_a_pickle_in_its_place_and_vouch_for_it, ".safetensors can't be read: Error while deserializing header"),
        (name_a_file_elsewhere, f"{MANIFEST} can't be read: '../../x.safetensors' is no name of a file of tensors"),
        (lie_in_a_header, ".safetensors can't be read: Error while deserializing header"),
        (leave_out_tensors, f"{LAST} does not hold all of"),
    ],
)
def test_a_hostile_checkpoint_is_refused_by_name(
    run_dir: Path, change: Callable[[Path, bytes], None], words: str
) -> None:
    checkpoint, victim = run_dir / "checkpoints" / LAST, run_dir.parent / "victim"
    change(checkpoint, pickle.dumps(Hostile(victim)))
    before = tree(run_dir.parent)
    for command in ([f"checkpoint.resume={checkpoint}"], ["task=evaluate", f"task.checkpoint={checkpoint}"]):
        done = serve(run_dir.parent / "here", *command)
        assert done.is_refusal(), done.text
        [problem] = done.problems
        assert words in problem
        assert str(checkpoint) in problem
    assert tree(run_dir.parent) == before, "nothing executed, nothing written"


def test_a_hostile_newest_checkpoint_is_named_and_the_one_before_it_used(run_dir: Path) -> None:
    lie_in_a_header(run_dir / "checkpoints" / LAST, b"")
    done = serve(run_dir.parent / "here", f"checkpoint.resume={run_dir}")
    assert done.code == 0, done.text
    assert [record["step"] for record in metrics(run_dir, "resume")] == [2]
    assert "can't be read: Error while deserializing header" in (run_dir / "train.log").read_text()


def test_pickles_beside_the_tensors_are_left_alone(run_dir: Path) -> None:
    checkpoint, victim = run_dir / "checkpoints" / LAST, run_dir.parent / "victim"
    pickled = pickle.dumps(Hostile(victim))
    for name in (".metadata", "__0_0.distcp", "model.pt", "data.pkl"):
        (checkpoint / name).write_bytes(pickled)
    done = serve(run_dir.parent / "here", f"checkpoint.resume={checkpoint}", "trainer.max_steps=5")
    assert done.code == 0, done.text
    assert not victim.exists()
    pickle.loads(pickled)  # it does bite
    assert victim.exists()
