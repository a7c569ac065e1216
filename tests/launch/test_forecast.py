"""The process that works out what a run will need: it costs the run nothing, and outlives neither it nor its parent."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from src.launch.folder import is_claimed
from src.launch.forecast import forecasting
from src.plan.forecast import CRASHED, FORECAST, LATE, LOCK, Forecast
from tests.command import REPOSITORY, TRAIN, environment, summary, train
from tests.composing import composed
from tests.processes import end_session, survivors, wait_until

SHORT = ["trainer.max_steps=3", "launch.device=cpu", "launch.nproc=2", "tracking=off"]


def memory_of(run_dir: Path) -> dict[str, object]:
    found: dict[str, object] = summary(run_dir)["memory"]
    return found


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_a_run_says_what_was_expected_what_was_measured_and_the_error(tmp_path: Path) -> None:
    # Long enough for the trace to be there in time on a busy machine.
    done = train(tmp_path, "model=gpt_tiny", *SHORT, "trainer.max_steps=40", "hydra.run.dir=out")
    assert done.code == 0, done.text
    found = memory_of(tmp_path / "out")
    assert found["method"] == "trace"
    assert isinstance(found["predicted_bytes"], int)
    assert abs(float(str(found["error"]))) <= 0.03  # the bar of the median, which a trace meets throughout
    measured = found["measured_bytes"]
    assert isinstance(measured, list)
    assert len(measured) == 2
    assert "expected (trace)" in done.text


@pytest.mark.timeout(200)
def test_a_model_that_can_not_be_traced_trains_and_the_reason_is_told(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        "import os, torch\n"
        "class Model(torch.nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.layer = torch.nn.Linear(64, 10)\n"
        "    def forward(self, images):\n"
        "        if type(images) is not torch.Tensor:\n"
        "            raise RuntimeError('no fakes here')\n"
        "        return self.layer(images.flatten(1))\n"
    )
    overrides = ["model=mlp", "~model.image_shape", "~model.hidden", "~model.num_classes", "model._target_=own.Model"]
    longer = ["trainer.epochs=40", "trainer.max_steps=null", "hydra.run.dir=out"]
    done = train(tmp_path, *overrides, *SHORT, *longer, PYTHONPATH=f"{tmp_path}:{REPOSITORY}")
    assert done.code == 0, done.text
    found = memory_of(tmp_path / "out")
    assert found["predicted_bytes"] is None
    assert "no fakes here" in str(found["reason"])
    assert "measured, no forecast" in done.text


@pytest.mark.timeout(200)
def test_it_goes_with_a_parent_that_is_killed(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    command = [sys.executable, str(TRAIN), "model=gpt_124m", "data=synthetic_tokens", *SHORT, "hydra.run.dir=out"]
    process = subprocess.Popen(
        command,
        cwd=tmp_path,
        env=environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    request.addfinalizer(lambda: end_session(process.pid))
    assert wait_until(lambda: (tmp_path / "out" / "config.yaml").exists(), 100)
    os.kill(process.pid, signal.SIGKILL)
    process.wait(20)
    assert survivors(process.pid, within_seconds=60) == []
    assert wait_until(lambda: not is_claimed(tmp_path / "out"), 20)


#: A model that behaves like any other but on fake tensors, where it does as {what} says, with a process of its own.
OWN = """
import os, signal, subprocess, sys, time, torch
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(64, 10)
    def forward(self, images):
        if type(images) is not torch.Tensor:
            open("child", "w").write(str(subprocess.Popen(["sleep", "1000"]).pid))
            print("no memory for fakes", file=sys.stderr, flush=True)
            {what}
        return self.layer(images.flatten(1))
