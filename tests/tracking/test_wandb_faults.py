"""No key, no network, no helper process, no patience: W&B may fail in every way, and the training goes on.

The letters WB-.. name the reported faults that a test stands for.
"""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from src.tracking import wandb as tracking
from src.tracking.base import RunInfo
from src.tracking.wandb import WandbTracker
from src.world import World
from tests.command import QUICK, TRAIN, metrics, summary, train
from tests.command_server import serve
from tests.tracking.terminal import watch
from tests.tracking.wandb_runs import (
    TINY,
    exit_code,
    folders,
    history,
    home,
    of_type,
    processes_in,
    run_of,
    wait_until_gone,
)
from tests.workers import Pool

KEY = "0123456789" * 4
SLEEPY = ["data._target_=tests.doubles.MisbehavingDigits", "+data.what=sleep", "+data.on_rank=null"]


def test_online_without_a_key_is_refused_before_the_start_with_both_ways_out(tmp_path: Path) -> None:  # WB-08
    env = home(tmp_path)
    cwd = tmp_path / "cwd"
    cwd.mkdir()
    outcome = serve(cwd, *QUICK[:-1], "tracking.mode=online", **env)
    assert outcome.is_refusal()
    [line] = outcome.problems
    assert line.startswith("tracking.mode=online, but ")
    assert "WANDB_API_KEY" in line
    assert "tracking=offline" in line


@pytest.mark.parametrize("variable", ["WANDB_MODE=offline", "WANDB_API_KEY=too-short"])
def test_online_is_refused_where_the_environment_says_otherwise(tmp_path: Path, variable: str) -> None:
    name, _, value = variable.partition("=")
    cwd = tmp_path / "cwd"
    cwd.mkdir()
    outcome = serve(cwd, *QUICK[:-1], "tracking.mode=online", **{**home(tmp_path), name: value})
    assert outcome.is_refusal()
    assert len(outcome.problems) == 1
    assert name in outcome.problems[0]


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("tracking.mode=onlin", "Did you mean online?"),
        (f"tracking.tags=[{'x' * 65}]", "65 characters"),
        ("tracking.tags=['']", "0 characters"),
        ("tracking.init_timeout_seconds=0", "must be more than 0"),
    ],
)
def test_impossible_settings_are_refused_before_the_start(tmp_path: Path, override: str, words: str) -> None:
    outcome = serve(tmp_path, *QUICK[:-1], override)
    assert outcome.is_refusal()
    assert words in outcome.problems[0]


def test_a_key_in_netrc_is_enough_to_go_online(tmp_path: Path) -> None:
    env = home(tmp_path)
    netrc = tmp_path / "home" / ".netrc"
    netrc.write_text(f"machine api.wandb.ai\n  login user\n  password {KEY}\n")
    netrc.chmod(0o600)
    code = "from src.tracking.wandb_client import login_problem; print(login_problem())"
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60)
    assert done.stdout == "None\n", done.stderr
    assert done.stderr == ""


@pytest.mark.parametrize("mode", ["auto", "online"])
def test_nobody_is_prompted_at_a_terminal_either(tmp_path: Path, mode: str) -> None:  # WB-08
    seen = watch([sys.executable, str(TRAIN), *TINY, f"tracking.mode={mode}"], tmp_path, home(tmp_path))
    assert "wandb:" not in seen.raw  # its prompt: "wandb: (1) Create a W&B account"
    if mode == "online":
        assert seen.code == 2
        return
    assert seen.code == 0, seen.raw
    [run_dir] = tmp_path.glob("multirun/*")
    [folder] = folders(run_dir)
    assert exit_code(folder) == 0


@pytest.fixture
def silent_server() -> Iterator[str]:
    """The address of a server that takes connections and never answers, as behind many a firewall."""
    with socket.create_server(("127.0.0.1", 0), backlog=50) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


@pytest.mark.parametrize("server", ["refusing", pytest.param("silent", marks=pytest.mark.slow)])
def test_an_unreachable_server_costs_a_warning_and_no_record(
    tmp_path: Path, silent_server: str, server: str
) -> None:  # WB-04
    url = "http://127.0.0.1:9" if server == "refusing" else silent_server
    wishes = ["tracking.mode=online", "tracking.init_timeout_seconds=3"]
    outcome = train(tmp_path, *TINY, *wishes, **{**home(tmp_path), "WANDB_BASE_URL": url, "WANDB_API_KEY": KEY})
    assert outcome.code == 0, outcome.text
    assert outcome.text.count("can't be reached; the run goes on offline") == 1
    run_dir = outcome.run_dir()
    [folder] = [path for path in folders(run_dir) if path.name.startswith("offline-run-")]
    assert exit_code(folder) == 0
    assert [item["train/loss"] for item in history(folder) if "train/loss" in item] == [
        record["loss"] for record in metrics(run_dir)
    ]
    assert summary(run_dir)["wandb"] == {"id": run_of(folder)["run_id"], "mode": "offline"}
    # Nobody waited for the server before training: both steps were over before it was given up.
    assert outcome.stdout.index("step 2/2") < outcome.stdout.index("can't be reached")
    assert wait_until_gone(tmp_path, 5) == []  # of what is killed at the end the kernel may need a moment


