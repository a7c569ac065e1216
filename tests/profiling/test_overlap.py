"""What is said of measured times, and what is not."""

import random

import pytest

from src.profiling.breakdown import of_timings
from src.profiling.overlap import Estimate, Overlap
from src.profiling.probe import overlap_of


def overlap(exposed: float, exposed_noise: float, alone: float = 0.1, alone_noise: float = 0.001) -> Overlap:
    return Overlap(Estimate(exposed, exposed_noise), Estimate(alone, alone_noise))


def test_the_hidden_part_is_what_communication_takes_less_what_it_adds():
    # 1 - 0.03 / 0.1; noise (0.004 + 0.001) / 0.1
    found = overlap(exposed=0.03, exposed_noise=0.004)
    assert found.hidden_fraction == pytest.approx(0.7)
    assert found.hidden_seconds == pytest.approx(0.07)
    assert found.noise_fraction == pytest.approx(0.05)
    assert found.in_words() == "70 ± 5 % (70.0 of 100.0 ± 1.0 ms alone)"


def test_what_costs_less_than_the_noise_is_hidden_at_least_so_far():
    # at least 1 - 0.002 / 0.1 - (0.004 + 0.001) / 0.1
    assert overlap(exposed=0.002, exposed_noise=0.004).in_words().startswith("at least 93%")


def test_communication_that_costs_more_beside_computation_than_alone_hides_nothing_and_it_is_said():
    found = overlap(exposed=0.15, exposed_noise=0.004)
    assert found.hidden_fraction == 0.0
    assert (
        found.in_words() == "0 % (100.0 ± 1.0 ms alone; beside the computation it adds 150.0 ± 4.0 ms, which is more)"
    )


@pytest.mark.parametrize(
    "found",
    [
        overlap(exposed=0.03, exposed_noise=0.12),
        overlap(exposed=0.0, exposed_noise=0.001, alone=0.001, alone_noise=0.002),
    ],
)
def test_where_the_timings_scatter_as_much_as_communication_takes_there_is_no_number(found):
    assert found.hidden_fraction is None
    assert found.hidden_seconds is None
    assert found.noise_fraction is None
    assert found.in_words().startswith("not measurable here")


def test_the_noise_of_a_median_shrinks_with_the_root_of_the_samples_and_outlives_one_slow_sample():
    few, many = Estimate.of([1.0, 2.0, 3.0]), Estimate.of([1.0, 2.0, 3.0] * 100)
    assert few.seconds == many.seconds == 2.0
    assert few.noise_seconds == pytest.approx(4.64 * 1.0 / 3**0.5)  # quartiles 1.5 and 2.5
    assert many.noise_seconds < few.noise_seconds / 5
    assert Estimate.of([*[1.0, 2.0, 3.0] * 5, 99.0]).noise_seconds < few.noise_seconds


#: Two ranks, three samples. The slower rank takes 0.30 with and 0.20 without communication.
SECONDS = {
    "data": [[0.01, 0.03]] * 3,
    "synchronized": [[0.30, 0.29]] * 3,
    "omitting": [[0.10, 0.20]] * 3,
    "alone": [[0.16, 0.15]] * 3,
    "optimizer": [[0.05, 0.05]] * 3,
}


def test_the_slowest_rank_makes_a_steps_time_and_the_others_idle():
    found = overlap_of(SECONDS)
    assert found.exposed.seconds == pytest.approx(0.30 - 0.20)
    assert found.hidden_fraction == pytest.approx(1 - 0.10 / 0.16)
    parts = of_timings(SECONDS, found)
    assert parts.data_seconds == pytest.approx((0.01 + 0.03) / 2)
    assert parts.compute_seconds == pytest.approx((0.10 + 0.20) / 2 + 0.05)
    assert parts.communication_seconds == pytest.approx(0.10)
    assert parts.idle_seconds == pytest.approx((0.03 - 0.02) + (0.20 - 0.15))
    assert parts.step_seconds == pytest.approx(0.03 + 0.30 + 0.05)


def test_communication_that_does_not_stand_out_is_no_part_of_its_own():
    parts = of_timings(SECONDS, Overlap(Estimate(0.01, 0.02), Estimate(0.16, 0.0)))
    assert parts.communication_seconds is None
    assert parts.compute_seconds == pytest.approx((0.30 + 0.29) / 2 + 0.05)
    assert parts.step_seconds == pytest.approx(0.03 + 0.30 + 0.05)


@pytest.mark.parametrize("number", [2, 3, 5, 6, 7, 9, 13, 17, 20, 21, 33, 41])
def test_the_true_median_lies_within_the_noise_in_19_of_20_cases(number: int):
    draws = random.Random(number)
    cases = [Estimate.of([draws.gauss(1.0, 0.1) for _ in range(number)]) for _ in range(20_000)]
    inside = sum(abs(case.seconds - 1.0) <= case.noise_seconds for case in cases)
    assert inside / 20_000 > 0.95 - 3 * (0.05 * 0.95 / 20_000) ** 0.5  # three standard errors of the count
