"""One download a machine, whoever asks, and all or nothing (case DA-08)."""

import multiprocessing
import os

import pytest

from src.errors import Refused
from tests.command import QUICK, environment, summary, train
from tests.data.doubles import KilledMNIST, RecordedMNIST, UnreachableMNIST
from tests.data.fetching import CPU

SHAPE = {"image_shape": [1, 28, 28], "num_classes": 10}


def prepare(kind, root):
    """In a process of its own."""
    kind(**SHAPE, root=root).prepare()


def load(kind, root):
    """In a process of its own: what a rank does on a machine whose disk the parent never saw."""
    train_source, _ = kind(**SHAPE, root=root).load(CPU, seed=0)
    assert train_source.num_samples == 20


def run_at_once(function, kind, root, count):
    context = multiprocessing.get_context("forkserver")
    processes = [context.Process(target=function, args=(kind, root)) for _ in range(count)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    return [process.exitcode for process in processes]


@pytest.mark.parametrize("function", [prepare, load])
def test_of_three_processes_that_ask_at_once_one_downloads_and_the_others_wait(tmp_path, function):
    root = tmp_path / "mnist"
    assert run_at_once(function, RecordedMNIST, str(root), 3) == [0, 0, 0]
    assert len((tmp_path / "mnist.downloads").read_text().split()) == 1


def test_a_run_of_three_ranks_downloads_once_before_they_start(tmp_path):
    command = ["data=mnist", "data._target_=tests.data.doubles.RecordedMNIST", *QUICK, "launch.nproc=3"]
    outcome = train(tmp_path, *command, "trainer.micro_batch_size=2")
    assert outcome.code == 0, outcome.text
    assert len((tmp_path / "data" / "mnist.downloads").read_text().split()) == 1
    assert summary(outcome.run_dir())["eval"]["samples"] == 7


@pytest.mark.slow
def test_ranks_under_torchrun_download_once(tmp_path):
    import subprocess
    import sys

    from tests.command import TRAIN

    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(TRAIN)]
    command += ["data=mnist", "data._target_=tests.data.doubles.RecordedMNIST", "trainer.max_steps=1", "tracking=off"]
    done = subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len((tmp_path / "data" / "mnist.downloads").read_text().split()) == 1


def test_a_download_that_was_killed_leaves_no_half_file_and_the_next_one_cleans_up(tmp_path):
    root = tmp_path / "mnist"
    assert run_at_once(prepare, KilledMNIST, str(root), 1) == [-9]
    assert not RecordedMNIST(**SHAPE, root=str(root)).is_complete()
    assert [path.name[:9] for path in root.iterdir() if path.is_dir()] == [".partial-"]
    RecordedMNIST(**SHAPE, root=str(root)).prepare()
    assert sorted(path.name for path in root.iterdir()) == [".download.lock", "MNIST"]


def test_files_that_are_there_are_used_from_a_folder_that_can_not_be_written(tmp_path):
    root = tmp_path / "mnist"
    RecordedMNIST(**SHAPE, root=str(root)).prepare()
    for path in [*root.rglob("*"), root]:
        path.chmod(0o500 if path.is_dir() else 0o400)
    UnreachableMNIST(**SHAPE, root=str(root)).prepare()
    root.chmod(0o700)


def test_a_root_that_is_a_file_is_refused_in_one_line(tmp_path):
    (tmp_path / "mnist").write_text("")
    with pytest.raises(Refused, match="File exists") as refused:
        UnreachableMNIST(**SHAPE, root=str(tmp_path / "mnist")).prepare()
    assert len(refused.value.problems) == 1
    assert os.linesep not in refused.value.problems[0]
