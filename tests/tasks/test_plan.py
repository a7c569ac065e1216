"""task=plan as a user runs it: what it says, how fast, and what it refuses."""

import json
import resource
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.command import summary, train
from tests.composing import composed

LARGEST = ["model=gpt_175b", "strategy=fsdp", "precision=bf16", "launch.nproc=1024", "launch.device=cpu"]


def plan_of(tmp_path: Path, *overrides: str) -> Any:
    done = train(tmp_path, "task=plan", "launch.device=cpu", *overrides)
    assert done.code == 0, done.text
    return json.loads((done.run_dir() / "plan.json").read_text())


def test_gpt_3_on_1024_ranks_takes_seconds_and_little_memory(tmp_path: Path) -> None:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = train(tmp_path, "task=plan", *LARGEST)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.code == 0, done.text
    # Of the processor, imports among them: the clock on the wall also counts what else a machine does.
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 10
    # Of the largest child of this process so far, in KiB on Linux: a bound for this one too.
    assert after.ru_maxrss * 1024 < 2e9
    [found] = json.loads((done.run_dir() / "plan.json").read_text())["ranks"]
    # A block of width h: q, k, v, o 4 h^2 and three biases of h; the MLP 8 h^2 and biases of 5 h; two norms of 2 h.
    h, vocabulary, longest = 12288, 50257, 2048
    block = 4 * h * h + 3 * h + 8 * h * h + 5 * h + 2 * 2 * h
    # 96 blocks; the embedding, the positions, the last norm and the head are in no unit.
    rest = vocabulary * h + longest * h + 2 * h + h * vocabulary
    parameters = 96 * block + rest
    assert found["parameters"] == parameters
    # fp32 weights 4, gradients 4, Adam's moments 8: 16 bytes a parameter, over all ranks, each part rounded up.
    assert 0 <= found["bytes"]["model_states"] - 16 * parameters / 1024 < 3
    # Beside them, while a block computes: in 16 bits what is in no unit, the block, and the next on its way; in fp32
    # the buffer in which the gradients of the block before are reduced.
    assert found["bytes"]["communication_buffers"] == 2 * rest + 2 * 2 * block + 4 * block
    assert summary(done.run_dir())["plan"]["bytes"] == found["bytes"]
    for part in ("parameters", "gradients", "optimizer states", "activations", "logits", "communication buffers"):
        assert part in done.stdout
    assert "Not counted" in done.stdout


def test_it_says_whether_it_fits(tmp_path: Path) -> None:
    fits = train(tmp_path, "task=plan", "launch.device=cpu", "task.device_memory_gib=1")
    assert "it fits" in fits.stdout
    too_small = train(tmp_path, "task=plan", "launch.device=cpu", "task.device_memory_gib=0.001")
    assert "it does not fit" in too_small.stdout


def test_what_fits_is_listed_with_command_lines_that_compose(tmp_path: Path) -> None:
    answer = plan_of(
        tmp_path, "model=mlp", "launch.nproc=4", "task.search=true", "task.device_memory_gib=0.003", "seed=3"
    )
    commands = [row["command"] for row in answer["fits"]]
    assert 1 <= len(commands) <= 20
    speeds = [row["samples_per_second"] for row in answer["fits"]]
    assert speeds == sorted(speeds, reverse=True)
    assert all(row["peak_bytes"] <= 0.003 * 2**30 for row in answer["fits"])
    assert all("seed=3" in command and "task" not in command for command in commands)
    (tmp_path / "again").mkdir()
    shown = train(tmp_path / "again", *commands[0].split()[2:], "--cfg", "job")
    assert shown.code == 0, shown.text
    config = yaml.safe_load(shown.stdout)
    assert (config["seed"], config["launch"]["nproc"]) == (3, 4)


