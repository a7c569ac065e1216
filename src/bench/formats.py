"""Float formats worked out from their bit layout, and held against torch.finfo and against decoded bit patterns."""

import math
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Format:
    """A binary float format: one sign bit, then exponent_bits, then mantissa_bits, from the highest bit down.

    dtype: torch's type for it. TF32 has none: it is how a GPU's tensor cores read fp32's bits, all but the lowest
    `unread_bits`; there `dtype` is the type that it is stored in. infinities: whether the highest exponent is kept
    for infinities and NaN (IEEE 754); else only its largest mantissa is (NaN).
    """

    name: str
    exponent_bits: int
    mantissa_bits: int
    dtype: torch.dtype
    unread_bits: int = 0
    infinities: bool = True

    @property
    def bits(self) -> int:
        """Bits that carry meaning; TF32 keeps 19 of the 32 that it is stored in."""
        return 1 + self.exponent_bits + self.mantissa_bits

    @property
    def bias(self) -> int:
        """What is taken from the stored exponent: 2^(e-1) - 1."""
        return (1 << (self.exponent_bits - 1)) - 1

    @property
    def largest(self) -> float:
        """The largest finite value."""
        return self.value(self.largest_pattern)

    @property
    def smallest_normal(self) -> float:
        """The smallest positive value with all its mantissa bits: 2^(1 - bias)."""
        return math.ldexp(1.0, 1 - self.bias)

    @property
    def epsilon(self) -> float:
        """The step from 1 to the next larger value: 2^-mantissa_bits."""
        return math.ldexp(1.0, -self.mantissa_bits)

    @property
    def largest_pattern(self) -> int:
        """The bits of the largest finite value."""
        if self.infinities:
            return (((1 << self.exponent_bits) - 1) << self.mantissa_bits) - 1
        return (1 << (self.exponent_bits + self.mantissa_bits)) - 2

    @property
    def smallest_normal_pattern(self) -> int:
        return 1 << self.mantissa_bits

    @property
    def one_pattern(self) -> int:
        return self.bias << self.mantissa_bits

    def value(self, pattern: int) -> float:
        """The value of a positive, normal bit pattern: (1 + mantissa / 2^m) · 2^(exponent - bias)."""
        exponent, mantissa = divmod(pattern, 1 << self.mantissa_bits)
        return math.ldexp(1 + mantissa / (1 << self.mantissa_bits), exponent - self.bias)

    def decoded(self, pattern: int) -> float:
        """What torch reads in these bits."""
        stored = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32}[self.dtype.itemsize]
        bits = torch.tensor([pattern << self.unread_bits], dtype=torch.int64).to(stored)
        return float(bits.view(self.dtype).double().item())


#: FP8 after Micikevicius et al., "FP8 Formats for Deep Learning", arXiv 2209.05433, table 1; TF32 after NVIDIA's
#: A100 whitepaper (2020), "TF32 precision": fp32's exponent and fp16's mantissa.
FORMATS = (
    Format("FP32", 8, 23, torch.float32),
    Format("TF32", 8, 10, torch.float32, unread_bits=13),
    Format("FP16", 5, 10, torch.float16),
    Format("BF16", 8, 7, torch.bfloat16),
    Format("FP8 E4M3", 4, 3, torch.float8_e4m3fn, infinities=False),
    Format("FP8 E5M2", 5, 2, torch.float8_e5m2),
)


@dataclass(frozen=True)
class FormatReport:
    """A format's numbers. source: where they are from. disagreements: with the bit layout, in words; none is right."""

    name: str
    bits: int
    exponent_bits: int
    mantissa_bits: int
    largest: float
    smallest_normal: float
    epsilon: float
    source: str
    disagreements: tuple[str, ...]


def report(format: Format) -> FormatReport:
    """The numbers of torch.finfo, or derived from the layout where torch has no such type, checked either way."""
    has_dtype = format.unread_bits == 0
    info = torch.finfo(format.dtype)
    if has_dtype:
        numbers = {"largest": info.max, "smallest normal": info.smallest_normal, "epsilon": info.eps}
    else:
        numbers = {
            "largest": format.largest,
            "smallest normal": format.smallest_normal,
            "epsilon": format.epsilon,
        }
    by_layout = (format.largest, format.smallest_normal, format.epsilon)
    decoded = (
        format.decoded(format.largest_pattern),
        format.decoded(format.smallest_normal_pattern),
        format.decoded(format.one_pattern + 1) - format.decoded(format.one_pattern),
    )
    wrong = []
    for (what, number), layout, bits in zip(numbers.items(), by_layout, decoded, strict=True):
        if not number == layout == bits:
            wrong.append(f"{what}: {number!r}, by its bit layout {layout!r}, decoded from its bits {bits!r}")
    if has_dtype and info.bits != format.bits:
        wrong.append(f"bits: {info.bits}, by its bit layout {format.bits}")
    return FormatReport(
        format.name,
        format.bits,
        format.exponent_bits,
        format.mantissa_bits,
        numbers["largest"],
        numbers["smallest normal"],
        numbers["epsilon"],
        "torch.finfo" if has_dtype else "derived: no type of torch's",
        tuple(wrong),
    )
