"""Twenty SIGKILLs at random moments, saves among them: each time the run goes on, and ends as if nothing had been."""

import os
import random
import re
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import psutil
import pytest
from safetensors.torch import load_file
from torch import equal

from src.checkpoint.whole import checkpoints, newest_whole
from src.launch.folder import is_claimed
from tests.command import TRAIN, environment, metrics, summary, train
from tests.processes import end_session, survivors, wait_until

KILLS = 20
#: About 3 ms a step, and a save every fifth: a good part of the time goes into saves.
COMMAND = [
    "launch.device=cpu",
    "launch.nproc=2",
    "tracking=off",
    "model=mlp",
    "trainer.epochs=100000",
    "trainer.max_steps=3000",
    "trainer.eval_every=100000",
    "trainer.log_every=100",
    "checkpoint.every=5",
    "checkpoint.resume=auto",
]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("asynchronous", [False, True])
def test_twenty_kills_change_nothing(tmp_path: Path, request: pytest.FixtureRequest, asynchronous: bool) -> None:
    command = [*COMMAND, f"checkpoint.async={str(asynchronous).lower()}"]
    draw = random.Random(asynchronous)
    kills = 0
    # Each start trains for up to a second, so that the run is not over before the last kill.
    while kills < KILLS:
        process = start(tmp_path, [*command, "hydra.run.dir=out"])
        request.addfinalizer(partial(end_session, process.pid))
        log = tmp_path / "out" / "train.log"
        said = log.read_text().count("batch ") if log.exists() else 0
        begun = wait_until(lambda log=log, said=said: log.exists() and log.read_text().count("batch ") > said, 60)
        assert begun, (tmp_path / "text").read_text()
        time.sleep(draw.uniform(0.0, 1.0))
        # The launcher or a rank: the run goes on without its forecast.
        family = [process.pid, *rank_processes(tmp_path / "out")]
        victim = draw.choice([pid for pid in family if psutil.pid_exists(pid)])
        os.kill(victim, signal.SIGKILL)
        process.wait(60)
        assert survivors(process.pid, within_seconds=20) == []
        # A process whose main thread is gone is a zombie, and its others may still be in the kernel, writing.
        assert wait_until(lambda: not is_claimed(tmp_path / "out"), 20)
        if process.returncode == 0:  # a rank that had finished its work already
            break
        kills += 1
        newest, _ = newest_whole(tmp_path / "out" / "checkpoints")
        assert newest == next(iter(checkpoints(tmp_path / "out" / "checkpoints")), None), "what has its name is whole"
    assert kills >= KILLS // 2, "the run was over too soon to be a test"
    done = train(tmp_path, *command, "hydra.run.dir=out", timeout=300)
    assert done.code == 0, done.text
    unbroken = train(tmp_path, *command, "hydra.run.dir=unbroken", "checkpoint.every=null", timeout=300)
    assert unbroken.code == 0, unbroken.text
    ours, theirs = (load_file(tmp_path / name / "model.safetensors") for name in ("out", "unbroken"))
    assert all(equal(ours[name], weight) for name, weight in theirs.items())
    assert summary(tmp_path / "out")["steps"] == 3000
    last = {record["step"]: record for record in metrics(tmp_path / "out")}
    for record in metrics(tmp_path / "unbroken"):
        if record["step"] in last:
            assert last[record["step"]]["batch_hash"] == record["batch_hash"]
            assert last[record["step"]]["loss"] == record["loss"]


def rank_processes(run_dir: Path) -> list[int]:
    """Of the ranks that were started last."""
    logs = [(run_dir / f"rank_{world_rank}.log").read_text() for world_rank in range(2)]
    return [int(re.findall(r"rank \d of 2, process (\d+)", log)[-1]) for log in logs]


def start(cwd: Path, command: list[str]) -> "subprocess.Popen[bytes]":
    """train.py in a session of its own, so that all its processes can be found."""
    with (cwd / "text").open("w") as text:
        return subprocess.Popen(
            [sys.executable, str(TRAIN), *command],
            cwd=cwd,
            env=environment(),
            stdout=text,
            stderr=text,
            start_new_session=True,
        )
