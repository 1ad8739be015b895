# SPDX-License-Identifier: Apache-2.0
"""A line for each cell that has ended, and below them a bar with an estimate of the time left."""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn, TimeElapsedColumn
from rich.text import Text

from opacus_memprof.experiments.rows import Row
from opacus_memprof.experiments.summary import line

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
        return Text(_left(task), style="cyan")


def _left(task: Task) -> str:
    left = time_left(task.elapsed or 0.0, task.fields["at_last"], int(task.completed), int(task.total or 0))
    return "time left: not known yet" if left is None else f"about {timedelta(seconds=round(left))} left"


class Board:
    """What `board` hands out: call it with the row of each cell that has ended."""

    def __init__(self, progress: Progress, cells: int) -> None:
        self._progress = progress
        self._task = progress.add_task("", total=cells, at_last=0.0)

    def __call__(self, row: Row) -> None:
        (task,) = self._progress.tasks
        self._progress.update(self._task, advance=1, at_last=task.elapsed or 0.0)
        message = Text(f"{row.name}  ").append(line(row), _STYLE.get(row.result["status"], "red"))
        message.append(f"  [{task.completed:.0f} of {task.total:.0f}, {_left(task)}]", "dim")
        self._progress.console.print(message, soft_wrap=True)


@contextmanager
def board(console: Console, cells: int, workers: int) -> Iterator[Board]:
    """For the time in which `cells` cells run, `workers` at once."""
    at_once = f", {workers} at once" if workers > 1 else ""
    columns = [BarColumn(), MofNCompleteColumn(), TextColumn(f"configurations{at_once},"), TimeElapsedColumn()]
    with Progress(*columns, TimeLeft(), console=console) as progress:
        yield Board(progress, cells)
