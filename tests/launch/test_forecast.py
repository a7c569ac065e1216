"""The process that works out what a run will need: it costs the run nothing, and outlives neither it nor its parent."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from src.launch.folder import is_claimed
from src.plan.forecast import CRASHED, FORECAST, LATE, LOCK, Forecast, being_made
from tests.command import REPOSITORY, TRAIN, environment, summary, train
from tests.processes import end_session, survivors, wait_until

SHORT = ["trainer.max_steps=3", "launch.device=cpu", "launch.nproc=2", "tracking=off"]


def memory_of(run_dir: Path) -> dict[str, object]:
    found: dict[str, object] = summary(run_dir)["memory"]
    return found


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


def test_late_and_killed_are_told_apart(tmp_path: Path) -> None:
    assert Forecast.read(tmp_path).reason == LATE
    maker = subprocess.Popen(
        [
            sys.executable,
            "-c",
            f"""
import time
from pathlib import Path
from src.plan.forecast import being_made
with being_made(Path({str(tmp_path)!r})):
    time.sleep(100)
""",
        ],
        cwd=REPOSITORY,
    )
    try:
        assert wait_until(lambda: (tmp_path / LOCK).exists(), 60)
        assert Forecast.read(tmp_path, patience_seconds=0.2).reason == LATE
    finally:
        maker.kill()
        maker.wait()
    assert Forecast.read(tmp_path, patience_seconds=30.0).reason == CRASHED


def test_what_it_leaves_is_plain_json(tmp_path: Path) -> None:
    made = Forecast({0: 10, 4: 12}, "trace")
    (tmp_path / FORECAST).write_text(json.dumps(made.as_dict()))
    assert Forecast.read(tmp_path) == made
    assert made.peak == 12
    with being_made(tmp_path):  # of the next one, while this one stands
        assert Forecast.read(tmp_path) == made
    assert not (tmp_path / LOCK).exists()