def test_where_nothing_fits_it_says_what_would_be_needed(tmp_path: Path) -> None:
    done = train(
        tmp_path, "task=plan", "model=mlp", "launch.device=cpu", "launch.nproc=2", "task.search=true",
        "task.device_memory_gib=0.0001",
    )  # fmt: skip
    assert done.code == 0, done.text
    assert "Nothing fits in 0.0001 GiB a device: the least is" in done.stdout


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (["task.search=true"], "task.device_memory_gib is null"),
        (["task.device_memory_gib=-1"], "task.device_memory_gib=-1 must be more than 0"),
        (["task.dry_run=true", "strategy=deepspeed"], "the engine of strategy=deepspeed does not run"),
        (["task.search=true", "task.dry_run=true", "task.device_memory_gib=80"], "Use one of them"),
        (["strategy=fsdp", "sharding=hybrid", "launch.nproc=64"], "a plan knows of no machines"),
    ],
)
def test_what_it_can_not_do_it_refuses(tmp_path: Path, overrides: list[str], line: str) -> None:
    done = train(tmp_path, "task=plan", "launch.device=cpu", *overrides)
    assert done.code == 2
    assert line in done.stderr
    assert not done.run_dirs()


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["task.efficiency=2"], "task.efficiency=2 is a share of the peak"),
        (["task.efficiency=0"], "task.efficiency=0 must be more than 0"),
        (["task.efficiency=null"], "task.efficiency=None is not of type float"),
        (["task.bandwidth_gb=0"], "task.bandwidth_gb=0 must be more than 0"),
        (["task.peak_tflops=-1"], "task.peak_tflops=-1 must be more than 0"),
        (["task.peak_tflops=nan"], "is no finite number"),
        (["task.device_memory_gib=much"], "is not of type float or null"),
        (
            ["task.device_memory_gib=-1", "trainer.micro_batch_size=auto"],
            "task.device_memory_gib=-1 must be more than 0",
        ),
        # So large a world is no plan, and its numbers no figures of anything.
        (["launch.nproc=1000000000"], "launch.nproc=1000000000 is more ranks than any cluster has"),
        (["launch.nproc=10000000", "task.dry_run=true"], "launch.nproc=10000000 is more ranks than any cluster has"),
        (["launch.nproc=100000", "task.dry_run=true", "strategy=fsdp"], "ends at 4096"),
        (["launch.nproc=512", "task.dry_run=true", "strategy=tp", "strategy.tp=8", "model=gpt_124m"], "model.heads=12"),
    ],
    ids=str,
)
def test_each_impossible_value_is_one_line(overrides: list[str], said: str) -> None:
    _, problems = composed("task=plan", "launch.device=cpu", *overrides)
    assert len(problems) == 1, problems
    assert said in problems[0]


def test_a_million_ranks_are_planned(tmp_path: Path) -> None:
    answer = plan_of(tmp_path, "model=gpt_tiny", "strategy=fsdp", "launch.nproc=1000000", "trainer.micro_batch_size=1")
    [found] = answer["ranks"]
    # 874,752 parameters of 4 bytes, a millionth of them rounded up.
    assert found["bytes"]["parameters"] == 4


OWN = ["model=mlp", "launch.device=cpu", "launch.nproc=2"]


@pytest.mark.parametrize(
    ("model", "overrides", "remedy"),
    [
        ("LooksAtItsInputs", [], "Add task.dry_run=true"),
        ("LooksAtItsInputs", ["task.search=true", "task.device_memory_gib=1"], "Add task.dry_run=true"),
        ("LooksAtItsInputs", ["strategy=deepspeed"], "Take two steps instead"),
        ("CountsItsInputs", [], "Take two steps instead"),
        ("CountsItsInputs", ["task.dry_run=true"], "Take two steps instead"),
    ],
)
def test_a_model_that_looks_at_values_is_told_so_in_one_line(
    tmp_path: Path, model: str, overrides: list[str], remedy: str
) -> None:
    done = train(tmp_path, "task=plan", *OWN, f"model._target_=tests.own_models.{model}", *overrides)
    assert done.code == 1
    [line] = [words for words in done.stderr.splitlines() if "shardlab:" in words]
    assert remedy in line
    # The line of the model's own that does it.
    assert "forward, " in line
    assert "own_models.py:" in line
    assert "Traceback" not in done.text


def test_a_dry_run_goes_on_where_a_model_looks_at_a_value(tmp_path: Path) -> None:
    answer = plan_of(tmp_path, "task.dry_run=true", *OWN, "model._target_=tests.own_models.LooksAtItsInputs")
    assert answer["ranks"][0]["peak"] > 0


def test_parts_of_a_small_model_are_said_in_a_unit_that_shows_them(tmp_path: Path) -> None:
    done = train(tmp_path, "task=plan", *OWN, "model.hidden=[8]", "trainer.micro_batch_size=1")
    assert done.code == 0, done.text
    # 64 x 8 + 8 + 8 x 10 + 10 = 610 parameters of 4 bytes.
    assert "2.4 KiB" in done.stdout
    assert "0.00" not in done.stdout.split("communication")[0]


def test_a_dry_run_reports_each_kind_of_rank(tmp_path: Path) -> None:
    answer = plan_of(tmp_path, "task.dry_run=true", "strategy=fsdp", "launch.nproc=8", "model=mlp")
    assert answer["method"] == "trace"
    assert answer["world_size"] == 8
    assert answer["ranks"][0]["peak"] > 0


def test_data_that_tell_no_shapes_are_refused(tmp_path: Path) -> None:
    mine = ["data=custom", "model=mlp", "data.image_shape=[1,1,3]", "data.num_classes=3"]
    for part in ("train", "test"):
        mine += [f"data.{part}._target_=tests.data.doubles.Points", f"+data.{part}.num_samples=8"]
    done = train(tmp_path, "task=plan", "launch.device=cpu", *mine)
    assert done.code == 2
    assert "tells no micro-batch's shapes" in done.text
