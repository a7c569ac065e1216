"""Intervals against the plain meaning: the set of unit cells that they cover."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from src.profiling.intervals import Interval, common, length, merged, outside

INTERVALS = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 6)).map(lambda pair: (pair[0], pair[0] + pair[1])))


def cells(intervals: list[Interval]) -> set[int]:
    """Which of the unit cells [n, n + 1) whole-numbered intervals cover."""
    return {n for start, end in intervals for n in range(int(start), int(end))}


@given(INTERVALS)
def test_merging_changes_no_covered_cell_and_leaves_gaps_between_the_rest(intervals):
    found = merged(intervals)
    assert cells(found) == cells(intervals)
    assert all(before[1] < after[0] for before, after in pairwise(found))
    assert length(found) == len(cells(intervals))


@given(INTERVALS, INTERVALS)
def test_common_and_outside_are_intersection_and_difference_and_add_up(first, second):
    left, right = merged(first), merged(second)
    assert cells(common(left, right)) == cells(left) & cells(right)
    assert cells(outside(left, right)) == cells(left) - cells(right)
    assert length(common(left, right)) + length(outside(left, right)) == length(left)
