"""Folders that are made whole or not at all."""

import multiprocessing
import os
import platform
import signal
from contextlib import ExitStack

import pytest

from src.once import make_once, unfinished


def write_half_and_die(folder):
    (folder / "half").touch()
    os.kill(os.getpid(), signal.SIGKILL)


def test_what_a_killed_process_left_is_swept_up_and_made_anew(tmp_path):
    folder = tmp_path / "root" / "made"
    process = multiprocessing.get_context("fork").Process(target=make_once, args=(folder, write_half_and_die))
    process.start()
    process.join(30)
    assert process.exitcode == -signal.SIGKILL
    assert not folder.exists()
    assert list(folder.parent.glob(".partial-*")), "it died in the middle"
    make_once(folder, lambda empty: (empty / "whole").touch())
    assert [path.name for path in folder.iterdir()] == ["whole"]
    assert not list(folder.parent.glob(".partial-*"))
    make_once(folder, lambda empty: pytest.fail("it is there"))


def test_what_another_machine_or_another_folder_is_making_stays(tmp_path, monkeypatch):
    with ExitStack() as others:  # still at work
        for host, name in [("other", "made"), ("this-2", "made"), ("this", "made-too")]:
            monkeypatch.setattr(platform, "node", lambda host=host: host)
            others.enter_context(unfinished(tmp_path, name))
        monkeypatch.setattr(platform, "node", lambda: "this")
        live = set(tmp_path.iterdir())
        assert len(live) == 3
        make_once(tmp_path / "made", lambda empty: (empty / "whole").touch())
        assert live <= set(tmp_path.iterdir())


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_what_fails_leaves_no_trace(tmp_path, error):
    def fail(empty):
        (empty / "half").touch()
        raise error

    with pytest.raises(error):
        make_once(tmp_path / "a" / "b" / "made", fail)
    assert not list(tmp_path.iterdir())
    (tmp_path / "kept").mkdir()
    with pytest.raises(error):
        make_once(tmp_path / "kept" / "made", fail)
    assert not [path for path in (tmp_path / "kept").iterdir() if not path.name.endswith(".lock")]
