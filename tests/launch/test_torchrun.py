"""Under torchrun: one folder, rank 0's configuration, and an end that names who failed."""

import re
import socket
import subprocess
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import yaml
from torch.distributed import HashStore

from src.environment import Ranks
from src.launch import parent
from tests.command import QUICK, TRAIN, Outcome, environment, metrics, summary
from tests.command_server import serve
from tests.launch.test_parent import LATE

RAISES = ["data._target_=tests.doubles.MisbehavingDigits", "+data.what=raise"]


def torchrun(
    cwd: Path,
    *overrides: str,
    module: str = "torch.distributed.run",
    options: tuple[str, ...] = (),
    **env: str | None,
) -> Outcome:
    """python -m torch.distributed.run --nproc-per-node 2 <options> train.py <overrides>, to its end."""
    command = [sys.executable, "-m", module, "--nproc-per-node", "2", "--master-port", str(free_port()), *options]
    done = subprocess.run(
        [*command, str(TRAIN), *overrides],
        cwd=cwd,
        env=environment(**env),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return Outcome(done.returncode, done.stdout, done.stderr, cwd)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(scope="module")
def under_torchrun(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    outcome = torchrun(tmp_path_factory.mktemp("torchrun"), *QUICK, *LATE, "seed=7")
    assert outcome.code == 0, outcome.text
    return outcome


def test_torchruns_ranks_share_rank_0s_folder_and_configuration(under_torchrun: Outcome) -> None:
    assert [path.name for path in under_torchrun.cwd.iterdir()] == ["multirun"]
    run_dir = under_torchrun.run_dir()
    assert summary(run_dir)["world_size"] == 2
    assert sorted(path.name for path in run_dir.glob("*.log")) == ["rank_0.log", "rank_1.log", "train.log"]
    assert yaml.safe_load((run_dir / "config.yaml").read_text())["seed"] == 7
    assert len(list(under_torchrun.cwd.rglob(".hydra"))) == 1


def test_torchruns_ranks_train_as_our_own_do(under_torchrun: Outcome, tmp_path: Path) -> None:
    own = serve(tmp_path, *QUICK, "seed=7")

    def losses(outcome: Outcome) -> list[Any]:
        return [(record["loss"], record["batch_hash"]) for record in metrics(outcome.run_dir())]

    assert losses(under_torchrun) == losses(own)


def test_the_old_launchers_flag_is_dropped(tmp_path: Path) -> None:
    outcome = torchrun(tmp_path, *QUICK, module="torch.distributed.launch")
    assert outcome.code == 0, outcome.text
    assert summary(outcome.run_dir())["world_size"] == 2


def test_a_refusal_under_torchrun_ends_all_ranks_at_once(tmp_path: Path) -> None:
    started = time.monotonic()
    outcome = torchrun(tmp_path, *QUICK, "trainer.accumulate=0")
    assert outcome.code == 1  # torchrun's own; the rank's was 2, as it reports
    assert "trainer.accumulate=0 is not a batch size; choose 1 or more." in outcome.stderr
    assert outcome.stderr.count("shardlab refused to start") == 1
    assert re.search(r"exitcode\s*: 2", outcome.stderr)
    assert time.monotonic() - started < 60
    assert not any(tmp_path.iterdir())


def test_under_torchrun_the_rank_that_failed_first_is_named(tmp_path: Path) -> None:
    outcome = torchrun(tmp_path, *QUICK, *RAISES)
    assert outcome.code == 1
    run_dir = outcome.run_dir()
    ours = [line for line in outcome.stderr.splitlines() if line.startswith("shardlab: ")]
    assert ours
    assert set(ours) == {"shardlab: rank 1 failed: ValueError: boom"}
    assert f"its log: {run_dir / 'rank_1.log'}" in outcome.stderr
    assert "ValueError: boom" in outcome.stderr.split("Root Cause")[1]  # torchrun's own report knows it too
    assert summary(run_dir)["status"] == "failed"
    assert summary(run_dir)["error"] == "rank 1: ValueError: boom"
    assert "boom" in (run_dir / "rank_1.log").read_text()


def test_asking_for_the_configuration_leaves_no_rank_waiting_for_a_run(tmp_path: Path) -> None:
    outcome = torchrun(tmp_path, "--cfg", "job")
    assert outcome.code == 0, outcome.text
    assert outcome.stdout.count("_target_: src.strategies.ddp.DDP") == 1
    assert not any(tmp_path.iterdir())


def test_ranks_wait_longer_than_a_store_does_for_what_rank_0_prepares(monkeypatch: pytest.MonkeyPatch) -> None:
    store = HashStore()
    store.set_timeout(timedelta(seconds=0.2))
    monkeypatch.setattr(parent, "meet", lambda: store)
    monkeypatch.setattr(parent, "torchrun_ranks", lambda: Ranks(1, 2, 1, 2))
    late = threading.Timer(1.0, store.set, (parent.GIVEN, "null"))  # as where nothing is left to run
    late.start()
    parent.follow()
    late.join()