def test_wandb_mode_disabled_makes_no_run(tmp_path: Path) -> None:
    outcome = train(tmp_path, *TINY, **{**home(tmp_path), "WANDB_MODE": "disabled"})
    assert outcome.code == 0, outcome.text
    assert not (outcome.run_dir() / "wandb").exists()
    assert summary(outcome.run_dir())["wandb"] == {"id": None, "mode": "disabled"}
    assert "wandb sync" not in outcome.stdout


def start_sleeping(tmp_path: Path, seconds: int) -> tuple[subprocess.Popen[str], int]:
    """A run of nine steps that sleeps before its third. The process, and that of W&B's helper, the W&B run open."""
    sleep = [*SLEEPY, "+data.at=3", f"+data.seconds={seconds}"]
    process = subprocess.Popen(
        [sys.executable, str(TRAIN), "tracking=offline", *sleep, *TINY, "trainer.max_steps=9"],
        cwd=tmp_path,
        env=home(tmp_path),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    wait_for(lambda: list(tmp_path.glob("multirun/*/wandb/*/*.wandb")), 90)
    [service] = processes_in(tmp_path, "wandb-core")
    return process, service


def wait_for(condition: Callable[[], Any], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} s"
        time.sleep(0.05)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_nothing_is_left_after_a_signal(tmp_path: Path, number: signal.Signals) -> None:  # WB-13
    process, _ = start_sleeping(tmp_path, seconds=5)  # of a step that SIGINT lets finish
    process.send_signal(number)
    process.communicate(timeout=60)
    assert process.returncode == (130 if number == signal.SIGINT else -signal.SIGKILL)
    assert wait_until_gone(tmp_path, 20) == []
    [run_dir] = tmp_path.glob("multirun/*")
    [folder] = folders(run_dir)
    assert exit_code(folder) == 130  # the ranks of a killed parent get a SIGINT


def test_training_outlives_the_helper_process_with_one_warning(tmp_path: Path) -> None:  # WB-13
    process, service = start_sleeping(tmp_path, seconds=5)
    os.kill(service, signal.SIGKILL)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 0, output
    assert output.count("Weights & Biases stopped following") == 1
    assert "Traceback" not in output
    [run_dir] = tmp_path.glob("multirun/*")
    assert [record["step"] for record in metrics(run_dir)] == list(range(1, 10))
    assert summary(run_dir)["status"] == "finished"


def follow(world: World, run_dir: str, cache: str, steps: list[int], **options: Any) -> dict[str, Any]:
    """In a process of its own: a tracker from start to finish. options: earlier_id, and what happens to the service."""
    os.environ.update(HOME=cache)
    tracker = WandbTracker(mode="offline", project="tests")
    tracker.start(RunInfo(Path(run_dir), "name", {"a": 1}, earlier_id=options.get("earlier_id")))
    for step in steps:
        tracker.log({"kind": "train", "step": step, "loss": 1.0 / step})
    if options.get("freeze"):
        wait_for(lambda: tracker.identity()["mode"], 60)
        assert tracker.client is not None
        for pid in tracker.client.service_pids:
            os.kill(pid, signal.SIGSTOP)
        tracking.FINISH_SECONDS = 1.0
    before = sys.exit, sys.excepthook, signal.getsignal(signal.SIGINT)
    started = time.monotonic()
    tracker.finish(0, {"status": "finished"})
    return {
        "id": tracker.identity()["id"],
        "seconds": time.monotonic() - started,
        "hooks_kept": before == (sys.exit, sys.excepthook, signal.getsignal(signal.SIGINT)),
        "sys_exit": sys.exit.__module__,
        "service_pids": tracker.client.service_pids if tracker.client else [],
        "closed": tracker.closed.wait(20),
    }


def test_a_helper_process_that_hangs_is_waited_for_within_bounds_and_ended(tmp_path: Path, pool: Pool) -> None:
    [told] = pool.run(1, follow_frozen, str(tmp_path))
    # 2 s in silence and FINISH_SECONDS, here 1 s; the rest is for a busy machine.
    assert 2.9 < told["seconds"] < 10
    assert told["closed"]  # the thread came back, so nothing waits at the interpreter's exit
    assert told["service_pids"]
    for pid in told["service_pids"]:
        assert not Path(f"/proc/{pid}/cmdline").exists() or not Path(f"/proc/{pid}/cmdline").read_bytes()


def follow_frozen(world: World, folder: str) -> dict[str, Any]:
    return follow(world, folder, folder, [1, 2], freeze=True)


def test_a_continued_run_keeps_its_id_and_both_segments_and_may_repeat_steps(
    tmp_path: Path, pool: Pool
) -> None:  # WB-03
    [first] = pool.run(1, follow_steps, str(tmp_path), [1, 2, 3, 4], None)
    [second] = pool.run(1, follow_steps, str(tmp_path), [4, 5], first["id"])
    assert second["id"] == first["id"]
    assert first["hooks_kept"]
    assert first["sys_exit"] == "sys"
    segments = folders(tmp_path)
    assert [[item["step"] for item in history(segment)] for segment in segments] == [[1, 2, 3, 4], [4, 5]]
    assert {run_of(segment)["run_id"] for segment in segments} == {first["id"]}
    assert all(of_type(segment, "exit") for segment in segments)


def follow_steps(world: World, folder: str, steps: list[int], earlier_id: str | None) -> dict[str, Any]:
    return follow(world, folder, folder, steps, earlier_id=earlier_id)
