"""What a heartbeat does to its own process; tests/launch/test_hangs.py has what becomes of a run."""

import os
import signal
import time
import timeit
from collections.abc import Callable
from pathlib import Path
from threading import Event

import pytest

from src.heartbeat import STACKS_SIGNAL, Hung, heartbeat


def never(hung: Hung) -> None:
    raise AssertionError("the main thread could be told")


def stay_in(place: Callable[[], None], folder: Path, timeout_seconds: float, is_alone: bool = True) -> None:
    with heartbeat(timeout_seconds, folder / "log", is_alone, give_up=never) as heart:
        heart.beat()
        place()


def sleep_long() -> None:
    time.sleep(20)


def sleep_in(module: str) -> Callable[[], None]:
    """A function of the module of that name, as far as its frame says."""
    names = {"__name__": module, "time": time}
    exec("def wait(): time.sleep(1.5)", names)
    return names["wait"]  # type: ignore[return-value]


def retry() -> None:
    while True:
        try:
            time.sleep(20)
        except Exception:
            continue


def test_a_sleep_without_a_beat_is_cut_short_where_it_is(tmp_path: Path) -> None:
    started = time.monotonic()
    with pytest.raises(Hung, match=r"^no progress for 0\.4 s, in sleep_long \(.*test_heartbeat\.py:\d+\)$"):
        stay_in(sleep_long, tmp_path, 0.4)
    assert 0.4 <= time.monotonic() - started < 5
    assert "in sleep_long" in (tmp_path / "log").read_text()


def test_no_retry_swallows_it(tmp_path: Path) -> None:
    with pytest.raises(Hung):
        stay_in(retry, tmp_path, 0.2)


def test_beats_keep_it_quiet(tmp_path: Path) -> None:
    with heartbeat(0.6, tmp_path / "log", is_alone=True, give_up=never) as heart:
        for _ in range(15):
            heart.beat()
            time.sleep(0.1)
    assert (tmp_path / "log").read_text() == ""


def test_nothing_is_watched_before_the_first_beat_nor_at_rest(tmp_path: Path) -> None:
    with heartbeat(0.2, tmp_path / "log", is_alone=True, give_up=never) as heart:
        time.sleep(0.5)
        heart.beat()
        heart.rest()
        time.sleep(0.5)
    assert (tmp_path / "log").read_text() == ""


def test_a_person_in_a_debugger_may_think(tmp_path: Path) -> None:
    stay_in(sleep_in("bdb"), tmp_path, 0.2)
    assert (tmp_path / "log").read_text() == ""


@pytest.mark.parametrize(("module", "waits"), [("torch.distributed.c10d", True), ("src.data.text", False)])
def test_a_rank_inside_a_collective_is_said_to_wait(module: str, waits: bool, tmp_path: Path) -> None:
    words = "waiting for another rank in wait" if waits else "in wait"
    with pytest.raises(Hung, match=rf"no progress for 0\.2 s, {words}"):
        stay_in(sleep_in(module), tmp_path, 0.2, is_alone=False)


def test_the_stacks_can_be_asked_for_at_any_time_and_nothing_ends(tmp_path: Path) -> None:
    before = signal.getsignal(STACKS_SIGNAL)
    with heartbeat(60, tmp_path / "log", is_alone=True, give_up=never) as heart:
        heart.beat()
        os.kill(os.getpid(), STACKS_SIGNAL)
        Event().wait(0.1)
    assert "test_the_stacks_can_be_asked_for" in (tmp_path / "log").read_text()
    assert signal.getsignal(STACKS_SIGNAL) == before


def test_a_beat_costs_less_than_two_microseconds(tmp_path: Path) -> None:
    with heartbeat(60, tmp_path / "log", is_alone=True, give_up=never) as heart:
        heart.beat()
        seconds = min(timeit.repeat(heart.beat, number=1000, repeat=20)) / 1000  # the least disturbed of many
    assert seconds < 2e-6
