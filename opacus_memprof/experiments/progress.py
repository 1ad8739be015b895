# SPDX-License-Identifier: Apache-2.0
"""Shows the progress of many cells: a line for each that has ended, and a bar with the time left."""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn, TimeElapsedColumn
from rich.text import Text

from opacus_memprof.experiments.rows import Row
from opacus_memprof.experiments.summary import describe_outcome

_STYLE = {"finished": "green", "out_of_memory": "magenta"}


def time_left(elapsed: float, elapsed_at_last: float, ended: int, cells: int) -> float | None:
    """Seconds until all cells have ended, if the others take the average time of those before. None without any.

    Args:
        elapsed: seconds since the start.
        elapsed_at_last: seconds from the start to the last cell's end.
        ended, cells: the number of cells that have ended since the start, and of all.
    """
    if not ended:
        return None
    return max(0.0, elapsed_at_last / ended * cells - elapsed)


class TimeLeft(ProgressColumn):
    """A column with the time left of a task, whose field `at_last` is the time of the last cell's end."""

    def render(self, task: Task) -> Text:
        return Text(_format_time_left(task), style="cyan")


def _format_time_left(task: Task) -> str:
    left = time_left(task.elapsed or 0.0, task.fields["at_last"], int(task.completed), int(task.total or 0))
    return "time left: not known yet" if left is None else f"about {timedelta(seconds=round(left))} left"


class ProgressBoard:
    """The view of the progress of many cells: call it with the row of each cell that has ended."""

    def __init__(self, progress: Progress, cells: int) -> None:
        self._progress = progress
        self._task = progress.add_task("", total=cells, at_last=0.0)

    def __call__(self, row: Row) -> None:
        (task,) = self._progress.tasks
        self._progress.update(self._task, advance=1, at_last=task.elapsed or 0.0)
        message = Text(f"{row.name}  ").append(describe_outcome(row), _STYLE.get(row.result.status, "red"))
        message.append(f"  [{task.completed:.0f} of {task.total:.0f}, {_format_time_left(task)}]", "dim")
        self._progress.console.print(message, soft_wrap=True)


@contextmanager
def progress_board(console: Console, cells: int, workers: int) -> Iterator[ProgressBoard]:
    """A context manager that shows a ProgressBoard while `cells` cells run, `workers` at once."""
    at_once = f", {workers} at once" if workers > 1 else ""
    columns = [BarColumn(), MofNCompleteColumn(), TextColumn(f"configurations{at_once},"), TimeElapsedColumn()]
    with Progress(*columns, TimeLeft(), console=console) as progress:
        yield ProgressBoard(progress, cells)
