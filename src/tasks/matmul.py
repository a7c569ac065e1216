"""task=matmul: how fast this machine's device multiplies square matrices, by type."""

import os
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from rich.table import Table
from torch import get_num_threads

from src.bench.matmul import DTYPES, Effort, Measured, NotMeasured, device_name, measure
from src.errors import did_you_mean
from src.memory import memory
from src.run import Experiment
from src.strategies.base import Setting
from src.task import Task
from src.tracking.tables import show

#: Bytes for each element of a matrix: two drawn in fp32, and the three of a 16-bit multiplication.
BYTES_AN_ELEMENT = 2 * 4 + 3 * 2


class MatMul(Task):
    """size: rows and columns. dtypes: of "fp32", "tf32", "fp16", "bf16". max_seconds: for each type.

    Raises RuntimeError where a product is not what fp32 gives but for rounding.
    """

    ranks = "one"
    reads_data = False

    def __init__(
        self, size: int, dtypes: list[str], warmup: int = 5, iterations: int = 50, max_seconds: float = 10.0
    ) -> None:
        self.effort, self.dtypes = Effort(size, warmup, iterations, max_seconds), dtypes

    @classmethod
    def problems(cls, arguments: Mapping[str, Any], setting: Setting) -> list[str]:
        found = []
        for key, least in (("size", 1), ("warmup", 0), ("iterations", 1)):
            value = arguments.get(key)
            if value is not None and value < least:
                found.append(f"task.{key}={value} is less than {least}; choose {least} or more.")
        seconds = arguments.get("max_seconds")
        if seconds is not None and seconds <= 0:
            found.append(f"task.max_seconds={seconds} leaves no time to measure; choose more than 0.")
        dtypes = arguments.get("dtypes", [])
        if not dtypes:
            found.append(f"task.dtypes is empty; choose from {', '.join(DTYPES)}.")
        for dtype in dict.fromkeys(dtypes):
            if dtype not in DTYPES:
                found.append(f"task.dtypes: {dtype} is unknown. {did_you_mean(str(dtype), DTYPES)}")
            elif dtypes.count(dtype) > 1:
                found.append(f"task.dtypes names {dtype} {dtypes.count(dtype)} times; once is enough.")
        if setting.device_type == "cpu" and isinstance(size := arguments.get("size"), int):
            found += memory_problems(size, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
        return found

    def __call__(self, experiment: Experiment) -> None:
        device, reporter = experiment.world.device, experiment.reporter
        rows = []
        for dtype in self.dtypes:
            row = measure(device, dtype, self.effort, experiment.control.beat)
            rows.append(row)
            reporter.record("matmul", {"size": self.effort.size, "device": device_name(device), **as_record(row)})
        experiment.control.rest()
        reporter.update(
            world_size=1,
            matmul={"size": self.effort.size, "device": device_name(device), "rows": [as_record(row) for row in rows]},
        )
        threads = f", {get_num_threads()} thread(s)" if device.type == "cpu" else ""
        show(table(rows, f"{self.effort.size} x {self.effort.size} on {device_name(device)}{threads}"))
        wrong = [row for row in rows if isinstance(row, Measured) and not row.is_right]
        if wrong:
            words = ", ".join(
                f"{row.dtype} is off by {row.error:.2g} (rounding explains {row.limit:.2g})" for row in wrong
            )
            raise RuntimeError(f"products differ from fp32's: {words}. Do not trust this device, or its libraries.")


def memory_problems(size: int, memory_bytes: int) -> list[str]:
    """Matrices that the host's memory can't hold."""
    needed = size * size * BYTES_AN_ELEMENT
    if needed <= memory_bytes:
        return []
    most = int((memory_bytes / BYTES_AN_ELEMENT) ** 0.5)
    return [
        f"task.size={size}: its matrices take {memory(needed)}, and this machine has"
        f" {memory(memory_bytes)}. Choose {most} or less."
    ]


def as_record(row: Measured | NotMeasured) -> dict[str, Any]:
    """A row as JSON has it; what was not measured has a reason and no number."""
    if isinstance(row, NotMeasured):
        return asdict(row)
    return {**asdict(row), "fraction_of_peak": row.fraction_of_peak}


def table(rows: list[Measured | NotMeasured], title: str) -> Table:
    """A row a type."""
    made = Table(title=title, title_justify="left")
    made.add_column("type")
    for column in ("ms (median)", "ms (fastest)", "TFLOP/s", "of the peak", "timed", "warm-ups", "error"):
        made.add_column(column, justify="right")
    made.add_column("remark")
    for row in rows:
        if isinstance(row, NotMeasured):
            made.add_row(row.dtype, *["-"] * 7, f"not measured: {row.reason}")
            continue
        remarks = [row.remark, "fewer than asked for: task.max_seconds" if row.is_cut else ""]
        made.add_row(
            row.dtype,
            f"{row.milliseconds:.3f}",
            f"{row.fastest_milliseconds:.3f}",
            f"{row.tflops:.3g}",
            "unknown" if row.fraction_of_peak is None else f"{row.fraction_of_peak:.1%} of {row.peak_tflops:g}",
            str(row.iterations),
            str(row.warmup),
            f"{row.error:.1e}{'' if row.is_right else ' WRONG'}",
            "; ".join(filter(None, remarks)),
        )
    return made
