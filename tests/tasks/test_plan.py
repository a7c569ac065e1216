"""task=plan as a user runs it: what it says, how fast, and what it refuses."""

import json
import resource
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.command import summary, train

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
    ],
)
def test_what_it_can_not_do_it_refuses(tmp_path: Path, overrides: list[str], line: str) -> None:
    done = train(tmp_path, "task=plan", "launch.device=cpu", *overrides)
    assert done.code == 2
    assert line in done.stderr


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
