# SPDX-License-Identifier: Apache-2.0
"""performance_tradeoff.png: memory against time."""

from collections.abc import Sequence
from pathlib import Path

from opacus_memprof.experiments.figures.labels import place_labels
from opacus_memprof.experiments.rows import Row, vanilla_of
from opacus_memprof.reports.figures import byte_axis, saved_figure
from opacus_memprof.reports.palette import THEMES, category_color

_MANY = 8  # points, from which on names are out of the way


def performance_tradeoff(rows: Sequence[Row], path: Path, theme: str) -> None:
    """Each run's peak against the time of a step. Raises MemprofError."""
    from matplotlib.lines import Line2D

    look = THEMES[theme]
    placed = [row for row in rows if row.finished and row.milliseconds]
    vanilla = vanilla_of(rows)
    names = [_relative(row, vanilla) for row in placed]
    many = len(placed) > _MANY
    with saved_figure(path, theme, (14 if many else 9, 6)) as figure:
        axes = figure.subplots()
        axes.set_title("Memory against time")
        axes.set_xlabel("time of a step, in ms")
        axes.set_ylabel("memory at the peak")
        axes.grid(axis="both", visible=True)
        times = [row.milliseconds or 0.0 for row in placed]
        totals = [row.total for row in placed]
        colors = [look.muted if row is vanilla else category_color("activation_hooks") for row in placed]
        axes.scatter(times, totals, s=60, c=colors, zorder=3)
        axes.set_xlim(0, max(times, default=1) * 1.25)
        axes.set_ylim(0, max(totals, default=1) * 1.15)
        byte_axis(axes.yaxis, max(totals, default=1))
        if many:
            numbers = [str(number) for number in range(1, len(placed) + 1)]
            listed = [f"{number}  {name}".replace("\n", ": ") for number, name in zip(numbers, names, strict=True)]
            figure.legend([Line2D([], [])] * len(listed), listed, loc="outside right upper", handlelength=0)
            names = numbers
        place_labels(axes, times, totals, names)
        if absent := [f"{row.short}: {row.outcome}" for row in rows if row not in placed]:
            axes.text(0.01, 0.01, "\n".join(absent), transform=axes.transAxes, va="bottom", color=look.accent)


def _relative(row: Row, vanilla: Row | None) -> str:
    if vanilla is None or row is vanilla or not vanilla.milliseconds or not row.milliseconds:
        return row.short
    memory, time = row.total / vanilla.total, row.milliseconds / vanilla.milliseconds
    return f"{row.short}\n{memory:.2f} x memory, {time:.2f} x time"
