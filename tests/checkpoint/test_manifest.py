"""manifest.json gives back what it was given, and nothing that somebody else wrote into it."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from src.checkpoint.failures import CheckpointDamaged
from src.checkpoint.manifest import MANIFEST, FileInfo, Manifest, TensorInfo, plain, read_manifest

leaves = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
states = st.dictionaries(
    st.text(), st.recursive(leaves, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=20)
)


def manifest(**changes: Any) -> Manifest:
    tensors = {"a": TensorInfo((2, 3), "float32"), "b": TensorInfo((), "int64")}
    files = {"shard-00001-00001.safetensors": FileInfo(123, "ab")}
    return Manifest(**{"run": "r", "step": 7, "tensors": tensors, "files": files, "state": {}} | changes)


@given(states)
def test_plain_values_come_back_as_they_were(state: dict[str, Any]) -> None:
    assert Manifest.of_text(manifest(state=plain(state)).to_text()) == manifest(state=state)


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ({"loss": {"best": [1.0, float("nan")]}}, r"state\.loss\.best\[1\]=nan is not finite"),
        ({"best": float("inf")}, r"state\.best=inf is not finite.*Use None"),
        ({"groups": {0: 1}}, "state.groups has the key 0"),
        ({"rng": b"123"}, "state.rng is a bytes; .* Give it as a tensor"),
        ({"names": {1, 2}}, "state.names is a set"),
    ],
)
def test_what_json_can_not_give_back_is_refused_with_its_place(state: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        plain(state)


def test_tuples_come_back_as_lists() -> None:
    assert plain({"betas": (0.9, 0.999)}) == {"betas": [0.9, 0.999]}


def changed(text: str, **changes: Any) -> str:
    return json.dumps(json.loads(text) | changes)


TEXT = manifest().to_text()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (TEXT[:-20], "can't be read"),
        ("", "can't be read"),
        ("[1]", "can't be read"),
        ("{}", "KeyError: 'digest'"),
        ("[" * 100_000, "can't be read"),
        (TEXT.replace('"step": 7', '"step": 8'), "it has changed since it was written"),
        (changed(TEXT, format=2), "its format is 2, and this version reads 1"),
        (manifest(files={"../../x.safetensors": FileInfo(1, "")}).to_text(), "is no name of a file of tensors"),
        (manifest(files={"model.pt": FileInfo(1, "")}).to_text(), "is no name of a file of tensors"),
    ],
)
def test_a_manifest_that_is_not_as_written_is_refused_with_the_reason(text: str, words: str, tmp_path: Path) -> None:
    (tmp_path / MANIFEST).write_text(text)
    with pytest.raises(CheckpointDamaged, match=words):
        read_manifest(tmp_path)
