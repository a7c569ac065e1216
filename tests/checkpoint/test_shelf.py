"""What is removed, and what never is."""

import logging
from pathlib import Path

import pytest

from src.checkpoint.manifest import MANIFEST, Manifest
from src.checkpoint.shelf import Shelf
from src.checkpoint.whole import pointed, step_name


def publish(folder: Path, *steps: int, keep: int | None = None, best: int | None = None, run: str = "r") -> None:
    shelf = Shelf(folder, run, keep)
    for step in steps:
        shelf.begin(step)
        (shelf.saving(step) / "note").write_text(f"{run} {step}")
        shelf.publish(Manifest(run, step, {}, {}), best=step == best)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_the_newest_by_number_are_kept(tmp_path: Path) -> None:
    publish(tmp_path, 9, 10, 11, 12, keep=3)
    assert names(tmp_path) == ["last", *map(step_name, (10, 11, 12))]
    publish(tmp_path, 99, 100, keep=3)
    assert names(tmp_path) == ["last", *map(step_name, (12, 99, 100))]
    publish(tmp_path, 99_999_999, 100_000_000, keep=1)  # as text, the later one comes first
    assert names(tmp_path) == ["last", step_name(100_000_000)]


def test_the_best_is_kept_beside_the_last(tmp_path: Path) -> None:
    publish(tmp_path, 1, 2, 3, 4, keep=1, best=2)
    assert names(tmp_path) == ["best", "last", step_name(2), step_name(4)]
    assert pointed(tmp_path, "best") == tmp_path / step_name(2)
    assert pointed(tmp_path, "last") == tmp_path / step_name(4)
    publish(tmp_path, 5, keep=1, best=5)
    assert names(tmp_path) == ["best", "last", step_name(5)]


def test_all_are_kept_by_default(tmp_path: Path) -> None:
    publish(tmp_path, *range(1, 8))
    assert names(tmp_path) == ["last", *map(step_name, range(1, 8))]


def test_nothing_is_removed_that_this_run_did_not_write(tmp_path: Path) -> None:
    publish(tmp_path, 1, 2, run="other")
    publish(tmp_path, 3)
    (tmp_path / step_name(3) / MANIFEST).write_text("damaged: whose is it?")
    (tmp_path / step_name(4)).mkdir()
    (tmp_path / "step_5").mkdir()
    (tmp_path / "notes.txt").touch()
    for hidden in (".other.saving.step_00000009", ".r.notes", ".rx.saving.step_00000009"):
        (tmp_path / hidden).mkdir()
    before = set(names(tmp_path))
    publish(tmp_path, 10, 11, 12, keep=1)
    assert set(names(tmp_path)) == before | {step_name(12)}


def test_what_a_killed_save_left_is_removed_by_its_own_run_only(tmp_path: Path) -> None:
    for run in ("r", "other"):
        Shelf(tmp_path, run, None).begin(5)
        (tmp_path / f".{run}.last").touch()
        (tmp_path / f".{run}.removing.{step_name(1)}").mkdir()
    Shelf(tmp_path, "r", None).remove_leftovers()
    assert names(tmp_path) == [".other.last", ".other.removing.step_00000001", ".other.saving.step_00000005"]


def test_later_ones_than_the_one_just_written_do_not_push_it_out(tmp_path: Path) -> None:
    """A run that resumed at step 50, as its checkpoints 90 and 100 were damaged."""
    publish(tmp_path, 40, 50, 90, 100)
    publish(tmp_path, 55, 60, keep=1)
    assert names(tmp_path) == ["last", *map(step_name, (60, 90, 100))]
    assert pointed(tmp_path, "last") == tmp_path / step_name(60)


def test_the_same_step_again_takes_the_place_of_the_earlier(tmp_path: Path) -> None:
    publish(tmp_path, 1, 2)
    (tmp_path / step_name(2) / "note").write_text("earlier")
    publish(tmp_path, 2)
    assert names(tmp_path) == ["last", step_name(1), step_name(2)]
    assert (tmp_path / step_name(2) / "note").read_text() == "r 2"


def test_what_is_not_ours_but_in_the_way_is_set_aside(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / step_name(2)).mkdir()
    (tmp_path / step_name(2) / "mine").touch()
    with caplog.at_level(logging.WARNING):
        publish(tmp_path, 2)
    assert (tmp_path / f"{step_name(2)}.aside-1" / "mine").exists()
    assert (tmp_path / step_name(2) / MANIFEST).exists()
    assert "it is now called step_00000002.aside-1" in caplog.text


@pytest.mark.parametrize(("run", "keep"), [("a/b", 1), ("", 1), ("r", 0)])
def test_what_can_not_work_is_refused(run: str, keep: int, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"{'run' if keep else 'keep'}="):
        Shelf(tmp_path, run, keep)
