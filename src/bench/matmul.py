"""How fast a device multiplies square matrices, by type, against the peak that its maker states."""

import math
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from src.bench.peaks import peak_tflops
from src.precision import cpu_has_native_bf16

DTYPES = {"fp32": torch.float32, "tf32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
#: The step from 1 to the next number that the multiplication tells apart; TF32 keeps 10 bits of the mantissa.
EPSILONS = {"fp32": 2.0**-23, "tf32": 2.0**-10, "fp16": 2.0**-10, "bf16": 2.0**-7}
AMPERE = (8, 0)  # compute capability from which on a GPU has TF32 and bf16
CHECKED = 64  # rows and columns of the product that are checked
PROBE_SIZES = (256, 512, 1024, 2048)  # of multiplications that tell beforehand how long one of full size will take
PROBE_SHARE = 0.1  # of max_seconds that one of them may take
WARMUP_SHARE = 0.25  # of max_seconds


@dataclass(frozen=True)
class Effort:
    """What is multiplied and how often: size x size, after `warmup`, up to `iterations` times, in about max_seconds
    for each type, warm-ups among them."""

    size: int = 4096
    warmup: int = 5
    iterations: int = 50
    max_seconds: float = 10.0


@dataclass(frozen=True)
class Measured:
    """milliseconds: the median of `iterations`. tflops: 10^12 floating-point operations a second, by that median.

    peak_tflops: the device's; None where it is not known. error: of the product, largest on a slice, relative to the
    slice's largest value in fp32; limit: what rounding explains. is_cut: whether max_seconds left fewer than asked.
    """

    dtype: str
    milliseconds: float
    fastest_milliseconds: float
    tflops: float
    peak_tflops: float | None
    warmup: int
    iterations: int
    is_cut: bool
    error: float
    limit: float
    remark: str = ""

    @property
    def fraction_of_peak(self) -> float | None:
        return None if self.peak_tflops is None else self.tflops / self.peak_tflops

    @property
    def is_right(self) -> bool:
        return self.error <= self.limit  # False for NaN


@dataclass(frozen=True)
class NotMeasured:
    """reason: why there is no number."""

    dtype: str
    reason: str


def tflops(size: int, seconds: float) -> float:
    """2·n³ operations (n³ multiplications, as many additions) in `seconds`, in 10^12 a second."""
    return 2 * size**3 / seconds / 1e12


def device_name(device: torch.device) -> str:
    """A GPU's, as torch tells it; "CPU" else."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


def measure(device: torch.device, dtype: str, effort: Effort, beat: Callable[[], None]) -> Measured | NotMeasured:
    """One type's row. beat: called now and then, as a sign of life. Changes torch's TF32 switch while it runs only."""
    reason = lacks(device, dtype)
    if reason is not None:
        return NotMeasured(dtype, reason)
    try:
        with tf32_switched(dtype == "tf32"):
            reason = too_slow(effort, lambda size: probe_seconds(device, dtype, size))
            return NotMeasured(dtype, reason) if reason is not None else timed(device, dtype, effort, beat)
    except torch.OutOfMemoryError:
        return NotMeasured(dtype, f"the device has no room for three matrices of {effort.size}x{effort.size}")


def lacks(device: torch.device, dtype: str) -> str | None:
    """Why a device has no arithmetic of a type; None where it has."""
    if device.type != "cuda":
        return "TF32 is a mode of NVIDIA GPUs (Ampere and later), and this is a CPU" if dtype == "tf32" else None
    capability = torch.cuda.get_device_capability(device)
    if dtype in ("tf32", "bf16") and capability < AMPERE:
        return f"compute capability {capability[0]}.{capability[1]} has no {dtype}: 8.0 (Ampere) and later have"
    return None


@contextmanager
def tf32_switched(on: bool) -> Iterator[None]:
    """fp32 multiplications in TF32, or in full, while the block runs."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if on else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def operands(device: torch.device, dtype: str, size: int) -> tuple[Tensor, Tensor]:
    """Two matrices of standard normal numbers, the same at every call. (size, size) each."""
    generator = torch.Generator(device).manual_seed(0)
    first, second = (torch.randn(size, size, device=device, generator=generator) for _ in range(2))
    return first.to(DTYPES[dtype]), second.to(DTYPES[dtype])


def too_slow(effort: Effort, seconds_at: Callable[[int], float]) -> str | None:
    """Why one multiplication of full size would take longer than max_seconds; None where it will not.

    seconds_at: how long one of a smaller size takes. A slow answer is checked at the next larger one.
    """
    reason, predicted = None, 0.0
    for size in PROBE_SIZES:
        if size >= effort.size or predicted * (size / effort.size) ** 3 > PROBE_SHARE * effort.max_seconds:
            break
        predicted = seconds_at(size) * (effort.size / size) ** 3
        if predicted <= effort.max_seconds:
            return None
        reason = (
            f"one multiplication would take about {predicted:.0f} s, going by one of {size}x{size}:"
            f" more than task.max_seconds={effort.max_seconds:g}. Raise it, or lower task.size"
        )
    return reason


def probe_seconds(device: torch.device, dtype: str, size: int) -> float:
    """The fastest of three multiplications; the first alone pays for start-up."""
    a, b = operands(device, dtype, size)
    return min(seconds_of_each(device, lambda: a @ b, 3))


def timed(device: torch.device, dtype: str, effort: Effort, beat: Callable[[], None]) -> Measured:
    """Warm up, measure, check the product."""
    a, b = operands(device, dtype, effort.size)
    product = torch.empty_like(a)

    def multiply() -> None:
        torch.matmul(a, b, out=product)  # into the same memory: an allocation is no multiplication

    spent, last, warmup = 0.0, 0.0, 0
    while warmup < effort.warmup and (warmup == 0 or spent < WARMUP_SHARE * effort.max_seconds):
        [last] = seconds_of_each(device, multiply, 1, beat)
        spent, warmup = spent + last, warmup + 1
    iterations = affordable(effort, spent, last)
    each = seconds_of_each(device, multiply, iterations, beat)
    median = statistics.median(each)
    return Measured(
        dtype=dtype,
        milliseconds=median * 1e3,
        fastest_milliseconds=min(each) * 1e3,
        tflops=tflops(effort.size, median),
        peak_tflops=peak_tflops(device_name(device), dtype),
        warmup=warmup,
        iterations=iterations,
        is_cut=(warmup, iterations) != (effort.warmup, effort.iterations),
        error=relative_error(a, b, product),
        limit=4 * EPSILONS[dtype] + math.sqrt(effort.size) * EPSILONS["fp32"],
        remark="emulated: this CPU has no bf16 arithmetic"
        if dtype == "bf16" and device.type == "cpu" and not cpu_has_native_bf16()
        else "",
    )


def affordable(effort: Effort, spent_seconds: float, seconds_each: float) -> int:
    """Iterations that fit into what the warm-ups left of max_seconds; one at least, and no more than were asked for.

    seconds_each: of the last warm-up, 0 where there was none.
    """
    if seconds_each <= 0:
        return effort.iterations
    return max(1, min(effort.iterations, int((effort.max_seconds - spent_seconds) / seconds_each)))


def seconds_of_each(
    device: torch.device, work: Callable[[], object], count: int, beat: Callable[[], None] = lambda: None
) -> list[float]:
    """How long `work` takes, `count` times one after the other: by events in a GPU's stream, by the clock on a CPU."""
    if device.type != "cuda":
        found = []
        for _ in range(count):
            started = time.perf_counter()
            work()
            found.append(time.perf_counter() - started)
            beat()
        return found
    events = [(gpu_event(), gpu_event()) for _ in range(count)]
    for begin, end in events:
        begin.record()
        work()
        end.record()
    torch.cuda.synchronize(device)
    beat()
    return [begin.elapsed_time(end) / 1e3 for begin, end in events]


def gpu_event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def relative_error(a: Tensor, b: Tensor, product: Tensor) -> float:
    """Of the product's first rows and last columns, against fp32 on the CPU: largest difference over largest value.

    a, b, product: (size, size), of any type; what rounding to that type did to a and b is no error here.
    """
    with tf32_switched(False):
        right = a[:CHECKED].cpu().float() @ b[:, -CHECKED:].cpu().float()
    found = product[:CHECKED, -CHECKED:].cpu().float()
    return float((found - right).abs().max() / right.abs().max())
