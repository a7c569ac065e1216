"""task=collectives as a user starts it, and what it refuses."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from src.bench.bandwidth import FACTORS
from src.bench.bandwidth_table import closing_words, table, table_seconds, wall_seconds
from src.bench.collectives import COLLECTIVES
from src.bench.timing import Measured
from src.sharding import Sharding
from src.strategies.base import Setting
from src.tasks.collectives import Collectives, memory_problems
from tests.command import metrics, summary, train
from tests.tracking.wandb_runs import folders, history, home

SETTING = Setting("ddp", {}, 2, 2, "cpu", "fp32", Sharding(), 64, 1, None)
RIGHT: dict[str, Any] = {"operations": list(COLLECTIVES), "sizes_mb": [1, 10], "warmup": 5, "iterations": 50}
TWO = ["task=collectives", "launch.device=cpu", "launch.nproc=2"]


def test_two_ranks_measure_every_operation_and_keep_it_in_all_places(tmp_path: Path) -> None:
    options = ["task.sizes_mb=[1,8]", "task.iterations=20", "tracking=wandb"]
    done = train(tmp_path, *TWO, *options, **home(tmp_path))
    assert done.code == 0, done.text
    run_dir = done.run_dir()
    records = metrics(run_dir, "collective")
    assert [(record["operation"], record["size_mb"]) for record in records] == [
        (operation, size) for operation in COLLECTIVES for size in (1, 8)
    ]
    for record in records:
        circumstances = {"world_size": 2, "backend": "gloo", "device": "cpu", "dtype": "fp32", "warmup": 5}
        assert record | circumstances | {"iterations": 20, "num_bytes": record["size_mb"] * 10**6} == record
        expected = record["num_bytes"] / record["mean_seconds"] / 1e9
        assert record["algorithm_gb_per_second"] == pytest.approx(expected)
        assert record["bus_gb_per_second"] == pytest.approx(expected * FACTORS[record["operation"]](2))
        assert (record["remark"] is not None) == (record["operation"] == "reduce_scatter")
    kept = summary(run_dir)["collectives"]
    assert [row["mean_seconds"] for row in kept["rows"]] == [record["mean_seconds"] for record in records]
    assert kept["table_seconds"] == pytest.approx(sum(record["mean_seconds"] * 20 for record in records))
    # What each call took adds up to what all of them took by a clock of its own, so nothing is left out of the times.
    assert kept["table_seconds"] == pytest.approx(kept["wall_seconds"], rel=0.1)
    assert "2 ranks, gloo on cpu, fp32; 5 warm-ups, 20 timed calls; contents checked on every rank" in done.stdout
    assert "* reduce_scatter: emulated by gloo" in done.stdout
    assert "[16/16] send_recv 8 MB: " in done.text
    assert "all_reduce" in (run_dir / "bandwidth.html").read_text()
    [folder] = folders(run_dir)
    assert [item["collective.nrows"] for item in history(folder)] == [16]
    in_wandb = json.loads(next((folder / "files").rglob("*.table.json")).read_text())
    assert in_wandb["columns"] == [key for key in records[0] if key != "kind"]
    assert in_wandb["data"] == [list(record.values())[1:] for record in records]


def test_four_ranks_measure_in_bf16(tmp_path: Path) -> None:
    options = ["task.sizes_mb=[0.2]", "task.iterations=3", "task.warmup=1", "task.dtype=bf16", "tracking=off"]
    done = train(tmp_path, "task=collectives", "launch.device=cpu", "launch.nproc=4", *options)
    assert done.code == 0, done.text
    records = metrics(done.run_dir(), "collective")
    assert [record["operation"] for record in records] == list(COLLECTIVES)
    for record in records:
        ratio = record["bus_gb_per_second"] / record["algorithm_gb_per_second"]
        assert ratio == pytest.approx(FACTORS[record["operation"]](4))
    assert "4 ranks, gloo on cpu, bf16" in done.stdout


def test_a_wrong_content_fails_the_run_by_rank_operation_and_size(tmp_path: Path) -> None:
    lossy = ["task._target_=tests.bench.doubles.CollectivesThatLose", "task.operations=[broadcast]"]
    done = train(tmp_path, *TWO, *lossy, "task.sizes_mb=[0.1]", "tracking=off")
    assert done.code == 1, done.text
    assert "broadcast of 100,000 bytes (fp32, 2 ranks) on rank 1: element 0 of 25000 is -1" in done.stderr
    assert metrics(done.run_dir(), "collective") == []


def test_a_hang_ends_within_the_time_out(tmp_path: Path) -> None:
    hanging = ["task._target_=tests.bench.doubles.CollectivesThatHang", "task.operations=[broadcast]"]
    done = train(
        tmp_path, *TWO, *hanging, "task.sizes_mb=[0.1]", "launch.timeout_seconds=4", "tracking=off", timeout=60
    )
    assert done.code == 1, done.text
    assert "no progress for 4 s" in done.stderr


def test_a_lone_rank_is_refused_before_the_start(tmp_path: Path) -> None:
    done = train(tmp_path, "task=collectives", "launch.device=cpu", "launch.nproc=1")
    assert done.code == 2, done.text
    assert "there is one rank only. Use launch.nproc=2 or more" in done.stderr
    assert done.run_dirs() == []


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"operations": []}, "task.operations is empty; choose from all_reduce, all_gather,"),
        ({"operations": ["allreduce"]}, "task.operations: allreduce is unknown. Did you mean all_reduce?"),
        ({"operations": ["gather"] * 2}, "task.operations names gather 2 times; once is enough."),
        ({"sizes_mb": []}, "task.sizes_mb is empty"),
        ({"sizes_mb": [-1]}, "task.sizes_mb: -1 MB is less than one fp32 element for each of 2 ranks. Choose 8e-06 or"),
        ({"sizes_mb": [1, 4e-6]}, "task.sizes_mb: 4e-06 MB is less than one fp32 element for each of 2 ranks."),
        ({"sizes_mb": [1, 1e9]}, "task.sizes_mb: at 1e+09 MB the buffers of all_to_all take 2000000.0 GB on each of 2"),
        ({"warmup": -1}, "task.warmup=-1 is less than 0; choose 0 or more."),
        ({"iterations": 0}, "task.iterations=0 is less than 1; choose 1 or more."),
        ({"dtype": "float32"}, "task.dtype=float32 is unknown."),
    ],
)
def test_what_is_out_of_range_is_refused_with_a_remedy(wrong: dict[str, Any], words: str) -> None:
    assert Collectives.problems(RIGHT, SETTING) == []
    [problem] = Collectives.problems(RIGHT | wrong, SETTING)
    assert problem.startswith(words)


def test_several_problems_are_told_at_once() -> None:
    alone = dataclasses.replace(SETTING, world_size=1)
    assert len(Collectives.problems(RIGHT | {"warmup": -1, "dtype": "int", "operations": []}, alone)) == 4


def test_sizes_are_held_against_the_memory_that_the_ranks_share() -> None:
    # Of all_to_all at 100 MB each rank holds 200 MB, two ranks 400; of all_gather 150 MB with two ranks.
    arguments = {"operations": ["all_gather", "all_to_all"], "sizes_mb": [100]}
    assert memory_problems(arguments, 2, 2, 400_000_000, "this machine has") == []
    [problem] = memory_problems(arguments, 2, 2, 399_000_000, "this machine has")
    assert problem.endswith("take 0.2 GB on each of 2 rank(s), and this machine has 0.4 GB. Choose less than 100.")
    assert memory_problems(arguments | {"operations": ["all_gather"]}, 2, 2, 300_000_000, "it has") == []
    assert len(memory_problems(arguments | {"operations": ["all_gather"]}, 2, 2, 299_000_000, "it has")) == 1


def measured(operation: str, world_size: int) -> Measured:
    return Measured(operation, 10**6, world_size, 10, 0.001, 0.0005, 0.002, 0.0125)


def test_the_table_says_na_for_one_rank_and_how_much_of_the_time_is_in_it() -> None:
    rows = [measured("all_reduce", 1), measured("broadcast", 1)]
    assert list(table(rows, "nccl").columns[-1].cells) == ["n/a", "n/a"]
    # 2 rows of 10 calls of 1 ms are 0.02 s, of 0.025 s by the clock.
    assert (table_seconds(rows), wall_seconds(rows)) == (pytest.approx(0.02), 0.025)
    assert "0.02 s. The timed parts by the clock: 0.025 s (80.0% of it is in the table;" in closing_words(rows, "nccl")
    assert "emulated" not in closing_words([measured("reduce_scatter", 2)], "nccl")