"""
OWN_MODEL = ["model=mlp", "~model.image_shape", "~model.hidden", "~model.num_classes", "model._target_=own.Model"]


@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    ("what", "reason"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", "killed by SIGKILL (often the system, out of memory)"),
        ("os._exit(3)", "left with exit code 3 and no message"),
    ],
)
def test_a_maker_that_is_gone_is_told_with_its_last_line(tmp_path: Path, what: str, reason: str) -> None:
    (tmp_path / "own.py").write_text(OWN.format(what=what))
    longer = ["trainer.epochs=40", "trainer.max_steps=null", "hydra.run.dir=out"]
    done = train(tmp_path, *OWN_MODEL, *SHORT, *longer, PYTHONPATH=f"{tmp_path}:{REPOSITORY}")
    assert done.code == 0, done.text
    assert memory_of(tmp_path / "out")["reason"] == (
        f"the process that makes it: {reason}; its last line: no memory for fakes"
    )
    assert "no memory for fakes" in done.text
    assert is_gone(int((tmp_path / "child").read_text()))


@pytest.mark.timeout(200)
@pytest.mark.parametrize("who", ["launcher", "watcher"])
def test_nothing_that_it_started_outlives_who_is_killed(
    tmp_path: Path, request: pytest.FixtureRequest, who: str
) -> None:
    (tmp_path / "own.py").write_text(OWN.format(what="time.sleep(1000)"))
    endless = ["trainer.epochs=100000", "trainer.max_steps=null", "hydra.run.dir=out"]
    process = subprocess.Popen(
        [sys.executable, str(TRAIN), *OWN_MODEL, *SHORT, *endless],
        cwd=tmp_path,
        env=environment(PYTHONPATH=f"{tmp_path}:{REPOSITORY}"),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    request.addfinalizer(lambda: end_session(process.pid))
    assert wait_until(lambda: (tmp_path / "child").exists() and (tmp_path / "child").read_text() != "", 100)
    child = psutil.Process(int((tmp_path / "child").read_text()))
    maker = child.parent()
    assert maker is not None
    watcher = maker.parent()
    assert watcher is not None
    if who == "launcher":
        process.kill()
        process.wait(20)
        assert survivors(process.pid, within_seconds=60) == []
        return
    watcher.kill()
    assert wait_until(lambda: not maker.is_running() or maker.status() == psutil.STATUS_ZOMBIE, 20)
    process.send_signal(signal.SIGINT)
    process.wait(60)
    assert survivors(process.pid, within_seconds=20) == []


def is_gone(pid: int) -> bool:
    return wait_until(lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE, 20)


def test_who_is_late_is_told_from_who_left_without_a_word(tmp_path: Path) -> None:
    assert Forecast.read(tmp_path).reason == LATE
    holding = (
        f"import fcntl, time; f = open({str(tmp_path / LOCK)!r}, 'w'); fcntl.flock(f, 2); print(); time.sleep(100)"
    )
    maker = subprocess.Popen([sys.executable, "-uc", holding], stdout=subprocess.PIPE)
    try:
        assert maker.stdout is not None
        maker.stdout.readline()
        assert Forecast.read(tmp_path, patience_seconds=0.2).reason == LATE
    finally:
        maker.kill()
        maker.communicate()
    assert Forecast.read(tmp_path, patience_seconds=30.0).reason == CRASHED


def test_what_it_leaves_is_plain_json(tmp_path: Path) -> None:
    made = Forecast({0: 10, 4: 12}, "trace")
    made.publish(tmp_path)
    assert json.loads((tmp_path / FORECAST).read_text())["peaks"] == {"0": 10, "4": 12}
    assert Forecast.read(tmp_path) == made
    assert made.peak == 12


@pytest.mark.timeout(200)
def test_where_ranks_use_gpus_an_interpreter_of_its_own_makes_it(tmp_path: Path) -> None:
    config, problems = composed("model=mlp", "launch.device=cpu", "launch.nproc=2")
    assert problems == []
    with forecasting(config, tmp_path, "cuda"):
        assert Forecast.read(tmp_path, patience_seconds=100).method == "trace"
