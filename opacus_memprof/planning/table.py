# SPDX-License-Identifier: Apache-2.0
"""The table of a plan: the largest value of an argument that fits, for each mode and GPU."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from opacus_memprof.errors import MemprofError
from opacus_memprof.planning.configuration import PlannedConfiguration, Range, Value, with_argument
from opacus_memprof.planning.runs import PendingRuns, PlannedRuns
from opacus_memprof.planning.search import Line, Point, largest, next_values, requested_line
from opacus_memprof.planning.verdict import check_run, memory_of
from opacus_memprof.planning.virtual_run import VirtualRun
from opacus_memprof.profiles.units import format_bytes

# Messages of argparse, click and others for an unknown argument.
_REFUSALS = ("unrecognized arguments", "no such option", "unknown option", "unrecognized option")


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
            value: Point(run.fits, run.requested or 0, run.reserved or 0, run.may_reserve or 0, run.retries)
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
    """Runs the configurations that the cells need, several at once.

    Args:
        runs: the runs of the plan.
        cells: the cells, which get the runs.
        searched: the searched argument; None runs each cell once.
        on_round: called with the number of runs whenever some are started.

    Raises:
        MemprofError: no cell has an answer: the program has no such argument, its memory does not depend on it, nothing
            fits, or see check_run.
    """
    pending_runs = PendingRuns[tuple[int, int]](runs)
    pending = [0] * len(cells)
    unfinished = set(range(len(cells)))

    def start(index: int) -> None:
        cell = cells[index]
        values = [0] if not cell.runs else []
        if searched is not None:
            width = max(1, runs.workers // len(unfinished))
            values = next_values(cell.points, searched.low, searched.high, width)
        for value in values:
            configuration = cell.configuration
            pending_runs.add(
                (index, value), configuration if searched is None else searched.apply(configuration, value)
            )
        pending[index] = len(values)
        if not values:
            unfinished.discard(index)
        on_round(len(values))

    for index in range(len(cells)):
        start(index)
    for (index, value), run in pending_runs.as_completed():
        cell = cells[index]
        pending[index] -= 1
        try:
            _check(cell, searched, run)
            cell.runs[value] = run
        except MemprofError as error:
            cell.error = cell.error or str(error)
            unfinished.discard(index)
        if not pending[index] and not cell.error:
            start(index)
            if not pending[index] and searched is not None:
                cell.error = _why_no_answer(cell, searched)
    if all(cell.error for cell in cells):
        raise MemprofError(cells[0].error)


def _check(cell: PlannedCell, searched: Range | None, run: VirtualRun) -> None:
    """Calls check_run; raises a separate error if the program does not have the searched argument."""
    program = cell.configuration.program
    if searched is not None and run.status == "failed":
        words = run.last_words()
        if any(refusal in words.lower() for refusal in _REFUSALS):
            raise MemprofError(
                f"{program.name} has no argument {searched.name} ({words}): name one that it has, as it is written "
                "on its command line"
            )
    check_run(program, run)


def _why_no_answer(cell: PlannedCell, searched: Range) -> str:
    if cell.largest is None:
        run = cell.runs[searched.low]
        report = run.oom_report() or {}
        needed = report.get("needed", {}).get("bytes")
        fitting = next((suggestion for suggestion in report.get("suggestions", ()) if suggestion["fits"]), None)
        needs = "" if needed is None else f" (it needs about {format_bytes(needed)})"
        would = "use a GPU with more memory" if fitting is None else f"what would fit is {fitting['title']}"
        return (
            f"not even {searched.name}={searched.low} fits into the {format_bytes(run.may_reserve or 0)} that may be "
            f"reserved on {cell.configuration.gpu}{needs}: {would}"
        )
    peaks = {run.requested for run in cell.runs.values()}
    if len(cell.runs) > 1 and len(peaks) == 1 and all(run.fits for run in cell.runs.values()):
        values = " and with ".join(str(value) for value in sorted(cell.runs))
        return (
            f"the memory of {cell.configuration.program.name} does not depend on {searched.name}: it peaks at "
            f"{format_bytes(peaks.pop() or 0)} with {values}, so search another argument"
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
            program = base.program
            for name, value in [*chosen.items(), *([(argument, mode)] if mode is not None else [])]:
                program = replace(program, arguments=with_argument(program.arguments, name, value))
            changes = () if setting is None else ({"kind": "allocator_setting", "value": setting},)
            configuration = replace(base, program=program, gpu=gpu, changes=changes)
            cells.append(PlannedCell(mode, configuration, setting, chosen))
    return cells


def _change(combination: tuple[tuple[int, str], tuple[int, str | None], str | None]) -> int:
    """Returns the effort of a combination, for sorting."""
    (gpu, _), (mode, _), settings = combination
    changed = _OF_MODE * (mode > 0) + _OF_SETTINGS * (settings not in (None, _DEFAULT))
    return _OF_GPU * gpu + changed
