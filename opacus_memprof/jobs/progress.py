# SPDX-License-Identifier: Apache-2.0
"""Shows the progress of many runs: a line for each that has ended, and a bar with the time left."""

import math
from datetime import timedelta
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn, TimeElapsedColumn
from rich.text import Text

from opacus_memprof.language import tr


def time_left(elapsed: float, elapsed_at_last: float, ended: int, total: int) -> float | None:
    """Returns the seconds until all runs have ended, from the average time so far; None before the first ends.

    Args:
        elapsed: seconds since the start.
        elapsed_at_last: seconds from the start to the end of the last run.
        ended: number of runs that have ended.
        total: number of all runs.
    """
    if not ended:
        return None
    return max(0.0, elapsed_at_last / ended * total - elapsed)


class TimeLeftColumn(ProgressColumn):
    """A column with the time left of a task, whose field `at_last` is the time when the last run ended."""

    def render(self, task: Task) -> Text:
        return Text(_format_time_left(task), style="cyan")


def _format_time_left(task: Task) -> str:
    """Returns the time left as text, such as "about 0:00:16 left"; "" when all runs have ended."""
    if task.total and task.completed >= task.total:
        return ""
    left = time_left(task.elapsed or 0.0, task.fields["at_last"], int(task.completed), int(task.total or 0))
    if left is None:
        return tr("time left: not known yet")
    if not left:  # the run takes longer than those before
        return tr("time left: longer than estimated")
    return tr("about {time} left", time=timedelta(seconds=math.ceil(left)))


class ProgressBoard:
    """The progress of many runs, as a context manager that shows it.

    Args:
        console: the console on which it is shown.
        what: the plural noun for the counted runs.
        total: number of runs that are known at the start.
        transient: whether the bar disappears at the end.
        open_ended: whether results decide what runs next: neither the number of all runs nor the time left is known.
    """

    def __init__(
        self, console: Console, what: str, total: int = 0, *, transient: bool = False, open_ended: bool = False
    ) -> None:
        columns: list[ProgressColumn]
        if open_ended:
            ended = tr(
                "{what} ended: {count}; results decide what is run next,", what=what, count="{task.completed:.0f}"
            )
            columns = [TextColumn(ended), TimeElapsedColumn()]
        else:
            columns = [BarColumn(), MofNCompleteColumn(), TextColumn(f"{what},"), TimeElapsedColumn(), TimeLeftColumn()]
        self._progress = Progress(*columns, console=console, transient=transient)
        self._id = self._progress.add_task("", total=total, at_last=0.0)

    def __enter__(self) -> "ProgressBoard":
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """Stops showing the bar."""
        self._progress.stop()

    @property
    def _task(self) -> Task:
        return self._progress.tasks[self._id]

    @property
    def position(self) -> str:
        """The number of ended runs, and the time left: `3 of 9, about 0:01:00 left`."""
        ended, total = self._task.completed, self._task.total
        if left := _format_time_left(self._task):
            return tr("{ended:.0f} of {total:.0f}, {time_left}", ended=ended, total=total, time_left=left)
        return tr("{ended:.0f} of {total:.0f}", ended=ended, total=total)

    def add(self, runs: int) -> None:
        """Adds runs to the total."""
        self._progress.update(self._id, total=(self._task.total or 0) + runs)

    def advance(self) -> None:
        """Counts one more run as ended."""
        ended = self._task.completed + 1
        total = max(self._task.total or 0, ended)
        self._progress.update(self._id, completed=ended, total=total, at_last=self._task.elapsed or 0.0)

    def print(self, line: Text) -> None:
        """Prints a line above the bar."""
        self._progress.console.print(line, soft_wrap=True)
