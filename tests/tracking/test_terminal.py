"""Whole runs in a real terminal."""

import os
import re
import signal
import sys
from pathlib import Path

from src.tracking.wandb import client_command
from tests.command import TRAIN, metrics, summary
from tests.tracking.terminal import watch
from tests.tracking.wandb_runs import TINY, home

SHOW_CURSOR = "\x1b[?25h"


def test_a_narrow_terminal_gets_a_bar_whole_lines_a_table_and_commands(tmp_path: Path) -> None:
    command = [sys.executable, str(TRAIN), "tracking=offline", *TINY]
    seen = watch(command, tmp_path, home(tmp_path), columns=50)
    assert seen.code == 0, seen.raw
    [run_dir] = tmp_path.glob("multirun/*")
    assert re.search(r"━ *2/2 loss \d\.\d{4} ", "\n".join(seen.lines))
    # Lines wider than the terminal are sent whole: it wraps them, and copying one gives one.
    assert f"] run folder {run_dir}" in "\n".join(seen.lines)
    assert f"  {client_command()} leet {run_dir}/wandb" in seen.lines
    assert any(line.startswith("trained      2 steps, 256 samples in ") for line in seen.lines)
    assert not any("] step 1/2 " in line for line in seen.lines)
    assert "step 1/2 " in (run_dir / "train.log").read_text()
    assert seen.raw.rindex(SHOW_CURSOR) > seen.raw.rindex("\x1b[?25l")


def test_an_interrupted_run_leaves_the_terminal_as_it_was_and_says_where_it_stopped(tmp_path: Path) -> None:
    sleep = ["data._target_=tests.doubles.MisbehavingDigits", "+data.what=sleep", "+data.on_rank=null", "+data.at=3"]
    sleep.append("+data.seconds=2")  # the step that it was asked in is finished
    command = [sys.executable, str(TRAIN), "tracking=off", *sleep, *TINY, "trainer.max_steps=9"]
    seen = watch(
        command,
        tmp_path,
        home(tmp_path),
        when="2/9",  # the bar, after the second step
        do=lambda pid: os.killpg(pid, signal.SIGINT),  # what a terminal does on Ctrl-C
    )
    assert seen.code == 130, seen.raw
    [run_dir] = tmp_path.glob("multirun/*")
    assert "] interrupted after step 3 of 9, " in "\n".join(seen.lines)
    assert "Traceback" not in seen.raw
    assert seen.raw.rindex(SHOW_CURSOR) > seen.raw.rindex("\x1b[?25l")
    assert summary(run_dir)["status"] == "interrupted"
    assert len(metrics(run_dir)) == 3
