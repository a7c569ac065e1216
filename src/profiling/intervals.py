"""Arithmetic of intervals on a line of time: what is busy at all, and what is busy beside something else."""

from collections.abc import Iterable

Interval = tuple[float, float]  # start and end, in any unit; end >= start


def merged(intervals: Iterable[Interval]) -> list[Interval]:
    """The same points in time as disjoint intervals, in order; those that touch become one."""
    found: list[Interval] = []
    for start, end in sorted(intervals):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        elif end > start:
            found.append((start, end))
    return found


def length(disjoint: Iterable[Interval]) -> float:
    """The time that disjoint intervals take together."""
    return sum(end - start for start, end in disjoint)


def common(first: list[Interval], second: list[Interval]) -> list[Interval]:
    """Where both are; both as `merged` gives them, and so is the result."""
    found: list[Interval] = []
    i = j = 0
    while i < len(first) and j < len(second):
        start, end = max(first[i][0], second[j][0]), min(first[i][1], second[j][1])
        if start < end:
            found.append((start, end))
        if first[i][1] < second[j][1]:
            i += 1
        else:
            j += 1
    return found


def outside(first: list[Interval], second: list[Interval]) -> list[Interval]:
    """Where `first` is and `second` is not; both as `merged` gives them, and so is the result."""
    found: list[Interval] = []
    j = 0
    for start, end in first:
        while j < len(second) and second[j][1] <= start:
            j += 1
        k = j
        while k < len(second) and second[k][0] < end:
            if second[k][0] > start:
                found.append((start, second[k][0]))
            start = max(start, second[k][1])
            k += 1
        if start < end:
            found.append((start, end))
    return found
