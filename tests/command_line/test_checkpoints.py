"""A run's checkpoints as a user finds them: kept, pruned, readable by anybody, on disks that are full or locked."""

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from safetensors.torch import load_file

from src.checkpoint.manifest import MANIFEST, Manifest
from src.checkpoint.whole import check, checkpoints
from tests.command import QUICK, Outcome, metrics, summary
from tests.command_line.conftest import SMALL
from tests.command_server import serve

LAST = "step_00000004"


def names(run_dir: Path) -> list[str]:
    return sorted(path.name for path in (run_dir / "checkpoints").iterdir())


def last_line(outcome: Outcome) -> str:
    """What the terminal says of a failure, before the line that names the log."""
    said, log = outcome.stderr.splitlines()[-2:]
    assert "its log:" in log
    return said


def test_a_sharded_run_leaves_checkpoints_that_hold_only_numbers_and_text(saved: Path) -> None:
    assert names(saved) == ["last", "step_00000002", LAST]
    assert (saved / "checkpoints" / "last").read_text() == f"{LAST}\n"
    assert [check(path) for path in checkpoints(saved / "checkpoints")] == [[], []]
    for path in (saved / "checkpoints").glob("step_*/*"):
        if path.name == MANIFEST:
            json.loads(path.read_text())
        else:
            assert path.suffix == ".safetensors"
            assert load_file(path)
    config = yaml.safe_load((saved / "config.yaml").read_text())  # refuses every tag that would make an object
    assert config["trainer"]["max_steps"] == 4
    assert load_file(saved / "model.safetensors").keys() == {
        name.removeprefix("model.")
        for name in Manifest.of_text((saved / "checkpoints" / LAST / MANIFEST).read_text()).tensors
        if name.startswith("model.")
    }


def test_keep_leaves_the_newest_by_number(tmp_path: Path) -> None:
    done = serve(tmp_path, *SMALL, "trainer.max_steps=12", "checkpoint.every=1", "checkpoint.keep=3")
    assert done.code == 0, done.text
    assert names(done.run_dir()) == ["last", "step_00000010", "step_00000011", "step_00000012"]


def test_keeping_one_leaves_the_best_and_the_last(tmp_path: Path) -> None:
    words = ["trainer.max_steps=4", "checkpoint.every=1", "checkpoint.keep=1", "checkpoint.monitor=loss"]
    words += ["trainer.eval_every=1", "optimizer=sgd", "optimizer.lr=0.1", "hydra.run.dir=run"]
    done = serve(tmp_path, *SMALL, *words, "schedule._target_=tests.doubles.ExplodingSchedule", "+schedule.after=2")
    assert done.code == 0, done.text
    run_dir = tmp_path / "run"
    losses = {record["step"]: record["loss"] for record in metrics(run_dir, "eval")}
    assert min(losses, key=losses.__getitem__) == 2, losses
    assert names(run_dir) == ["best", "last", "step_00000002", LAST]
    (tmp_path / "here").mkdir()
    for pointer, step in (("best", 2), ("last", 4)):
        there = f"hydra.run.dir={pointer}"
        words = [f"task.checkpoint={run_dir}/checkpoints/{pointer}", there, "schedule=constant"]
        done = serve(tmp_path / "here", "task=evaluate", *words)
        assert done.code == 0, done.text
        [evaluation] = metrics(tmp_path / "here" / pointer, "eval")
        assert evaluation["step"] == step
        assert evaluation["loss"] == pytest.approx(losses[step], rel=1e-6)  # sums of the same floats in the same order


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 3 MiB."""
    if os.geteuid() != 0:
        pytest.skip("mounting a small file system needs root")
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", folder], capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"no file system can be mounted here: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", folder], check=True)


@pytest.mark.parametrize("is_async", ["false", "true"])  # the next save, or the end, tells of one in the background
def test_a_full_disk_is_foretold_fails_the_run_and_leaves_a_checkpoint_to_go_on_from(
    small_disk: Path, tmp_path: Path, is_async: str
) -> None:
    run_dir = small_disk / "run"
    # 85,002 parameters x 4 bytes x (weights and AdamW's two moments) = 1.02 MB; the third one does not fit.
    words = ["model=mlp", "trainer.max_steps=8", "checkpoint.every=2", f"hydra.run.dir={run_dir}"]
    done = serve(tmp_path, *QUICK, *words, f"checkpoint.async={is_async}")
    assert done.code == 1, done.text
    assert "No space left on device" in last_line(done)
    assert last_line(done).endswith(f"The last whole one there is {LAST}.")
    assert summary(run_dir)["status"] == "failed"
    assert names(run_dir) == ["last", "step_00000002", LAST]
    [warning] = [line for line in (run_dir / "train.log").read_text().splitlines() if "may be too small" in line]
    # 3 to keep, one that is being written, and the best: 5.1 MB.
    assert "5 checkpoints of about 996 KiB each (checkpoint.keep=3, the best and the one being written)" in warning
    assert "take 4.9 MiB, and 3.0 MiB are free" in warning
    subprocess.run(["mount", "-o", "remount,size=30m", small_disk], check=True)
    done = serve(tmp_path, f"checkpoint.resume={run_dir}")
    assert done.code == 0, done.text
    assert [record["step"] for record in metrics(run_dir, "resume")] == [4]
    assert summary(run_dir)["steps"] == 8
    assert names(run_dir) == ["last", LAST, "step_00000006", "step_00000008"]


def test_a_roomy_disk_is_not_warned_of(saved: Path) -> None:
    assert "may be too small" not in (saved / "train.log").read_text()


def test_a_checkpoint_folder_that_may_not_be_written_is_named_and_can_be_read(run_dir: Path) -> None:
    here, folder = run_dir.parent / "here", run_dir / "checkpoints"
    folder.chmod(0o555)
    try:
        done = serve(here, f"checkpoint.resume={run_dir}", "trainer.max_steps=6", rights=False)
        assert done.code == 1, done.text
        assert f"The checkpoint of step 6 was not written to {folder}: rank 0: PermissionError" in last_line(done)
        assert last_line(done).endswith(f"The last whole one there is {LAST}.")
        words = ["trainer.max_steps=6", "hydra.run.dir=elsewhere"]
        done = serve(here, f"checkpoint.resume={folder}/last", *words, rights=False)
        assert done.code == 0, done.text
        assert summary(here / "elsewhere")["steps"] == 6
    finally:
        folder.chmod(0o755)
