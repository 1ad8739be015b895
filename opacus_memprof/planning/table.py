# SPDX-License-Identifier: Apache-2.0
"""The table of a plan: the largest value of an argument that fits, for each mode and GPU, found by few runs.

A peak is the largest of many instants, each of which grows linearly with the batch, so it is piecewise linear. A line
through two runs that fit predicts the limit; where three runs show a bend, as with the length of sequences, whose
attention matrices grow with its square, a parabola does. A run close to the limit makes it exact; then the predicted
value and the next one are run. Reserved bytes predict the limit while the allocator returns no memory to the GPU;
requested bytes predict an upper limit in any case. A run that does not fit predicts the limit, too: what was still
reserved, and the allocation for which nothing was left, grow with the value. What these runs leave open is halved. A
cell takes at most MOST_RUNS; where these do not settle it, the largest value that fitted is the answer.

Between these limits, fragmentation decides whether a value fits, and round values are the worst: torch reserves memory
in pieces of 2 MiB. If tensors are whole pieces, nothing is left at their ends for slightly larger tensors. Therefore
the round values in this range below an answer are run as well. A value is not an answer if a smaller one does not fit.
"""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from opacus_memprof.errors import MemprofError
from opacus_memprof.planning.configuration import (
    PlannedConfiguration,
    PlannedProgram,
    Range,
    Value,
    places_of_batch,
    with_value,
)
from opacus_memprof.planning.runs import PendingRuns, PlannedRuns
from opacus_memprof.planning.verdict import check_run, memory_of
from opacus_memprof.planning.virtual_run import VirtualRun
from opacus_memprof.profiles.units import format_bytes

MOST_RUNS = 16  # of a cell
_PREDICTED = 8  # runs whose value is predicted from earlier runs; later runs halve the interval
_CLOSE = 100  # an answer that is reached only by returning cached memory is exact to one in so many
_FAR = 1.5  # predictions are inexact for more than so many times the largest value that fitted
_PART_OF_FAR = 0.85  # of the way to that limit
_PART_OF_FLUSHED = 0.85  # of the way to the upper limit: a run that barely does not fit predicts best
_MUCH = 1.25  # so many times the value that fits without returning cached memory would fit if all of it were returned
_NEAR = 10  # what is not farther than this part of a value that fits is foretold exactly
_SLOW = 0.85  # of what is between: if runs foretell so little, it is halved
_APART = 0.6  # of the second value is the most that the first of three values may be which show a bend
_BENT = 0.02  # of all bytes is the least part that grows with the square of the value, to tell a bend from a step
_ROUND = 16  # the least round value: from 128 KiB per sample on, its tensors are whole pieces
_MOST_PLACES = 2  # that a message names
_ANOTHER = "name one that it has, as it is written on its command line"
# Messages of argparse, click, transformers, absl, fire and others for an unknown argument.
_REFUSALS = (
    "unrecognized arguments",
    "no such option",
    "by the hfargumentparser",
    "unknown command line flag",
    "could not consume arg",
    "unknown option",
    "unrecognized option",
)


@dataclass(frozen=True)
class Point:
    """A run with one value: whether it fitted, its peaks and limit in bytes, and the allocator's retries.

    A retry returns cached memory to the GPU. `wanted`: see VirtualRun.
    """

    fits: bool
    requested: int
    reserved: int
    may_reserve: int
    retries: int = 0
    wanted: int = 0


@dataclass(frozen=True)
class Line:
    """Bytes at a value: `base` + `slope` · value."""

    base: float
    slope: float

    @classmethod
    def through(cls, first: tuple[int, int], second: tuple[int, int]) -> "Line":
        slope = (second[1] - first[1]) / (second[0] - first[0])
        return cls(first[1] - slope * first[0], slope)


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


