"""Float formats, against numbers worked out by hand."""

import dataclasses
import math

import pytest
import torch

from src.bench.formats import FORMATS, Format, report

BY_NAME = {format.name: format for format in FORMATS}

#: bits, mantissa bits, largest, smallest normal, epsilon. FP8 as in table 1 of arXiv 2209.05433.
BY_HAND = {
    "FP32": (32, 23, (2 - 2**-23) * 2.0**127, 2.0**-126, 2.0**-23),
    "TF32": (19, 10, (2 - 2**-10) * 2.0**127, 2.0**-126, 2.0**-10),
    "FP16": (16, 10, 65504.0, 2.0**-14, 2.0**-10),
    "BF16": (16, 7, (2 - 2**-7) * 2.0**127, 2.0**-126, 2.0**-7),
    "FP8 E4M3": (8, 3, 448.0, 2.0**-6, 2.0**-3),
    "FP8 E5M2": (8, 2, 57344.0, 2.0**-14, 2.0**-2),
}


@pytest.mark.parametrize("name", BY_HAND)
def test_a_formats_numbers_are_those_worked_out_by_hand(name: str) -> None:
    found = report(BY_NAME[name])
    assert (found.bits, found.mantissa_bits, found.largest, found.smallest_normal, found.epsilon) == BY_HAND[name]
    assert found.disagreements == ()


def test_every_format_is_worked_out_by_hand_here() -> None:
    assert BY_HAND.keys() == BY_NAME.keys()


@pytest.mark.parametrize("format", FORMATS, ids=lambda format: format.name)
def test_above_the_largest_value_comes_no_finite_one(format: Format) -> None:
    assert not math.isfinite(format.decoded(format.largest_pattern + 1))


@pytest.mark.parametrize("format", FORMATS, ids=lambda format: format.name)
def test_below_the_smallest_normal_a_step_is_as_wide_as_above_it(format: Format) -> None:
    """Which is what makes it the smallest normal: further down the mantissa loses bits instead of steps."""
    first = format.smallest_normal_pattern
    below, at, above = (format.decoded(first + step) for step in (-1, 0, 1))
    assert at - below == above - at


def test_tf32_has_no_type_and_is_said_to_be_derived() -> None:
    assert report(BY_NAME["TF32"]).source.startswith("derived")
    assert report(BY_NAME["BF16"]).source == "torch.finfo"


def test_a_layout_that_is_not_the_types_is_found() -> None:
    wrong = dataclasses.replace(BY_NAME["FP16"], exponent_bits=8, mantissa_bits=7)
    said = " ".join(report(wrong).disagreements)
    assert "largest: 65504.0" in said
    assert "epsilon: 0.0009765625" in said


def test_rounding_to_a_type_steps_by_its_epsilon() -> None:
    for format in FORMATS:
        if format.unread_bits == 0:
            halfway = torch.tensor(1 + format.epsilon / 2, dtype=torch.float64).to(format.dtype)
            beyond = torch.tensor(1 + format.epsilon * 0.75, dtype=torch.float64).to(format.dtype)
            assert float(halfway) == 1.0, format.name  # to even
            assert float(beyond) == 1 + format.epsilon, format.name
