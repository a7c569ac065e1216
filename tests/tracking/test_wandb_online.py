"""Online: the real client against a server of our own, in the default mode."""

import json
import os
import time
from pathlib import Path
from typing import Any

from src.tracking import wandb as tracking
from src.tracking.base import RunInfo
from src.tracking.wandb import WandbTracker
from src.world import World
from tests.command import metrics, summary, train
from tests.tracking.wandb_runs import TINY, home, wait_until_gone
from tests.tracking.wandb_server import wandb_server
from tests.workers import Pool

KEY = "0123456789" * 4


def test_with_a_key_the_run_goes_online_whole_and_is_closed_with_the_exit_code(tmp_path: Path) -> None:
    with wandb_server() as server:
        env = {**home(tmp_path), "WANDB_BASE_URL": server.url, "WANDB_API_KEY": KEY, "WANDB_PROJECT": "mine"}
        outcome = train(tmp_path, *TINY, "tracking.group=together", **env)
    assert outcome.code == 0, outcome.text
    [run_dir] = tmp_path.glob("multirun/*")
    told = server.runs[0]
    assert summary(run_dir)["wandb"] == {"id": told["name"], "mode": "online"}
    assert (told["project"], told["groupName"]) == ("mine", "together")
    assert json.loads(told["config"])["trainer"]["value"]["max_steps"] == 2
    losses = {line["step"]: line["train/loss"] for line in server.history() if "train/loss" in line}
    assert losses == {record["step"]: record["loss"] for record in metrics(run_dir)}
    [last] = [stream for stream in server.streams if stream.get("complete")]
    assert last["exitcode"] == 0
    # The run's page is the last thing that a person reads; the key is nowhere.
    assert outcome.stdout.splitlines()[-1].strip() == f"{server.url}/someone/mine/runs/{told['name']}"
    assert KEY not in outcome.text
    assert not any(KEY in path.read_text(errors="replace") for path in run_dir.rglob("*") if path.is_file())
    assert wait_until_gone(tmp_path, 5) == []  # of what is killed at the end the kernel may need a moment


def test_a_server_that_stops_answering_does_not_hold_the_run_up(tmp_path: Path, pool: Pool) -> None:
    with wandb_server(falls_silent=True) as server:
        [told] = pool.run(1, follow_until_silence, str(tmp_path), server.url)
    assert told["mode"] == "online"
    # 2 s in silence and FINISH_SECONDS, here 2 s; the rest is for a busy machine.
    assert told["finish_seconds"] < 15


def follow_until_silence(world: World, folder: str, url: str) -> dict[str, Any]:
    os.environ.update(HOME=folder, WANDB_BASE_URL=url, WANDB_API_KEY=KEY)
    tracking.FINISH_SECONDS = 2.0
    tracker = WandbTracker(project="tests", init_timeout_seconds=60)
    tracker.start(RunInfo(Path(folder), "name", {}))
    tracker.log({"kind": "train", "step": 1, "loss": 1.0})
    assert tracker.opened.wait(60)
    started = time.monotonic()
    tracker.finish(0, {})
    return {"mode": tracker.identity()["mode"], "finish_seconds": time.monotonic() - started}
