"""Where a step went, from a trace worked out by hand, and the trace that a CPU writes."""

import json
import os
from pathlib import Path

import pytest
import torch

from src.profiling.finding import from_kernels
from src.profiling.trace import DATA, STEP, annotated, capture, of_kernels, quiet_profiler, read_events


def event(category: str, name: str, start: float, end: float, stream: int = 7) -> dict[str, object]:
    return {"ph": "X", "cat": category, "name": name, "ts": start, "dur": end - start, "args": {"stream": stream}}


#: Two steps of 100 microseconds, 50 apart; c computes, m copies, n communicates on a stream of its own, d fetches data.
#:
#:   step 1   0 ddddddddd.20 mm 30 cccccccccccccccc 60 ........ 70 ......... 100
#:                              40 nnnnnnnnnnnnnnnnnnnnnnnnnnnn 80
#:   step 2   150 ..... 160 cccc 180 .... 250     (a second compute kernel inside the first, on another stream)
BY_HAND = [
    event("user_annotation", STEP, 0, 100),
    event("user_annotation", STEP, 150, 250),
    event("user_annotation", DATA, 0, 25),
    event("gpu_memcpy", "Memcpy HtoD", 20, 30),
    event("kernel", "sm90_gemm", 30, 60),
    event("kernel", "ncclDevKernel_AllReduce_Sum_f32_RING_LL", 40, 80, stream=20),
    event("kernel", "sm90_gemm", 160, 180),
    event("kernel", "elementwise", 165, 170, stream=9),
    event("kernel", "between the steps", 110, 140),
    event("cpu_op", "aten::mm", 0, 90),
    {"ph": "M", "name": "process_name"},
]


def test_a_trace_by_hand_gives_the_parts_that_its_drawing_shows():
    found = of_kernels(BY_HAND)
    per_step = 1e-6 / 2
    assert found.compute == pytest.approx((40 + 20) * per_step)
    assert found.communication == pytest.approx(40 * per_step)
    assert found.hidden == pytest.approx(20 * per_step), "from 40 to 60"
    assert found.exposed == pytest.approx(20 * per_step), "from 60 to 80"
    assert found.data == pytest.approx(20 * per_step), "the copy begins before the fetching ends"
    assert found.idle == pytest.approx((20 + 80) * per_step)
    assert found.compute + found.exposed + found.data + found.idle == pytest.approx(200 * per_step)


def test_kernels_of_two_ranks_are_told_in_their_mean():
    found = from_kernels([of_kernels(BY_HAND), of_kernels(BY_HAND)])
    assert found.record["hidden_comm_fraction"] == pytest.approx(0.5)
    assert found.record["step_seconds"] == pytest.approx(100e-6)
    assert "kernels" in found.method


def test_without_a_communication_kernel_no_fraction_is_told():
    silent = [spoken for spoken in BY_HAND if "nccl" not in str(spoken["name"])]
    found = from_kernels([of_kernels(silent)])
    assert found.record["hidden_comm_fraction"] is None
    assert "not measured" in found.hidden


def test_a_trace_without_kernels_is_no_answer():
    with pytest.raises(ValueError, match=r"2 steps .* 0 GPU kernels"):
        of_kernels([spoken for spoken in BY_HAND if spoken.get("cat") == "user_annotation"])


def test_a_captured_trace_has_the_steps_and_the_data_in_chromes_format(tmp_path: Path) -> None:
    def take_step() -> None:
        with annotated(DATA):
            torch.ones(3)
        torch.ones(3, 3) @ torch.ones(3, 3)

    path = tmp_path / "trace.json.gz"
    capture(take_step, 2, path, torch.device("cpu"))
    events = read_events(path)
    names = [found["name"] for found in events if found.get("ph") == "X" and found.get("cat") == "user_annotation"]
    assert names.count(STEP) == names.count(DATA) == 2
    assert any(found["name"] == "aten::mm" for found in events)
    plain = tmp_path / "trace.json"
    plain.write_text(json.dumps({"traceEvents": events}))
    assert read_events(plain) == events


@pytest.mark.parametrize("before", [None, "3"])
def test_the_environment_is_as_before_when_the_profiler_has_been_quiet(
    monkeypatch: pytest.MonkeyPatch, before: str | None
) -> None:
    monkeypatch.delenv("KINETO_LOG_LEVEL", raising=False)
    if before is not None:
        monkeypatch.setenv("KINETO_LOG_LEVEL", before)
    with quiet_profiler():
        assert os.environ["KINETO_LOG_LEVEL"] == (before or "99")
    assert os.environ.get("KINETO_LOG_LEVEL") == before
