"""What a person sees: thinned lines, a bar that lets lines through whole, a table that fits."""

import io
import logging
import math
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from src.logs import TerminalHandler
from src.tracking import console
from src.tracking.bar import Bar
from src.tracking.console import Lines, closing_line, duration, final_table, seconds_between_lines
from src.tracking.files import empty_summary
from src.tracking.progress import make_progress

STEP = {"step": 1, "epoch": 0, "loss": 2.0, "grad_norm": 0.5, "step_seconds": 3.0, "samples_per_second": 80.4}
SUMMARY = empty_summary() | {
    "status": "finished",
    "world_size": 2,
    "parameters": 85002,
    "steps": 1200,
    "samples": 153600,
    "train_loss": 0.1234567,
    "eval": {"loss": 0.25, "accuracy": 0.975, "samples": 300},
    "seconds": 75.2,
    "samples_per_second": 2042.9,
    "peak_memory_bytes": [2**30, 3 * 2**30],
}


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A list whose only entry is the time."""
    now = [0.0]
    monkeypatch.setattr(console.time, "perf_counter", lambda: now[0])
    return now


@pytest.mark.parametrize(("elapsed", "gap"), [(0, 2), (60, 2), (600, 10), (3600, 60), (10 * 86400, 60)])
def test_the_longer_a_run_the_rarer_its_lines(elapsed: float, gap: float) -> None:
    assert seconds_between_lines(elapsed) == gap


def test_elsewhere_than_on_a_terminal_a_fast_run_is_thinned_out(
    clock: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    lines = make_progress(total_steps=100)  # pytest's stdout is no terminal
    assert isinstance(lines, Lines)
    for step in range(1, 101):
        clock[0] = step / 8  # seconds; exact in binary
        lines.step({**STEP, "step": step})
    # The first, then one every 2 s, and the last.
    assert [int(record.message.split("/")[0].split()[-1]) for record in caplog.records] == [
        *range(1, 100, 16),
        100,
    ]
    # 83 steps of 3 s are left.
    assert caplog.records[1].message == "step 17/100  loss 2.0000  grad norm 0.500  80 samples/s  0:04:09 left"


def test_a_norm_that_was_not_measured_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    Lines(total_steps=1).step({**STEP, "grad_norm": None, "loss": math.nan})
    assert caplog.records[0].message == "step 1/1  loss nan  80 samples/s  0.0 s left"


@pytest.mark.parametrize(
    ("seconds", "words"), [(0.04, "0.0 s"), (9.96, "10.0 s"), (59.4, "59 s"), (75.2, "0:01:15"), (90061, "25:01:01")]
)
def test_durations(seconds: float, words: str) -> None:
    assert duration(seconds) == words


def printed(capsys: pytest.CaptureFixture[str], *arguments: Any) -> list[str]:
    final_table(*arguments)
    return [line.rstrip() for line in capsys.readouterr().out.splitlines()]


def test_the_table_says_what_how_well_and_how_fast(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "model.safetensors").touch()
    assert printed(capsys, SUMMARY, tmp_path / "run", ["wandb leet run/wandb"]) == [
        "model        85,002 parameters on 2 ranks",
        "trained      1,200 steps, 153,600 samples in 0:01:15",
        "train loss   0.1235 (mean of the last epoch)",
        "test         loss 0.2500  accuracy 0.9750  (300 samples)",
        "speed        2043 samples/s",
        "peak memory  3.00 GiB on the fullest rank",
        "run folder   run",
        "weights      run/model.safetensors",
        "look at it",
        "  wandb leet run/wandb",
    ]


def test_the_table_says_how_to_go_on_where_there_is_a_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = printed(
        capsys, SUMMARY | {"checkpoint": f"{tmp_path}/a run/checkpoints/step_00000004"}, tmp_path / "a run", []
    )
    assert lines[-1] == f"  python train.py checkpoint.resume='{tmp_path}/a run'"


def test_a_task_that_trains_nothing_has_a_table_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert printed(capsys, empty_summary() | {"seconds": 1.0}, tmp_path, []) == [f"run folder  {tmp_path}"]


def test_brackets_in_a_path_are_no_markup(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert printed(capsys, empty_summary() | {"seconds": 1.0}, tmp_path / "[red]x", ["look [bold]here"]) == [
        f"run folder  {tmp_path}/[red]x",
        "look at it",
        "  look [bold]here",
    ]


def test_a_run_that_did_not_finish_has_a_closing_line(tmp_path: Path) -> None:
    unfinished = empty_summary() | {"status": "failed", "error": "rank 1: ValueError: boom", "seconds": 2.5}
    assert closing_line(unfinished, None, tmp_path).startswith("failed after step 0, 2.5 s: rank 1: ValueError: boom\n")


class Terminal(io.StringIO):
    """Claims to be a terminal, and remembers what it was sent."""

    def isatty(self) -> bool:
        return True


def test_lines_pass_above_the_bar_unbroken_and_the_streams_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal, errors = Terminal(), io.StringIO()
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setattr(sys, "stderr", errors)
    monkeypatch.setenv("TERM", "xterm-256color")
    bar = Bar(Console(file=terminal, width=40), total_steps=10)
    long_line = "a line of the log that is a good deal longer than forty columns, with [brackets] and 3.14 in it"
    handler = TerminalHandler()
    handler.emit(logging.LogRecord("src.x", logging.INFO, "", 0, long_line, None, None))
    bar.step({**STEP, "step": 5})
    print("half a line, ", end="")
    print("and the rest")
    print("an error", file=sys.stderr)  # stderr is no terminal here: `2> errors.txt` must get it
    bar.close()
    shown = terminal.getvalue()
    assert f"{long_line}\n" in shown
    assert "half a line, and the rest\n" in shown
    assert errors.getvalue() == "an error\n"
    assert "5/10" in shown
    assert "loss 2.0000" in shown
    assert (sys.stdout, sys.stderr) == (terminal, errors)


def test_what_the_bar_shows_is_not_said_again_on_the_terminal(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setenv("TERM", "xterm-256color")
    bar = Bar(Console(file=terminal, width=100), total_steps=10)
    bar.step(STEP)
    [record] = caplog.records  # it goes to the log files
    TerminalHandler().emit(record)
    bar.close()
    assert "step 1/10" not in terminal.getvalue()


def test_a_terminal_that_cannot_move_its_cursor_gets_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", Terminal())
    monkeypatch.setenv("TERM", "dumb")
    assert isinstance(make_progress(total_steps=10), Lines)
