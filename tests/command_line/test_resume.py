"""checkpoint.resume, task=evaluate and task=export as a user types them."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file
from torch import equal

from tests.command import QUICK, TRAIN, environment, metrics, summary, train
from tests.processes import wait_until

SAVING = [*QUICK, "tracking=off", "trainer.max_steps=8", "checkpoint.every=4", "trainer.log_every=1", "data.limit=200"]


def unbroken(cwd: Path, *overrides: str) -> Path:
    done = train(cwd, *SAVING, *overrides)
    assert done.code == 0, done.text
    return done.run_dir()


def go_on(cwd: Path, *overrides: str) -> Path:
    done = train(cwd, *overrides)
    assert done.code == 0, done.text
    return done.run_dir()


def refused(cwd: Path, *overrides: str) -> str:
    done = train(cwd, *overrides)
    assert done.code == 2, done.text
    return done.stderr


def test_a_run_goes_on_in_its_folder_with_its_overrides_before_todays(tmp_path: Path) -> None:
    run_dir = unbroken(tmp_path)
    before = {path.name: path.read_text() for path in (run_dir / ".hydra").iterdir()}
    config, log = (run_dir / "config.yaml").read_text(), (run_dir / "train.log").read_text()
    go_on(tmp_path, f"checkpoint.resume={run_dir}", "trainer.max_steps=12")
    assert [record["step"] for record in metrics(run_dir)] == list(range(1, 13))
    assert summary(run_dir)["steps"] == 12
    for name, text in before.items():
        assert (run_dir / ".hydra" / name).read_text() == text
    assert (run_dir / "config.yaml").read_text() == config
    assert "max_steps: 12" in (run_dir / "resume-1.yaml").read_text()
    assert (run_dir / "train.log").read_text().startswith(log)
    # The next one finds what this one was given, and brings a strategy of its own.
    go_on(tmp_path, f"checkpoint.resume={run_dir}/", "strategy=fsdp", "launch.nproc=1", "trainer.accumulate=2")
    assert summary(run_dir)["steps"] == 12, "max_steps=12 still holds, and has been reached"
    assert summary(run_dir)["world_size"] == 1
    assert (run_dir / "resume-2.yaml").exists()


def test_auto_begins_a_run_and_goes_on_with_it(tmp_path: Path) -> None:
    command = [*SAVING, "hydra.run.dir=out/a", "checkpoint.resume=auto"]
    run_dir = go_on(tmp_path, *command)
    assert run_dir == tmp_path / "out" / "a"
    go_on(tmp_path, *command, "trainer.max_steps=10")
    assert [record["step"] for record in metrics(run_dir)] == list(range(1, 11))
    assert [record["step"] for record in metrics(run_dir, "resume")] == [8]


def test_a_checkpoint_begins_a_new_run(tmp_path: Path) -> None:
    run_dir = unbroken(tmp_path)
    before = sorted(path.name for path in run_dir.iterdir())
    done = train(tmp_path, f"checkpoint.resume={run_dir}/checkpoints/step_00000004")
    assert done.code == 0, done.text
    [other] = [path for path in done.run_dirs() if path != run_dir]
    assert [record["step"] for record in metrics(other)] == [5, 6, 7, 8]
    assert [record["loss"] for record in metrics(other)] == [record["loss"] for record in metrics(run_dir)[4:]]
    assert sorted(path.name for path in run_dir.iterdir()) == before


def test_a_pointer_or_a_run_begins_a_new_run_in_a_folder_of_its_own(tmp_path: Path) -> None:
    run_dir = unbroken(tmp_path)
    before = sorted(path.name for path in run_dir.iterdir())
    for number, source in enumerate([run_dir / "checkpoints" / "last", run_dir]):
        words = [f"checkpoint.resume={source}", "trainer.max_steps=10", f"hydra.run.dir=new{number}"]
        done = train(tmp_path, *words)
        assert done.code == 0, done.text
        assert [record["step"] for record in metrics(tmp_path / f"new{number}")] == [9, 10]
        assert (tmp_path / f"new{number}" / ".hydra" / "overrides.yaml").is_file()
    assert sorted(path.name for path in run_dir.iterdir()) == before


def test_a_damaged_newest_checkpoint_is_named_and_the_one_before_it_used(tmp_path: Path) -> None:
    run_dir = unbroken(tmp_path)
    [shard, *_] = sorted((run_dir / "checkpoints" / "step_00000008").glob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-10])
    done = train(tmp_path, f"checkpoint.resume={run_dir}")
    assert done.code == 0, done.text
    assert f"{shard.name} is truncated" in done.text
    assert [record["step"] for record in metrics(run_dir)] == [*range(1, 9), *range(5, 9)]
    assert "truncated" in (run_dir / "train.log").read_text()


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("nowhere", "checkpoint.resume=nowhere does not exist"),
        (".", "is no run folder: it has no .hydra/overrides.yaml"),
        ("run", "holds no whole checkpoint"),
        ("run/checkpoints/step_00000003", "does not exist"),
    ],
)
def test_nothing_to_go_on_from_is_refused_before_anything_is_written(tmp_path: Path, target: str, words: str) -> None:
    (tmp_path / "run" / ".hydra").mkdir(parents=True)
    (tmp_path / "run" / ".hydra" / "overrides.yaml").write_text("[]\n")
    before = sorted(tmp_path.rglob("*"))
    assert words in refused(tmp_path, f"checkpoint.resume={target}", *QUICK)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_sweep_can_not_go_on_from_one_run(tmp_path: Path) -> None:
    assert "names one run, and -m starts several" in refused(tmp_path, "-m", "checkpoint.resume=.", "seed=1,2", *QUICK)


@pytest.mark.slow
def test_a_stopped_run_saves_and_goes_on_at_the_next_sample(tmp_path: Path) -> None:
    endless = [*SAVING, "trainer.max_steps=100000", "trainer.epochs=100000", "checkpoint.every=null"]
    endless.append("trainer.eval_every=100000")
    command = [sys.executable, str(TRAIN), *endless, "hydra.run.dir=out"]
    run_dir = tmp_path / "out"
    with (tmp_path / "text").open("w") as text:
        process = subprocess.Popen(command, cwd=tmp_path, env=environment(), stdout=text, stderr=text)
        try:
            file = run_dir / "metrics.jsonl"
            assert wait_until(lambda: file.exists() and file.read_text().count("\n") > 5, timeout_seconds=60)
            assert "is still going on" in refused(tmp_path, "checkpoint.resume=auto", "hydra.run.dir=out", *QUICK)
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 128 + signal.SIGTERM
        finally:
            process.kill()
    stopped = summary(run_dir)
    assert stopped["status"] == "interrupted"
    step = stopped["steps"]
    assert stopped["checkpoint"] == str(run_dir / "checkpoints" / f"step_{step:08d}")
    go_on(tmp_path, "checkpoint.resume=out", f"trainer.max_steps={step + 3}")
    assert [record["step"] for record in metrics(run_dir)] == list(range(1, step + 4))
    whole = train(tmp_path, *endless, f"trainer.max_steps={step + 3}", "hydra.run.dir=whole")
    assert whole.code == 0
    for key in ("batch_hash", "samples", "loss"):
        assert [r[key] for r in metrics(run_dir)] == [r[key] for r in metrics(tmp_path / "whole")], key
    ours, theirs = (load_file(folder / "model.safetensors") for folder in (run_dir, tmp_path / "whole"))
    assert all(equal(ours[name], weight) for name, weight in theirs.items())


@pytest.mark.slow
def test_a_sweep_goes_on_with_what_is_missing(tmp_path: Path) -> None:
    command = ["-m", *SAVING, "seed=1,2,3", "hydra.sweep.dir=sweep", "checkpoint.resume=auto"]
    done = train(tmp_path, *command)
    assert done.code == 0, done.text
    jobs = [tmp_path / "sweep" / str(number) for number in range(3)]
    # The second was killed after its first checkpoint, the third never began.
    lines = (jobs[1] / "metrics.jsonl").read_text().splitlines()
    (jobs[1] / "metrics.jsonl").write_text("\n".join(lines[:5]) + "\n")
    (jobs[1] / "summary.json").unlink()
    subprocess.run(["rm", "-r", jobs[1] / "checkpoints" / "step_00000008", jobs[2]], check=True)
    first = (jobs[0] / "train.log").read_text()
    done = train(tmp_path, *command)
    assert done.code == 0, done.text
    assert "job 0" in done.stdout
    assert "finished before" in done.stdout
    assert (jobs[0] / "train.log").read_text() == first
    assert [record["step"] for record in metrics(jobs[1], "resume")] == [4]
    assert [summary(job)["steps"] for job in jobs] == [8, 8, 8]
    other = refused(tmp_path, "-m", *SAVING, "seed=1,2,4", "hydra.sweep.dir=sweep", "checkpoint.resume=auto")
    assert "holds a job of other overrides" in other


def test_a_checkpoint_is_evaluated_and_exported_under_another_strategy(tmp_path: Path) -> None:
    run_dir = unbroken(tmp_path)
    (tmp_path / "later").mkdir()
    done = train(tmp_path / "later", "task=evaluate", f"task.checkpoint={run_dir}", "strategy=fsdp", "launch.nproc=1")
    assert done.code == 0, done.text
    [ours], theirs = metrics(done.run_dir(), "eval"), metrics(run_dir, "eval")[-1]
    assert (ours["step"], ours["samples"]) == (theirs["step"], theirs["samples"])
    assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-5)
    subprocess.run(["rm", "-r", tmp_path / "later"], check=True)
    (tmp_path / "later").mkdir()
    done = train(tmp_path / "later", "task=export", f"task.checkpoint={run_dir}/checkpoints/last")
    assert done.code == 0, done.text
    exported, final = load_file(done.run_dir() / "model.safetensors"), load_file(run_dir / "model.safetensors")
    assert exported.keys() == final.keys()
    assert all(equal(exported[name], weight) for name, weight in final.items())
    assert "checkpoint.resume" not in done.stdout, "there is no run of its own to go on with"


def test_both_parts_of_an_offline_run_have_one_wandb_id(tmp_path: Path) -> None:
    words = [word for word in SAVING if word != "tracking=off"]
    assert train(tmp_path, *words, "tracking=offline", "hydra.run.dir=out").code == 0
    first = summary(tmp_path / "out")["wandb"]["id"]
    done = train(tmp_path, "checkpoint.resume=out", "trainer.max_steps=10")
    assert done.code == 0, done.text
    folders = sorted(path.name for path in (tmp_path / "out" / "wandb").glob("offline-run-*"))
    assert len(folders) == 2
    assert all(name.endswith(first) for name in folders)
    assert summary(tmp_path / "out")["wandb"]["id"] == first


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["optimizer=sgd"], "holds exp_avg and exp_avg_sq of its optimizer, and torch.optim.SGD keeps momentum_buffer"),
        (["model=mlp"], "was written by another model than src.models.mlp.MLP"),
        (["model.num_classes=12"], "classifier.3.bias ([10] in the checkpoint, [12] here)"),
    ],
)
def test_what_a_checkpoint_does_not_fit_is_refused_and_leaves_the_run_as_it_was(
    tmp_path: Path, words: list[str], reason: str
) -> None:
    run_dir = unbroken(tmp_path)
    before = sorted(run_dir.rglob("*"))
    assert reason in refused(tmp_path, f"checkpoint.resume={run_dir}", "trainer.max_steps=9", *words)
    assert sorted(run_dir.rglob("*")) == before
    assert summary(run_dir)["status"] == "finished"
