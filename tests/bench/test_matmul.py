"""The arithmetic of the multiplication benchmark, and real multiplications small enough for a test."""

import dataclasses
import math

import pytest
import torch

from src.bench.matmul import (
    DTYPES,
    Effort,
    Measured,
    NotMeasured,
    affordable,
    measure,
    operands,
    relative_error,
    seconds_of_each,
    tf32_switched,
    tflops,
    too_slow,
)
from src.bench.peaks import PEAKS, peak_tflops

CPU = torch.device("cpu")
SMALL = Effort(size=48, warmup=2, iterations=5, max_seconds=30)


def nothing() -> None:
    return None


def test_a_second_for_ten_thousand_rows_is_two_tflops() -> None:
    # 2 · (10^4)^3 = 2·10^12 operations
    assert tflops(10_000, seconds=1.0) == 2.0
    assert tflops(10_000, seconds=0.5) == 4.0


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
def test_a_cpu_measures_what_it_can_multiply(dtype: str) -> None:
    row = measure(CPU, dtype, SMALL, nothing)
    assert isinstance(row, Measured)
    assert (row.iterations, row.warmup, row.is_cut) == (5, 2, False)
    assert 0 < row.fastest_milliseconds <= row.milliseconds
    assert row.tflops == pytest.approx(2 * 48**3 / (row.milliseconds * 1e-3) / 1e12)
    assert row.is_right
    # Nobody states a CPU's peak here, so there is no fraction of it.
    assert row.peak_tflops is None
    assert row.fraction_of_peak is None


def test_tf32_on_a_cpu_is_not_measured_and_says_why() -> None:
    row = measure(CPU, "tf32", SMALL, nothing)
    assert row == NotMeasured("tf32", "TF32 is a mode of NVIDIA GPUs (Ampere and later), and this is a CPU")


def test_each_multiplication_is_a_sign_of_life() -> None:
    beats = []
    measure(CPU, "fp32", SMALL, lambda: beats.append(1))
    assert len(beats) == SMALL.warmup + SMALL.iterations


def test_the_tf32_switch_is_put_back() -> None:
    before = torch.get_float32_matmul_precision()
    with tf32_switched(True):
        assert torch.get_float32_matmul_precision() == "high"
    assert torch.get_float32_matmul_precision() == before


def test_time_runs_while_the_work_is_done() -> None:
    a = torch.randn(256, 256)
    once, *_ = seconds_of_each(CPU, lambda: [a @ a for _ in range(50)], 1)
    [single] = seconds_of_each(CPU, lambda: a @ a, 1)
    assert once > single


def test_iterations_fill_what_the_warm_ups_left() -> None:
    effort = Effort(iterations=50, max_seconds=10)
    assert affordable(effort, spent_seconds=2, seconds_each=1) == 8
    assert affordable(effort, spent_seconds=0.1, seconds_each=0.01) == 50  # no more than asked for
    assert affordable(effort, spent_seconds=12, seconds_each=6) == 1  # one at least
    assert affordable(effort, spent_seconds=0, seconds_each=0) == 50  # no warm-up: nothing is known


def test_too_little_time_is_said() -> None:
    row = measure(CPU, "fp32", dataclasses.replace(SMALL, size=256, max_seconds=1e-9), nothing)
    assert isinstance(row, Measured)  # sizes up to the smallest probe are measured whatever it takes
    assert (row.warmup, row.iterations, row.is_cut) == (1, 1, True)


def test_a_type_that_would_take_too_long_is_not_measured() -> None:
    tried = []

    def slow(size: int) -> float:  # 1 GFLOP/s
        tried.append(size)
        return 2 * size**3 / 1e9

    reason = too_slow(Effort(size=4096, max_seconds=10), slow)
    # 2 · 4096³ / 10⁹ = 137 s; one of 1024 would take 2.1 s, more than a tenth of max_seconds, and is not tried.
    assert reason is not None
    assert "about 137 s, going by one of 512x512: more than task.max_seconds=10." in reason
    assert tried == [256, 512]


def test_a_small_multiplication_that_was_held_up_refuses_nothing() -> None:
    def noisy(size: int) -> float:  # 100 GFLOP/s, but the small ones paid for something else
        return 2 * size**3 / 1e11 + (0.02 if size < 512 else 0.0)

    assert too_slow(Effort(size=4096, max_seconds=10), noisy) is None


def test_a_wrong_product_is_found() -> None:
    a, b = operands(CPU, "fp32", 128)
    product = a @ b
    assert relative_error(a, b, product) < 1e-6
    product[3, -3] += product[:64, -64:].abs().max() / 2
    assert relative_error(a, b, product) == pytest.approx(0.5, rel=1e-3)
    product[0, -1] = math.nan
    row = Measured("fp32", 1, 1, 1, None, 1, 1, False, relative_error(a, b, product), 1.0)
    assert not row.is_right


@pytest.mark.parametrize(
    ("name", "dtype", "peak"),
    [
        ("NVIDIA H200", "bf16", 989.4),
        ("NVIDIA A100-SXM4-80GB", "tf32", 156.0),
        ("NVIDIA A100 80GB PCIe", "fp32", 19.5),
        ("Tesla T4", "bf16", None),  # known, and has none
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "bf16", None),  # a seventh of one
        ("NVIDIA L40", "bf16", None),  # not L40S, and not L4
        ("CPU", "fp32", None),
    ],
)
def test_a_peak_is_the_devices_own_or_none(name: str, dtype: str, peak: float | None) -> None:
    assert peak_tflops(name, dtype) == peak


def test_peaks_are_dense_and_double_from_tf32_to_16_bit() -> None:
    """A figure with sparsity among the others would be twice too large. Tensor cores do TF32 at half the rate."""
    for name, peaks in PEAKS.items():
        assert peaks.source, name
        if peaks.tf32 is not None:
            assert peaks.fp16 / peaks.tf32 == pytest.approx(2, rel=0.02), name
            assert peaks.bf16 == peaks.fp16, name


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_gpu_multiplies_below_its_peak(dtype: str) -> None:
    row = measure(torch.device("cuda", 0), dtype, Effort(size=2048, max_seconds=5), nothing)
    if isinstance(row, NotMeasured):
        assert "compute capability" in row.reason
        return
    assert row.is_right
    # Boost clocks above the nominal one give a few per cent more; timing without waiting gives a hundred times.
    assert row.fraction_of_peak is None or 0.02 < row.fraction_of_peak < 1.15
