"""task=matmul as a user starts it, and what it refuses."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from src.bench.matmul import Measured, NotMeasured
from src.sharding import Sharding
from src.strategies.base import Setting
from src.tasks.matmul import MatMul, memory_problems, table
from tests.command import metrics, summary, train

SETTING = Setting("ddp", {}, 1, 1, "cpu", "fp32", Sharding(), 64, 1, None)
RIGHT: dict[str, Any] = {"size": 64, "dtypes": ["fp32"], "warmup": 0, "iterations": 1, "max_seconds": 1}


def test_it_measures_prints_and_keeps_what_this_cpu_can_do(tmp_path: Path) -> None:
    options = ["task.size=64", "task.iterations=3", "task.warmup=1", "launch.device=cpu", "tracking=offline"]
    done = train(tmp_path, "task=matmul", *options)
    assert done.code == 0, done.text
    assert "64 x 64 on CPU" in done.stdout
    assert "not measured: TF32 is a mode of NVIDIA GPUs" in done.stdout
    run_dir = done.run_dir()
    records = metrics(run_dir, "matmul")
    assert [record["dtype"] for record in records] == ["fp32", "tf32", "fp16", "bf16"]
    fp32, tf32, *_ = records
    assert fp32["tflops"] == pytest.approx(2 * 64**3 / (fp32["milliseconds"] * 1e-3) / 1e12)
    assert (fp32["iterations"], fp32["warmup"], fp32["fraction_of_peak"]) == (3, 1, None)
    assert "milliseconds" not in tf32
    rows = summary(run_dir)["matmul"]["rows"]
    assert rows == [
        {key: value for key, value in record.items() if key not in ("kind", "size", "device")} for record in records
    ]
    assert summary(run_dir)["wandb"]["mode"] == "offline"
    assert "stopped following" not in done.text  # W&B takes rows that have no step


def test_all_that_is_wrong_is_refused_before_the_start(tmp_path: Path) -> None:
    wrong = [
        "task.size=0",
        "task.iterations=0",
        "task.warmup=-1",
        "task.max_seconds=0",
        "task.dtypes=[fp23,bf16,bf16]",
    ]
    done = train(tmp_path, "task=matmul", *wrong)
    assert done.code == 2, done.text
    for words in (
        "task.size=0 is less than 1; choose 1 or more.",
        "task.iterations=0 is less than 1",
        "task.warmup=-1 is less than 0",
        "task.max_seconds=0 leaves no time",
        "task.dtypes: fp23 is unknown. Did you mean fp32?",
        "task.dtypes names bf16 2 times",
    ):
        assert words in done.stderr
    assert done.run_dirs() == []


def test_nothing_is_refused_that_can_be_measured() -> None:
    assert MatMul.problems(RIGHT, SETTING) == []
    assert MatMul.problems(RIGHT | {"dtypes": []}, SETTING) == [
        "task.dtypes is empty; choose from fp32, tf32, fp16, bf16."
    ]


def test_matrices_that_no_memory_holds_are_refused() -> None:
    # 14 bytes an element: 10 000² · 14 = 1.4·10⁹
    assert memory_problems(10_000, memory_bytes=1_400_000_000) == []
    [line] = memory_problems(10_001, memory_bytes=1_400_000_000)
    assert line == "task.size=10001: its matrices take 1.30 GiB, and this machine has 1.30 GiB. Choose 10000 or less."
    assert MatMul.problems(RIGHT | {"size": 10**7}, SETTING)  # 1.4 PB
    assert MatMul.problems(RIGHT | {"size": 10**7}, dataclasses.replace(SETTING, device_type="cuda")) == []


def test_the_table_says_unknown_wrong_and_not_measured() -> None:
    row = Measured("fp32", 2.0, 1.0, 10.0, None, 5, 50, False, error=0.5, limit=1e-5)
    on_gpu = Measured("bf16", 2.0, 1.0, 494.7, 989.4, 5, 3, True, error=1e-3, limit=1e-2)
    columns = {
        column.header: list(column.cells) for column in table([row, on_gpu, NotMeasured("tf32", "no")], "").columns
    }
    assert columns["of the peak"] == ["unknown", "50.0% of 989.4", "-"]
    assert columns["error"] == ["5.0e-01 WRONG", "1.0e-03", "-"]
    assert columns["remark"] == ["", "fewer than asked for: task.max_seconds", "not measured: no"]