def next_value(points: Mapping[int, Point], low: int, high: int) -> int | None:
    """Returns the value from `low` to `high` to run next.

    One at a time: of so few runs, what each one tells is worth more than the time of two at once, and the answer does
    not depend on the number of cores.

    Args:
        points: the runs so far.
        low: the smallest value.
        high: the largest value.

    Returns:
        None when the largest value is known, or `low` has not fitted. The largest value is known when it has fitted,
        the next value has not fitted or is beyond `high`, and the round values below it have fitted as far as cached
        memory was returned there. After _PREDICTED runs, a value that is exact to one in _CLOSE suffices. Also None
        after MOST_RUNS.
    """
    if low not in points:
        return low
    found = Bracket.from_points(points)
    if not found.fitting or len(points) >= MOST_RUNS:
        return None
    good, top = found.fitting[-1], high + 1 if found.bad is None else found.bad
    rounder = _rounder(points, found, good)
    halves = len(points) >= _PREDICTED and found.bad is not None
    guess = min(max(_guess(points, found, top), good + 1), top - 1)
    if halves and (guess > good + 1 or good - 1 in points):
        guess = (good + top) // 2
    if top - good <= max(1, good // _CLOSE if halves and points[good].retries else 1):
        return rounder[-1] if rounder else None
    skips = any(point.fits and value > top for value, point in points.items())
    return rounder[-1] if skips and rounder else guess


def _rounder(points: Mapping[int, Point], found: Bracket, value: int) -> list[int]:
    """Returns round values that must fit, too, if the value is to be the answer, and were not run.

    The likeliest to fail is the last one. They are the value rounded down to multiples of 16, 32, 64 and so on, where
    cached memory has to be given back.
    """
    roomy = max((value for value in found.fitting if not points[value].retries), default=0)
    powers = (_ROUND << power for power in range(value.bit_length()))
    return sorted({r for power in powers if (r := value - value % power) > roomy and r != value and r not in points})


def _guess(points: Mapping[int, Point], found: Bracket, top: int) -> int:
    """Returns the most informative value to run next, which may be outside of the searched range."""
    good = found.fitting[-1]
    room = points[good].may_reserve
    anchors = _anchors(found.fitting)
    foretold = top if found.bad is None else _fitting_part(points, anchors, top)
    is_far = anchors is None or (top > _FAR * good and not _bend(points, found.fitting, "requested"))
    if found.bad is not None and is_far:  # as much less as it may be more
        return min(int(good * (top / good) ** 0.5), foretold or top)
    if anchors is None:  # as if all memory grew with the value: an upper bound
        return max(good * room // max(1, points[good].reserved), 2 * good, good + 7)
    by_reserved = _value_at(points, found.fitting, "reserved", room)
    by_requested = _value_at(points, found.fitting, "requested", room)
    if by_requested is None:  # nothing grows so far
        return top - 1
    if by_requested <= good and good - 1 not in points:  # the end
        return good + 1
    if found.bad is not None and (points[good].retries or by_reserved is None or not good < by_reserved < top):
        foretold = min(foretold, by_requested)
        slow = top - good > good // _NEAR and foretold - good > _SLOW * (top - good)
        return foretold if foretold > good and not slow else (good + top) // 2
    is_full = by_reserved is None or by_reserved <= good
    if is_full and not points[good].retries and by_requested < _MUCH * good:
        return good + 1  # the end, most likely: little is cached that could be returned
    if by_reserved is None or by_reserved <= good or points[good].retries:
        return good + int(_PART_OF_FLUSHED * (min(by_requested + 1, top) - good))
    if by_reserved > _FAR * good:  # reserved bytes are slightly nonlinear: first a run close to the limit
        return good + int(_PART_OF_FAR * (by_reserved - good))
    return by_reserved


def _value_at(points: Mapping[int, Point], fitting: tuple[int, ...], name: str, room: int) -> int | None:
    """Returns the largest value predicted to have at most these bytes; None if they do not grow."""
    anchors = _anchors(fitting)
    if anchors is None:
        return None
    near, good = anchors
    bend = _bend(points, fitting, name)
    slope = _line(points, anchors, name).slope + bend * (good - near)
    if slope <= 0:
        return None
    missing = room - getattr(points[good], name)
    return good + int(2 * missing // (slope + math.sqrt(max(0.0, slope**2 + 4 * bend * missing))))


def _bend(points: Mapping[int, Point], fitting: tuple[int, ...], name: str) -> float:
    """Returns how fast the slope grows, by three runs: half of the second derivative. 0 if it is too little to tell."""
    anchors = _anchors(fitting)
    far = max((value for value in fitting if anchors and value <= _APART * anchors[0]), default=None)
    if anchors is None or far is None:
        return 0.0
    near, good = anchors
    slopes = [_line(points, between, name).slope for between in ((far, near), (near, good))]
    bend = (slopes[1] - slopes[0]) / (good - far)
    return bend if bend * good**2 >= _BENT * getattr(points[good], name) else 0.0


def _fitting_part(points: Mapping[int, Point], anchors: tuple[int, int] | None, bad: int) -> int:
    """Returns the value at which the allocation that failed with `bad` would have gone well; 0 if it is unknown."""
    room, wanted = points[bad].may_reserve, points[bad].wanted
    base = 0.0 if anchors is None else max(0.0, _line(points, anchors, "requested").base)
    return 0 if wanted <= room or base >= room else int(bad * (room - base) / (wanted - base))


def _anchors(fitting: tuple[int, ...]) -> tuple[int, int] | None:
    """Returns two values for a line that is exact at the largest, not too close: reserved bytes grow in steps."""
    if len(fitting) < 2:
        return None
    good = fitting[-1]
    return next((value for value in reversed(fitting) if value <= 0.9 * good), fitting[0]), good


def _line(points: Mapping[int, Point], anchors: tuple[int, int], name: str) -> Line:
    first, second = ((value, getattr(points[value], name)) for value in anchors)
    return Line.through(first, second)


@dataclass
class PlannedCell:
    """A mode on a GPU.

    Attributes:
        mode: a value of --modes; None without --modes.
        configuration: the configuration, without a value for the searched argument.
        settings: settings of torch's allocator; None without --settings.
        fixed: the other arguments of the grid, and their values.
        runs: runs by value of the searched argument; by 0 if none is searched.
        error: the reason why there is no answer; "" if there is one.
    """

    mode: str | None
    configuration: PlannedConfiguration
    settings: str | None = None
    fixed: Mapping[str, Value] = field(default_factory=dict)
    runs: dict[int, VirtualRun] = field(default_factory=dict)
    error: str = ""

    @property
    def label(self) -> str:
        """The cell's label: `seq-length=512, ghost, expandable_segments:True on h100`."""
        values = [f"{name}={value}" for name, value in self.fixed.items()]
        words = [*values, *([self.mode] if self.mode else []), *([self.settings] if self.settings else [])]
        return " on ".join([*([", ".join(words)] if words else []), self.configuration.gpu])

    @property
    def candidate(self) -> str:
        """The cell's label without the GPU; "" if only GPUs are compared."""
        return self.label.rpartition(" on ")[0]

    @property
    def points(self) -> dict[int, Point]:
        return {
            value: Point(run.fits, run.requested or 0, run.reserved or 0, run.may_reserve or 0, run.retries, run.wanted)
            for value, run in self.runs.items()
        }

    @property
    def largest(self) -> int | None:
        """The largest value that fits; None if none does."""
        return largest(self.points)

    @property
    def answer(self) -> VirtualRun | None:
        """The run of the largest value that fits; the only run if no argument is searched."""
        value = self.largest
        return self.runs.get(0) if value is None else self.runs[value]

    @property
    def line(self) -> Line | None:
        """Requested bytes by value, from the runs near the largest."""
        return requested_line(self.points)


def smallest_gpus(cells: Sequence[PlannedCell]) -> list[tuple[str, PlannedCell | None]]:
    """Returns the cell of the GPU with the least memory that fits, for each candidate; None if none does."""
    found: dict[str, PlannedCell | None] = {}
    for cell in sorted(cells, key=lambda cell: memory_of(cell.configuration)):
        fits = cell.answer is not None and cell.answer.fits
        found[cell.candidate] = found.get(cell.candidate) or (cell if fits else None)
    return list(found.items())


def fill(
    runs: PlannedRuns, cells: Sequence[PlannedCell], searched: Range | None, on_round: Callable[[int], object]
) -> None:
    """Runs the configurations that the cells need, each cell's one after the other, several cells at once.

    Args:
        runs: the runs of the plan.
        cells: the cells, which get the runs.
        searched: the searched argument; None runs each cell once.
        on_round: called with 1 whenever a run is started, and with 0 at the end of a cell.

    Raises:
        MemprofError: no cell has an answer: the program has no such argument, its memory does not depend on it, nothing
            fits, or see check_run.
    """
    pending_runs = PendingRuns[tuple[int, int]](runs)

    def start(index: int) -> bool:
        cell = cells[index]
        value = None if cell.runs else 0
        configuration = cell.configuration
        if searched is not None:
            value = next_value(cell.points, searched.low, searched.high)
            configuration = configuration if value is None else searched.apply(configuration, value)
        if value is not None:
            pending_runs.add((index, value), configuration)
        on_round(int(value is not None))
        return value is not None

    for index in range(len(cells)):
        start(index)
    for (index, value), run in pending_runs.as_completed():
        cell = cells[index]
        try:
            _check(cell, searched, run)
            cell.runs[value] = run
        except MemprofError as error:
            cell.error = str(error)
        if not cell.error and not start(index) and searched is not None:
            cell.error = _why_no_answer(cell, searched)
    if all(cell.error for cell in cells):
        raise MemprofError(cells[0].error)


def _check(cell: PlannedCell, searched: Range | None, run: VirtualRun) -> None:
    """Calls check_run; raises a separate error if the program does not have the searched argument."""
    program = cell.configuration.program
    if searched is not None and run.status == "failed":
        words = run.last_line()
        instead = _instead(program, searched)
        if any(refusal in words.lower() for refusal in _REFUSALS):
            raise MemprofError(f"{program.name} has no argument {searched.name} ({words}): {instead}")
        if run.requested is None and instead != _ANOTHER:
            raise MemprofError(
                f"{program.name} failed before it used the GPU ({words or run.error}): if it has no argument "
                f"{searched.name}, {instead}"
            )
    check_run(program, run)


def _instead(program: PlannedProgram, searched: Range) -> str:
    """Says what to search, where the program takes its batch from something else than this argument."""
    places = [place for place in places_of_batch(program) if place.partition(" (")[0] != searched.name]
    if not places:
        return _ANOTHER
    found = " or ".join(places[:_MOST_PLACES])
    if ":" not in found:
        return f"search {found} instead"
    return f"search {found} instead, or write {searched.name}=1 after the script, if it takes that, to be replaced"


def _why_no_answer(cell: PlannedCell, searched: Range) -> str:
    if cell.largest is None:
        run = cell.runs[searched.low]
        report = run.oom_report() or {}
        needed = report.get("needed", {}).get("bytes")
        fitting = next((suggestion for suggestion in report.get("suggestions", ()) if suggestion["fits"]), None)
        needs = "" if needed is None else f" (it needs about {format_bytes(needed)})"
        would = "use a GPU with more memory" if fitting is None else f"what would fit is {fitting['title']}"
        instead = _instead(cell.configuration.program, searched)
        if instead != _ANOTHER:
            would = f"{would}; if the program does not use {searched.name}, {instead}"
        return (
            f"not even {searched.name}={searched.low} fits into the {format_bytes(run.may_reserve or 0)} that may be "
            f"reserved on {cell.configuration.gpu}{needs}: {would}"
        )
    peaks = {run.requested for run in cell.runs.values()}
    if len(cell.runs) > 1 and len(peaks) == 1 and all(run.fits for run in cell.runs.values()):
        values = " and with ".join(str(value) for value in sorted(cell.runs))
        return (
            f"the memory of {cell.configuration.program.name} does not depend on {searched.name}: it peaks at "
            f"{format_bytes(peaks.pop() or 0)} with {values}; {_instead(cell.configuration.program, searched)}"
        )
    return ""


_DEFAULT = "expandable_segments:False"  # torch's default without settings
# The effort of a change: an environment variable, an argument, another machine.
_OF_SETTINGS, _OF_MODE, _OF_GPU = 1, 2, 4


def make_cells(
    base: PlannedConfiguration,
    gpus: Sequence[str],
    *,
    modes: tuple[str, Sequence[str]] | None = None,
    settings: Sequence[str] = (),
    values: Mapping[str, Sequence[Value]] | None = None,
) -> list[PlannedCell]:
    """Makes a cell for each combination. For equal values of arguments, the smallest changes of the base come first.

    Args:
        base: the program as the user gave it.
        gpus: kinds of GPU.
        modes: the argument for the mode, and its values.
        settings: settings of torch's allocator; empty to keep the present ones.
        values: values of further arguments.
    """
    argument, names = modes or ("", ())
    values = values or {}
    cells = []
    kinds = list(enumerate(gpus))
    numbered: list[tuple[int, str | None]] = list(enumerate(names)) if names else [(0, None)]
    tried: list[str | None] = list(settings) if settings else [None]
    for several in itertools.product(*values.values()):
        chosen = dict(zip(values, several, strict=True))
        combinations = sorted(itertools.product(kinds, numbered, tried), key=_change)
        for (_, gpu), (_, mode), setting in combinations:
            changes = () if setting is None else ({"kind": "allocator_setting", "value": setting},)
            configuration = replace(base, gpu=gpu, changes=changes)
            for name, value in [*chosen.items(), *([(argument, mode)] if mode is not None else [])]:
                configuration = with_value(configuration, name, value)
            cells.append(PlannedCell(mode, configuration, setting, chosen))
    return cells


def _change(combination: tuple[tuple[int, str], tuple[int, str | None], str | None]) -> int:
    """Returns how much of the program a combination changes: smaller numbers are smaller changes."""
    (gpu, _), (mode, _), settings = combination
    changed = _OF_MODE * (mode > 0) + _OF_SETTINGS * (settings not in (None, _DEFAULT))
    return _OF_GPU * gpu + changed
