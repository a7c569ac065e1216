"""The tiny Llama's folder: made once, whole or not at all."""

import multiprocessing
from pathlib import Path

import pytest

from src.errors import Refused
from src.models import hf_tiny
from tests.models.hf import loaded


def make_together(folder: Path, record: Path) -> None:
    """In a process of its own, which notes that it made the folder."""
    fill = hf_tiny.fill

    def noted(*arguments: Path) -> None:
        with record.open("a") as file:
            file.write("made\n")
        fill(*arguments)

    hf_tiny.fill = noted
    hf_tiny.make(folder)


def test_runs_that_start_together_make_it_once(tmp_path: Path) -> None:
    folder, record = tmp_path / "data" / "llama_tiny", tmp_path / "record"
    context = multiprocessing.get_context("forkserver")
    both = [context.Process(target=make_together, args=(folder, record)) for _ in range(2)]
    for process in both:
        process.start()
    for process in both:
        process.join(60)
        assert process.exitcode == 0
    assert record.read_text() == "made\n"
    assert [path.name for path in folder.parent.iterdir() if not path.name.endswith(".lock")] == ["llama_tiny"]
    assert folder.stat().st_mode == folder.parent.stat().st_mode, "as private as the user makes folders"
    assert loaded(folder).config.model_type == "llama"


def test_a_disk_that_fills_up_is_one_line_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: object) -> None:
        Path("/dev/full").write_text("x" * 65536)

    monkeypatch.setattr(hf_tiny, "write_tokenizer", full)
    folder = tmp_path / "data" / "llama_tiny"
    with pytest.raises(
        Refused, match=r"model.name=.*llama_tiny can't be made: .*No space left.*Choose a folder"
    ) as refused:
        hf_tiny.make(folder)
    assert len(refused.value.problems) == 1
    assert not list(tmp_path.iterdir())
