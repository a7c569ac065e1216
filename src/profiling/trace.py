"""A trace of torch's profiler: writing one, and what its GPU kernels say of where a step went.

The file is Chrome's trace format, which ui.perfetto.dev opens: {"traceEvents": [{"ph": "X", "cat": "kernel", "name",
"ts", "dur" (both in microseconds), ...}]}. Overlap is defined as Holistic Trace Analysis does: the time in which a
communication kernel runs beside a computation kernel, over the time in which a communication kernel runs, both from
merged intervals of all streams. Copies and fills of device memory count as computation.
"""

import gzip
import json
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch

from src.memory import synchronize
from src.profiling.intervals import Interval, common, length, merged, outside

STEP, DATA = "shardlab step", "shardlab data"  # annotations on the host's line of time
ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
IS_COMMUNICATION = "nccl"  # in the names of NCCL's kernels, of all its versions


def annotated(name: str) -> AbstractContextManager[Any]:
    """A span of that name in the trace that is being written, if there is one."""
    return torch.profiler.record_function(name)


def capture(take_step: Callable[[], None], num_steps: int, path: Path, device: torch.device) -> None:
    """Call `take_step` so many times under torch's profiler and write the trace to `path`, a .json.gz.

    Each step waits for the device, so that its kernels lie inside its annotation.
    """
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
    with quiet_profiler(), profile(activities=activities) as profiler:
        for _ in range(num_steps):
            with annotated(STEP):
                take_step()
                synchronize(device)
    profiler.export_chrome_trace(str(path))


@contextmanager
def quiet_profiler() -> Iterator[None]:
    """Else it tells the terminal of each start and, on CPUs, that it finds no GPU. It reads this when first started."""
    before = os.environ.get("KINETO_LOG_LEVEL")
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    try:
        yield
    finally:
        if before is None:
            del os.environ["KINETO_LOG_LEVEL"]


def read_events(path: Path) -> list[dict[str, Any]]:
    """The events of a trace, .json or .json.gz."""
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as stream:
        events: list[dict[str, Any]] = json.load(stream)["traceEvents"]
    return events


class KernelTimes(NamedTuple):
    """Of one rank, seconds a step, which the first four add up to; communication is exposed + hidden."""

    compute: float
    exposed: float
    data: float
    idle: float
    communication: float
    hidden: float


def of_kernels(events: list[dict[str, Any]]) -> KernelTimes:
    """Where the mean annotated step of a rank on a GPU went. Raises ValueError without a step, or without a kernel."""
    num_steps, steps = len(list(_annotations(events, STEP))), merged(_annotations(events, STEP))
    device = [event for event in events if event.get("cat") in ON_DEVICE]
    if not num_steps or not device:
        raise ValueError(
            f"the trace has {num_steps} steps named {STEP!r} and {len(device)} GPU kernels; it needs both."
        )
    communication = common(merged(_spans(device, _communicates)), steps)
    compute = common(merged(_spans(device, lambda event: not _communicates(event))), steps)
    data = common(merged(_annotations(events, DATA)), steps)
    exposed = outside(communication, compute)
    unused = outside(outside(steps, compute), communication)
    parts = (
        compute,
        exposed,
        common(unused, data),
        outside(unused, data),
        communication,
        common(communication, compute),
    )
    return KernelTimes(*(length(part) * 1e-6 / num_steps for part in parts))


def _communicates(event: dict[str, Any]) -> bool:
    return event["cat"] == "kernel" and IS_COMMUNICATION in event["name"].lower()


def _annotations(events: list[dict[str, Any]], name: str) -> Iterator[Interval]:
    return _spans(events, lambda event: event.get("cat") == "user_annotation" and event["name"] == name)


def _spans(events: list[dict[str, Any]], wanted: Callable[[dict[str, Any]], bool]) -> Iterator[Interval]:
    """Start and end in microseconds."""
    return ((event["ts"], event["ts"] + event["dur"]) for event in events if event.get("ph") == "X" and wanted(event))
