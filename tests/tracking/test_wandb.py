"""The real W&B client, offline, in whole runs: one run a job, closed inside the job, with all that was measured.

The letters WB-.. name the reported faults that a test stands for.
"""

import subprocess
import sys
from pathlib import Path

import pytest

from src.tracking.wandb import client_command
from tests.command import TRAIN, Outcome, metrics, summary, train
from tests.tracking.wandb_runs import (
    TINY,
    exit_code,
    folders,
    history,
    home,
    of_type,
    records,
    run_of,
    wait_until_gone,
)


def tracked(cwd: Path, *overrides: str, **env: str | None) -> Outcome:
    return train(cwd, *overrides, *TINY, **home(cwd, **env))


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """Two ranks, two steps, an evaluation after each, under the default tracking and without an account."""
    cwd = tmp_path_factory.mktemp("finished")
    outcome = tracked(cwd, "strategy=fsdp", "trainer.eval_every=1", "tracking.tags=[mine]", "trainer.epochs=3")
    assert outcome.code == 0, outcome.text
    return outcome


def test_two_ranks_make_one_run(finished: Outcome) -> None:  # WB-01
    [folder] = folders(finished.run_dir())
    assert folder.name.startswith("offline-run-")
    assert exit_code(folder) == 0


def test_the_run_is_known_by_one_id_in_the_summary_and_in_wandb(finished: Outcome) -> None:  # WB-03
    [folder] = folders(finished.run_dir())
    assert summary(finished.run_dir())["wandb"] == {"id": run_of(folder)["run_id"], "mode": "offline"}


def test_wandb_gets_every_line_of_the_metrics_under_our_own_step(finished: Outcome) -> None:  # WB-03
    run_dir = finished.run_dir()
    [folder] = folders(run_dir)
    logged = history(folder)
    for kind in ("train", "eval", "epoch"):
        ours = metrics(run_dir, kind)
        assert ours, kind
        theirs = [item for item in logged if f"{kind}/loss" in item]
        assert [item["step"] for item in theirs] == [record["step"] for record in ours]
        for name in ours[0].keys() - {"kind", "step", "batch_hash"}:
            assert [item[f"{kind}/{name}"] for item in theirs if ours[0][name] is not None] == [
                record[name] for record in ours if ours[0][name] is not None
            ]
    assert len(logged) == sum(len(metrics(run_dir, kind)) for kind in ("train", "eval", "epoch"))
    # Every metric is drawn over "step", so a resumed run may repeat steps and loses none.
    axes = {
        record.get("glob_name") or record["name"]: record.get("step_metric") for record in of_type(folder, "metric")
    }
    assert axes["*"] == "step"


def test_the_configuration_reaches_wandb_nested_resolved_and_with_its_circumstances(finished: Outcome) -> None:  # WB-05
    [folder] = folders(finished.run_dir())
    config = run_of(folder)["config"]["update"]
    assert config["trainer"]["max_steps"] == 2
    assert config["sharding"]["level"] == "zero3"  # the strategy's default, no override
    assert config["model"]["num_classes"] == 10  # ${data.num_classes}
    assert config["world_size"] == 2
    assert "trainer.max_steps=2" in config["overrides"]
    commit = subprocess.run(["git", "-C", TRAIN.parent, "rev-parse", "HEAD"], capture_output=True, text=True).stdout
    if commit:  # in a copy without its history there is none to tell
        assert commit.startswith(config["git"]["commit"])
        assert isinstance(config["git"]["dirty"], bool)
    assert "${" not in str(config)


def test_the_run_is_named_by_its_overrides_and_tagged_by_its_choices(finished: Outcome) -> None:
    [folder] = folders(finished.run_dir())
    run = run_of(folder)
    assert "strategy=fsdp" in run["display_name"]
    assert run["project"] == "shardlab"
    assert set(run["tags"]) == {"fsdp", "zero3", "fp32", "mlp", "digits", "mine"}


def test_the_client_neither_prints_nor_reads_our_source_nor_outlives_the_run(finished: Outcome) -> None:
    assert "wandb:" not in finished.text
    [folder] = folders(finished.run_dir())
    assert "train.py" not in {
        Path(entry["path"]).name for files in of_type(folder, "files") for entry in files["files"]
    }
    assert not list(folder.rglob("*.patch"))
    assert not of_type(folder, "output")
    # What has been killed may take the kernel a moment on a busy machine.
    assert wait_until_gone(finished.cwd, 5) == []


