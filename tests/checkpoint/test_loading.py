"""What was saved on some ranks is there on others, part by part; what does not fit is refused by name."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from src.checkpoint.failures import CheckpointDamaged
from src.checkpoint.loading import load
from src.checkpoint.manifest import MANIFEST, read_manifest
from tests.checkpoint import parts
from tests.workers import Pool


@pytest.mark.parametrize(("saved_on", "loaded_on"), [(2, 1), (1, 4), (4, 2), (2, 2)])
def test_what_was_saved_on_some_ranks_is_there_on_others(
    saved_on: int, loaded_on: int, pool: Pool, tmp_path: Path
) -> None:
    pool.run(saved_on, parts.save, tmp_path, [5])
    assert pool.run(loaded_on, parts.differences, tmp_path / "step_00000005") == [[]] * loaded_on


def test_one_process_without_a_process_group_loads_too(pool: Pool, tmp_path: Path) -> None:
    pool.run(2, parts.save, tmp_path, [5])
    tensors = {name: torch.zeros_like(tensor) for name, tensor in parts.whole().items()}
    assert load(tmp_path / "step_00000005", tensors).state == parts.STATE
    assert all(torch.equal(tensor, parts.whole()[name]) for name, tensor in tensors.items())


@pytest.mark.parametrize(
    "num_rows", [8, 6, 3]
)  # 6: 3 rows a tensor rank, then 2 and 1; 3: 2 and 1, then 1 and 1, 1 and 0
def test_rows_that_are_cut_twice_over_come_back_in_order(num_rows: int, pool: Pool, tmp_path: Path) -> None:
    weight = parts.counted(num_rows, 2)
    pool.run(4, parts.save_of_wrapped_layers, tmp_path, weight, False)
    loaded = {"weight": torch.zeros(num_rows, 2)}
    load(tmp_path / "step_00000001", loaded)
    assert torch.equal(loaded["weight"], weight)
    for [on_rank] in pool.run(4, parts.save_of_wrapped_layers, tmp_path, weight, True):
        assert torch.equal(on_rank, weight)


def test_every_byte_is_written_once(pool: Pool, tmp_path: Path) -> None:
    pool.run(2, parts.save, tmp_path, [5])
    manifest = read_manifest(tmp_path / "step_00000005")
    written = 0
    for name in manifest.files:
        header_bytes = int.from_bytes((tmp_path / "step_00000005" / name).read_bytes()[:8], "little")
        written += manifest.files[name].bytes - 8 - header_bytes
    assert written == sum(tensor.nbytes for tensor in parts.whole().values())
    assert {name: info.shape for name, info in manifest.tensors.items()} == {
        name: tuple(tensor.shape) for name, tensor in parts.whole().items()
    }


def test_other_dtypes_are_converted(pool: Pool, tmp_path: Path) -> None:
    pool.run(1, parts.save_in_other_dtypes, tmp_path)


def test_all_that_does_not_fit_is_listed_on_every_rank_and_nothing_is_loaded(pool: Pool, tmp_path: Path) -> None:
    pool.run(2, parts.save, tmp_path, [5])
    changes = {"rows.weight": torch.zeros(7, 4), "few.weight": None, "stage.1": None, "stage.7": torch.zeros(2)}
    for problems in pool.run(2, parts.mismatch, tmp_path / "step_00000005", changes, ()):
        assert problems == [
            "few.weight: in the checkpoint, but nothing takes it",
            "rows.weight: [7, 3] in the checkpoint, [7, 4] here",
            "stage.1: in the checkpoint, but nothing takes it",
            "stage.7: missing from the checkpoint",
        ]


def test_names_under_a_prefix_may_be_left_unread(pool: Pool, tmp_path: Path) -> None:
    pool.run(2, parts.save, tmp_path, [5])
    changes = {"stage.1": None, "stage.2": None, "few.weight": None}
    leave = ("stage.", "few.")
    assert pool.run(2, parts.mismatch, tmp_path / "step_00000005", changes, leave) == [[], []]


def test_a_file_that_is_gone_leaves_no_holes(pool: Pool, tmp_path: Path) -> None:
    pool.run(2, parts.save, tmp_path, [5])
    (tmp_path / "step_00000005" / "shard-00002-00001.safetensors").unlink()
    with pytest.raises(CheckpointDamaged, match=r"shard-00002-00001\.safetensors"):
        load(tmp_path / "step_00000005", parts.whole())


def test_a_manifest_that_forgets_a_file_leaves_no_holes(pool: Pool, tmp_path: Path) -> None:
    pool.run(4, parts.save, tmp_path, [5], None, None, parts.RUN, ["rows.weight"])
    manifest = read_manifest(tmp_path / "step_00000005")
    del manifest.files["shard-00002-00001.safetensors"]  # rows 2 and 3 of 7
    (tmp_path / "step_00000005" / MANIFEST).write_text(manifest.to_text())
    with pytest.raises(CheckpointDamaged, match=r"does not hold all of rows\.weight"):
        load(tmp_path / "step_00000005", {"rows.weight": torch.zeros(7, 3)})


def test_a_file_that_somebody_put_there_is_not_read(pool: Pool, tmp_path: Path) -> None:
    pool.run(2, parts.save, tmp_path, [5])
    save_file({"plain.weight": torch.zeros(4)}, tmp_path / "step_00000005" / "a.safetensors")
    tensors = {"plain.weight": torch.zeros(4)}
    load(tmp_path / "step_00000005", tensors, leave=("",))
    assert torch.equal(tensors["plain.weight"], parts.whole()["plain.weight"])
