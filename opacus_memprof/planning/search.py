# SPDX-License-Identifier: Apache-2.0
"""Finds the largest value of an argument that fits, by few runs.

A peak is the largest of many instants, each of which grows linearly with the batch, so it is piecewise linear. A line
through two runs that fit predicts the limit. A run close to the limit makes the line exact; then the predicted value
and the next one are run. If the line was wrong, the interval between is bisected. Reserved bytes predict the limit
while the allocator returns no memory to the GPU; requested bytes predict an upper limit in any case.

Between these limits, fragmentation decides whether a value fits, and round values are the worst: torch reserves memory
in pieces of 2 MiB. If tensors are whole pieces, nothing is left at their ends for slightly larger tensors. Therefore
the round values in this range below an answer are run as well. A value is not an answer if a smaller one does not fit.
"""

from collections.abc import Mapping
from dataclasses import dataclass

_FEW_RUNS = 7  # then lines have been wrong too often, and every second run bisects
_FAR = 1.5  # times the largest value that fitted: predictions beyond it are inexact
_PART_OF_FAR = 0.85  # of the way there
_ROUND = 16  # the least round value: from 128 KiB per sample on, its tensors are whole pieces


@dataclass(frozen=True)
class Point:
    """A run with one value: whether it fitted, its peaks and limit in bytes, and the allocator's retries.

    A retry returns cached memory to the GPU.
    """

    fits: bool
    requested: int
    reserved: int
    may_reserve: int
    retries: int = 0


@dataclass(frozen=True)
class Line:
    """Bytes at a value: `base` + `slope` · value."""

    base: float
    slope: float

    @classmethod
    def through(cls, first: tuple[int, int], second: tuple[int, int]) -> "Line":
        slope = (second[1] - first[1]) / (second[0] - first[0])
        return cls(first[1] - slope * first[0], slope)

    def value_at(self, size: int) -> int | None:
        """Returns the largest whole value with at most this size; None if the line does not grow."""
        return None if self.slope <= 0 else int((size - self.base) // self.slope)


@dataclass(frozen=True)
class Bracket:
    """The results of runs: `fitting` values below `bad`, the smallest that does not fit (None if unknown)."""

    fitting: tuple[int, ...]
    bad: int | None

    @classmethod
    def from_points(cls, points: Mapping[int, Point]) -> "Bracket":
        bad = min((value for value, point in points.items() if not point.fits), default=None)
        return cls(tuple(sorted(value for value in points if bad is None or value < bad)), bad)


def largest(points: Mapping[int, Point]) -> int | None:
    """Returns the largest value that fitted, below the smallest that did not; None if there is none."""
    return max(Bracket.from_points(points).fitting, default=None)


def requested_line(points: Mapping[int, Point]) -> Line | None:
    """Returns requested bytes near the largest value that fits; None if fewer than two have fitted."""
    anchors = _anchors(Bracket.from_points(points).fitting)
    return None if anchors is None else _line(points, anchors, "requested")


def next_values(points: Mapping[int, Point], low: int, high: int, width: int = 1) -> list[int]:
    """Returns the values from `low` to `high` to run next, at the same time.

    The first one is the most informative. With more processes, it returns also the values that would be next.

    Args:
        points: the runs so far.
        low: the smallest value.
        high: the largest value.
        width: the number of available processes.

    Returns:
        [] when the largest value is known, or `low` has not fitted. The largest value is known when it has fitted, the
        round values below it have fitted as far as cached memory was returned there, and the next value has not fitted
        or is beyond `high`.
    """
    if low not in points:
        return sorted({low, min(high, max(2 * low, low + 7))})[:width]
    found = Bracket.from_points(points)
    if not found.fitting:
        return []
    good, top = found.fitting[-1], high + 1 if found.bad is None else found.bad
    fits_beyond = any(point.fits and value > top for value, point in points.items())
    if top == good + 1 or fits_beyond:
        roomy = max((value for value in found.fitting if not points[value].retries), default=low)
        rounder = [value for value in _rounder(top - 1) if value > roomy and value not in points]
        if rounder or top == good + 1:
            return rounder[:width]
    chosen = _guesses(points, found, top, width)
    if len(points) >= _FEW_RUNS and len(points) % 2:
        chosen = [(good + top) // 2, *chosen]
    chosen = [min(max(value, good + 1), top - 1) for value in chosen]
    return sorted([value for value in dict.fromkeys(chosen) if value not in points][:width])


def _rounder(value: int) -> list[int]:
    """Returns the value rounded down to multiples of 16, 32, 64 and so on, in ascending order."""
    powers = (_ROUND << power for power in range(value.bit_length()))
    return sorted({value - value % power for power in powers})


def _guesses(points: Mapping[int, Point], found: Bracket, top: int, width: int) -> list[int]:
    """Returns the values to run next, the most informative first. Values may be outside of the searched range."""
    good = found.fitting[-1]
    room = points[good].may_reserve
    anchors = _anchors(found.fitting)
    if anchors is None:  # as if all memory grew with the value: an upper bound
        return [max(good * room // max(1, points[good].reserved), 2 * good, good + 7)]
    by_reserved = _line(points, anchors, "reserved").value_at(room)
    by_requested = _line(points, anchors, "requested").value_at(room)
    if by_requested is None:  # nothing grows so far
        return [top - 1]
    flushes = points[good].retries > 0  # then reserved bytes are not linear: they fall when cached memory is returned
    if flushes or by_reserved is None or by_reserved <= good:
        end = top if by_requested < good else min(top, by_requested + 2)
        parts = [good + (end - good) * part // (width + 1) for part in range(1, width + 1)]
        return parts if flushes else [good + 1, *parts]
    if found.bad is not None and by_reserved >= found.bad:  # the prediction was too high: by a little, or a lot
        wrong = sum(not point.fits for point in points.values())
        less = max(1, (top - good) * 2 ** min(wrong, 3) // 16)
        return [top - less, *(good + (top - good) * part // width for part in range(1, width))]
    if by_reserved > _FAR * good:  # reserved bytes are slightly nonlinear: first a run close to the limit
        return [good + int(_PART_OF_FAR * (by_reserved - good))]
    return [by_reserved, by_reserved + 1]


def _anchors(fitting: tuple[int, ...]) -> tuple[int, int] | None:
    """Returns two values for a line that is exact at the largest, not too close: reserved bytes grow in steps."""
    if len(fitting) < 2:
        return None
    good = fitting[-1]
    return next((value for value in reversed(fitting) if value <= 0.9 * good), fitting[0]), good


def _line(points: Mapping[int, Point], anchors: tuple[int, int], name: str) -> Line:
    first, second = ((value, getattr(points[value], name)) for value in anchors)
    return Line.through(first, second)