def test_the_last_lines_are_commands_that_work(finished: Outcome) -> None:
    wandb = client_command()  # its path, where the environment is not activated
    look, upload = [line.strip() for line in finished.stdout.splitlines() if line.startswith(f"  {wandb} ")]
    assert look.startswith(f"{wandb} leet ")
    shown = subprocess.run(
        look.replace(f"{wandb} leet", f"{Path(sys.executable).parent}/wandb leet inspect --summary"),
        shell=True,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert "finished (exit code 0)" in shown.stdout
    listed = subprocess.run(
        upload.replace(f"{wandb} sync", f"{Path(sys.executable).parent}/wandb sync --dry-run"),
        shell=True,
        capture_output=True,
        text=True,
        timeout=60,
        env=home(finished.cwd),
    )
    [folder] = folders(finished.run_dir())
    assert folder.name in listed.stdout + listed.stderr


def test_under_torchrun_there_is_one_run_too(tmp_path: Path) -> None:  # WB-01
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(TRAIN)]
    done = subprocess.run(
        [*command, *[word for word in TINY if "nproc" not in word], "tracking=offline"],
        cwd=tmp_path,
        env=home(tmp_path),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    outcome = Outcome(done.returncode, done.stdout, done.stderr, tmp_path)
    [folder] = folders(outcome.run_dir())
    assert [item["step"] for item in history(folder) if "train/loss" in item] == [1, 2]
    assert run_of(folder)["config"]["update"]["world_size"] == 2


@pytest.mark.slow
def test_each_job_of_a_sweep_has_its_own_run_and_all_have_one_group(tmp_path: Path) -> None:  # WB-02
    outcome = tracked(tmp_path, "-m", "tracking=offline", "trainer.accumulate=1,2,4")
    assert outcome.code == 0, outcome.text
    runs = {}
    for run_dir in outcome.run_dirs():
        [folder] = folders(run_dir)
        run = run_of(folder)
        runs[run["config"]["update"]["trainer"]["accumulate"]] = run
        assert [item["step"] for item in history(folder) if "train/loss" in item] == [1, 2]
        assert run["run_id"] == summary(run_dir)["wandb"]["id"]
    assert sorted(runs) == [1, 2, 4]
    assert len({run["run_id"] for run in runs.values()}) == 3
    assert {run["run_group"] for run in runs.values()} == {outcome.run_dirs()[0].parent.name}
    names = {accumulate: run["display_name"] for accumulate, run in runs.items()}
    assert all(f"accumulate={accumulate}" in name for accumulate, name in names.items())


def test_failed_jobs_are_closed_as_failed_before_the_next_begins(tmp_path: Path) -> None:  # WB-09
    outcome = tracked(
        tmp_path,
        "-m",
        "tracking=offline",
        "data._target_=tests.doubles.MisbehavingDigits",
        "+data.what=raise",
        "+data.on_rank=0",
        "+data.at=3,2",  # the first job ends well before its third step
    )
    assert outcome.code == 1
    good, bad = outcome.run_dirs()
    [well], [broken] = folders(good), folders(bad)
    assert (exit_code(well), exit_code(broken)) == (0, 1)
    assert [item["step"] for item in history(broken) if "train/loss" in item] == [1]
    assert summary(bad)["wandb"]["id"] == run_of(broken)["run_id"]
    assert "boom" in str([record for record in records(broken) if record["type"] == "summary"])


def test_a_run_whose_other_rank_failed_is_closed_as_failed(tmp_path: Path) -> None:  # WB-09
    outcome = tracked(tmp_path, "tracking=offline", "data._target_=tests.doubles.MisbehavingDigits", "+data.what=raise")
    assert outcome.code == 1
    [folder] = folders(outcome.run_dir())
    assert exit_code(folder) != 0


def test_a_failed_run_closes_its_tracker_before_the_launcher_loses_patience():
    from src.launch.agent import FAILURE_GRACE_SECONDS
    from src.tracking.wandb import FAILED_FINISH_SECONDS, SILENT_SECONDS

    assert SILENT_SECONDS + FAILED_FINISH_SECONDS < FAILURE_GRACE_SECONDS
