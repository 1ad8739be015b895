# SPDX-License-Identifier: Apache-2.0
"""A line for each cell that has ended, and below them a bar with an estimate of the time left."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn, TimeElapsedColumn
from rich.text import Text

from opacus_memprof.experiments.sweep.reading import failed_allocation
from opacus_memprof.units import format_bytes

_STYLE = {"finished": "green", "out_of_memory": "magenta"}


def time_left(elapsed: float, elapsed_at_last: float, ended: int, cells: int) -> float | None:
    """Seconds until all cells have ended, if the others take as long as those before took on the average.

    Args:
        elapsed: seconds since the start.
        elapsed_at_last: seconds from the start to the last cell's end.
        ended, cells: since the start, and in all. None is returned while nothing has ended.
    """
    if not ended:
        return None
    return max(0.0, elapsed_at_last / ended * cells - elapsed)


class TimeLeft(ProgressColumn):
    """`time_left` of a task with a field `at_last`."""

    def render(self, task: Task) -> Text:
        left = time_left(task.elapsed or 0.0, task.fields["at_last"], int(task.completed), int(task.total or 0))
        said = "time left: not known yet" if left is None else f"about {timedelta(seconds=round(left))} left"
        return Text(said, style="cyan")


class Board:
    """What `board` hands out: call it with each cell's name and result."""

    def __init__(self, progress: Progress, cells: int) -> None:
        self._progress = progress
        self._task = progress.add_task("", total=cells, at_last=0.0)

    def __call__(self, name: str, result: Mapping[str, Any]) -> None:
        self._progress.console.print(line(name, result), highlight=False, soft_wrap=True)
        elapsed = self._progress.tasks[self._task].elapsed or 0.0
        self._progress.update(self._task, advance=1, at_last=elapsed)


@contextmanager
def board(console: Console, cells: int, workers: int) -> Iterator[Board]:
    """For the time in which `cells` cells run, `workers` at once."""
    at_once = f", {workers} at once" if workers > 1 else ""
    columns = [BarColumn(), MofNCompleteColumn(), TextColumn(f"configurations{at_once},"), TimeElapsedColumn()]
    with Progress(*columns, TimeLeft(), console=console) as progress:
        yield Board(progress, cells)


def line(name: str, result: Mapping[str, Any]) -> str:
    """What became of a cell, in a line of rich's markup."""
    status = result["status"]
    said = f"[{_STYLE.get(status, 'red')}]{status.replace('_', ' ')}[/]"
    peak = result["peak"]
    if peak is not None:
        said += f", peak {format_bytes(peak['requested_bytes'])} in {escape(peak['phase'])}"
    if result["avg_time_ms"] is not None:
        said += f", {result['avg_time_ms']:.0f} ms a step"
    if failed := failed_allocation(result):
        said += f", {format_bytes(failed['requested_bytes'])} more for {escape(failed['category'])} did not fit"
    elif result["error"]:
        said += f": {escape(result['error'])}"
    return f"{name}  {said}"
