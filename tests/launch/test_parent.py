"""Starting ranks: one folder, one configuration, a log a rank; in place, forked, spawned and under torchrun."""

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.command import QUICK, REPOSITORY, TRAIN, Outcome, environment, metrics, summary, train
from tests.command_server import serve
from tests.processes import survivors

LATE = ["data._target_=tests.doubles.MisbehavingDigits", "+data.what=sleep", "+data.at=1", "+data.seconds=1.2"]


@pytest.fixture(scope="module")
def three_ranks(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """A run of three ranks, the last of which is late by more than a second."""
    words = ["strategy=ddp", *LATE, "+data.on_rank=2", *QUICK, "launch.nproc=3"]
    outcome = train(tmp_path_factory.mktemp("three"), *words)
    assert outcome.code == 0, outcome.text
    return outcome


def test_late_ranks_share_the_one_folder_that_the_parent_chose(three_ranks: Outcome) -> None:
    assert [path.name for path in three_ranks.cwd.iterdir()] == ["multirun"]
    assert len(list((three_ranks.cwd / "multirun").iterdir())) == 1
    assert summary(three_ranks.run_dir())["world_size"] == 3


def test_hydras_files_are_written_once_and_valid(three_ranks: Outcome) -> None:
    [folder] = three_ranks.cwd.rglob(".hydra")
    assert sorted(path.name for path in folder.iterdir()) == ["config.yaml", "hydra.yaml", "overrides.yaml"]
    for path in folder.iterdir():
        assert yaml.safe_load(path.read_text())
    assert not list(three_ranks.cwd.rglob("multirun.yaml"))


def test_config_yaml_is_plain_and_resolved(three_ranks: Outcome) -> None:
    text = (three_ranks.run_dir() / "config.yaml").read_text()
    config = yaml.safe_load(text)
    assert "${" not in text
    assert config["model"]["num_classes"] == 10  # interpolated from data
    assert config["trainer"]["max_steps"] == 2
    assert set(config) == {
        *("seed", "name", "task", "strategy", "sharding", "precision", "model", "data", "optimizer"),
        *("schedule", "compression", "tracking", "trainer", "launch", "checkpoint"),
    }


def test_every_rank_has_its_own_log_and_no_line_twice(three_ranks: Outcome) -> None:
    logs = {path.name: path.read_text().splitlines() for path in three_ranks.run_dir().glob("*.log")}
    assert sorted(logs) == ["rank_0.log", "rank_1.log", "rank_2.log", "train.log"]
    for number in range(3):
        lines = logs[f"rank_{number}.log"]
        assert f"rank {number} of 3, process " in lines[0]
        assert len(lines) == len(set(lines))
    assert len({re.search(r"process (\d+)", logs[f"rank_{n}.log"][0])[1] for n in range(3)}) == 3  # type: ignore[index]


def test_train_log_says_what_the_terminal_said(three_ranks: Outcome) -> None:
    said = (three_ranks.run_dir() / "train.log").read_text().splitlines()
    assert any("step 2/2" in line for line in said)
    assert any("over gloo" in line for line in said)  # the backend follows the device
    assert len(said) == len(set(said))
    on_terminal = three_ranks.stdout.splitlines()
    assert [line for line in said if line not in on_terminal] == []


def test_cores_are_shared_out_among_the_ranks(three_ranks: Outcome) -> None:
    threads = max(1, len(os.sched_getaffinity(0)) // 3)
    for path in three_ranks.run_dir().glob("rank_*.log"):
        assert f"with {threads} thread(s)" in path.read_text()


def test_a_users_number_of_threads_is_respected(tmp_path: Path) -> None:
    # Parallel work in the parent as well: its threads would not survive the fork.
    outcome = train(tmp_path, *QUICK, "data._target_=tests.doubles.DigitsAfterParallelWork", OMP_NUM_THREADS="2")
    assert outcome.code == 0, outcome.text
    for path in outcome.run_dir().glob("rank_*.log"):
        assert "with 2 thread(s)" in path.read_text()


def test_two_runs_at_once_finish_though_port_29500_is_taken(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        taken.bind(("127.0.0.1", 29500))
        taken.listen()
        command = [sys.executable, str(TRAIN), *QUICK]
        env = environment(MASTER_ADDR="127.0.0.1", MASTER_PORT="29500")  # as some shells' profiles export
        both = [subprocess.Popen(command, cwd=tmp_path, env=env, stdout=subprocess.DEVNULL) for _ in range(2)]
        assert [process.wait(timeout=120) for process in both] == [0, 0]
    folders = list((tmp_path / "multirun").iterdir())
    assert len(folders) == 2
    assert [summary(folder)["status"] for folder in folders] == ["finished"] * 2


def test_one_process_runs_in_place_so_that_a_debugger_works(tmp_path: Path) -> None:
    words = [*QUICK, "launch.nproc=1", "model=mlp", "model._target_=tests.doubles.BreakpointMLP"]
    process = subprocess.Popen(
        [sys.executable, str(TRAIN), *words],
        cwd=tmp_path,
        env=environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    stdout, stderr = process.communicate("p 'six times seven', 6 * 7\ncontinue\n", timeout=120)
    assert process.returncode == 0, stderr
    assert "(Pdb) ('six times seven', 42)" in stdout
    [log] = tmp_path.rglob("rank_0.log")
    assert f"rank 0 of 1, process {process.pid}," in log.read_text()


def test_ranks_are_spawned_where_forking_is_not_safe(tmp_path: Path) -> None:
    outcome = train(tmp_path, *QUICK, "data._target_=tests.doubles.DigitsWithCudaInUse")
    assert outcome.code == 0, outcome.text
    assert summary(outcome.run_dir())["world_size"] == 2
    assert [record["step"] for record in metrics(outcome.run_dir())] == [1, 2]
    assert outcome.stdout.count("run folder ") == 2  # once at the start and once in the table: nobody started twice


def test_ranks_get_what_the_parent_composed_from_a_folder_of_the_users(tmp_path: Path) -> None:
    (tmp_path / "extra" / "experiment").mkdir(parents=True)
    (tmp_path / "extra" / "experiment" / "mine.yaml").write_text(
        "# @package _global_\nname: mine\ndata: {_target_: tests.doubles.MisbehavingDigits, what: sleep, seconds: 0}\n"
    )
    (tmp_path / "work").mkdir()
    words = ["--config-dir", "../extra", "experiment=mine", "~strategy.static_graph", "++data.at=1", *QUICK]
    outcome = serve(tmp_path / "work", *words)
    assert outcome.code == 0, outcome.text
    config = yaml.safe_load((outcome.run_dir() / "config.yaml").read_text())
    assert config["name"] == "mine"
    assert "static_graph" not in config["strategy"]
    assert config["data"]["at"] == 1
    assert summary(outcome.run_dir())["world_size"] == 2


def test_a_run_may_change_into_its_folder(tmp_path: Path) -> None:
    outcome = serve(tmp_path, *QUICK, "hydra.job.chdir=true", "hydra.run.dir=here")
    assert outcome.code == 0, outcome.text
    assert outcome.run_dir() == tmp_path / "here"
    assert summary(tmp_path / "here")["status"] == "finished"
    assert not list((tmp_path / "here").rglob("here"))


def test_names_with_spaces_quotes_and_accents_go_through(tmp_path: Path) -> None:
    name = 'für "élise", no. 1 = 水'
    outcome = serve(tmp_path, *QUICK, "launch.nproc=1", "name='für \"élise\", no. 1 = 水'")
    assert outcome.code == 0, outcome.text
    assert yaml.safe_load((outcome.run_dir() / "config.yaml").read_text())["name"] == name


def test_an_interpolation_typed_as_an_override_stays_as_it_was_typed(tmp_path: Path) -> None:
    outcome = serve(tmp_path, *QUICK, "launch.nproc=1", "model.num_classes=${data.num_classes}")
    assert outcome.code == 0, outcome.text
    overrides = yaml.safe_load((outcome.run_dir() / ".hydra" / "overrides.yaml").read_text())
    assert "model.num_classes=${data.num_classes}" in overrides


def test_no_thread_of_openmp_is_there_when_the_parent_forks(tmp_path: Path) -> None:
    program = (
        "import os\n"
        "from src.launch import parent\n"  # everything that a parent imports
        "from src.command.job import job_problems\n"
        "from hydra import compose, initialize_config_dir\n"
        "from src import config\n"
        "config.register()\n"
        f"initialize_config_dir('{REPOSITORY / 'conf'}', version_base='1.3').__enter__()\n"
        "before = len(os.listdir('/proc/self/task'))\n"
        "print(job_problems(compose('config', overrides=['tracking=off']), [], fetch=True))\n"
        "print(len(os.listdir('/proc/self/task')) - before)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, env=environment(), capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["[]", "0"]


def test_nothing_of_a_run_is_left_when_it_is_over(tmp_path: Path) -> None:
    outcome = serve(tmp_path, *QUICK)
    assert outcome.code == 0, outcome.text
    assert survivors(outcome.session) == []


@pytest.mark.slow
def test_a_terminal_that_is_closed_in_the_middle_does_not_fail_the_run(tmp_path: Path) -> None:
    command = f"{sys.executable} {TRAIN} {' '.join(QUICK)} model=mlp"
    for ending in ("| head -1", ">/dev/full", ">&-"):
        folder = (
            tmp_path / ending.strip("|>/&- ").replace("/", "-").replace(" ", "")
            if ending != ">&-"
            else tmp_path / "closed"
        )
        folder.mkdir()
        shell = ["bash", "-o", "pipefail", "-c", f"{command} {ending}"]
        done = subprocess.run(
            shell, cwd=folder, env=environment(), capture_output=True, text=True, timeout=100, check=False
        )
        assert done.returncode == 0, (ending, done.stderr)
        [run_dir] = (folder / "multirun").iterdir()
        assert summary(run_dir)["status"] == "finished"


def test_two_runs_in_one_folder_are_not_mixed(tmp_path: Path) -> None:
    (tmp_path / "taken").mkdir()
    command = [sys.executable, str(TRAIN), *QUICK, "model=mlp", "hydra.run.dir=taken"]
    started = [subprocess.Popen(command, cwd=tmp_path, env=environment(), stderr=subprocess.DEVNULL) for _ in range(2)]
    assert sorted(process.wait(timeout=100) for process in started) == [0, 2]
    assert len(metrics(tmp_path / "taken")) == 2
