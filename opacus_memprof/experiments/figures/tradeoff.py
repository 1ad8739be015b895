# SPDX-License-Identifier: Apache-2.0
"""Draws performance_tradeoff.png: memory against time."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from opacus_memprof.experiments.figures.bars import headline, height, peaks
from opacus_memprof.experiments.rows import Row, find_vanilla
from opacus_memprof.profiles.units import format_bytes
from opacus_memprof.reports.figures import byte_axis, legend, saved_figure
from opacus_memprof.reports.palette import THEMES, category_color

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.text import Annotation
    from matplotlib.transforms import Bbox

_MAX_NAMED = 8  # with more points, names are in a separate list


def performance_tradeoff(rows: Sequence[Row], path: Path, theme: str) -> None:
    """Draws each run's peak against the time of a step. Raises MemprofError if the file cannot be written.

    If no run has a time, it draws bars of memory instead, with the reason.
    """
    from matplotlib.lines import Line2D

    palette = THEMES[theme]
    measured = [row for row in rows if row.finished and row.step_ms]
    if not measured:
        with saved_figure(path, theme, (11, height(rows))) as figure:
            why = "a virtual GPU measures no time" if any(row.finished for row in rows) else "no run finished"
            headline(figure, rows, f"Memory without time: {why}")
            axes = figure.subplots()
            peaks(axes, rows, palette)
            legend(figure, axes)
        return
    vanilla = find_vanilla(rows)
    names = [_relative(row, vanilla) for row in measured]
    many = len(measured) > _MAX_NAMED
    with saved_figure(path, theme, (14 if many else 9, 6)) as figure:
        headline(figure, rows)
        axes = figure.subplots()
        axes.set_title("Memory against time")
        axes.set_xlabel("time of a step, in ms")
        axes.set_ylabel("memory at the peak")
        axes.grid(axis="both", visible=True)
        times = [row.step_ms or 0.0 for row in measured]
        totals = [row.total_bytes for row in measured]
        colors = [palette.muted if row is vanilla else category_color("activation_hooks") for row in measured]
        axes.scatter(times, totals, s=60, c=colors, zorder=3)
        axes.set_xlim(0, max(times) * 1.25)
        axes.set_ylim(0, max(totals) * 1.15)
        byte_axis(axes.yaxis, max(totals))
        if many:
            numbers = [str(number) for number in range(1, len(measured) + 1)]
            lines = [f"{number}  {name}".replace("\n", ": ") for number, name in zip(numbers, names, strict=True)]
            figure.legend([Line2D([], [])] * len(lines), lines, loc="outside right upper", handlelength=0)
            times, totals, names = _one_label_a_place(times, totals, numbers)
        if missing := [_without_time(row) for row in rows if row not in measured]:
            color = palette.text if all(row.finished for row in rows) else palette.accent
            place: dict[str, Any] = {"loc": "outside lower left", "ncols": 1 if len(missing) <= _MAX_NAMED else 3}
            figure.legend([Line2D([], [])] * len(missing), missing, handlelength=0, labelcolor=color, **place)
        place_labels(axes, times, totals, names)  # in the space that the lists leave


def _without_time(row: Row) -> str:
    """Returns a line on a run that has no point. Runs on a virtual GPU finish without a time."""
    return f"{row.short_label}: " + (f"{format_bytes(row.total_bytes)}, no time" if row.finished else row.outcome)


def _one_label_a_place(
    times: Sequence[float], totals: Sequence[int], numbers: Sequence[str]
) -> tuple[list[float], list[int], list[str]]:
    """Returns the first of all points at the same position, in a grid of 40 x 40 positions, with all their numbers."""
    places: dict[tuple[int, int], list[int]] = {}
    for index, (time, total) in enumerate(zip(times, totals, strict=True)):
        place = int(40 * time / max(times)), int(40 * total / max(totals))
        places.setdefault(place, []).append(index)
    first = [indices[0] for indices in places.values()]
    labels = [", ".join(numbers[index] for index in indices) for indices in places.values()]
    return [times[index] for index in first], [totals[index] for index in first], labels


def _relative(row: Row, vanilla: Row | None) -> str:
    if vanilla is None or row is vanilla or not vanilla.step_ms or not row.step_ms:
        return row.short_label
    memory, time = row.total_bytes / vanilla.total_bytes, row.step_ms / vanilla.step_ms
    return f"{row.short_label}\n{memory:.2f} x memory, {time:.2f} x time"


# The positions of a label relative to its point, in points (1/72 inch); the first free one is used.
_BESIDE = [(9, 0, "left"), (-9, 0, "right"), (0, 22, "center"), (0, -22, "center")]
_AWAY = [(dx, dy, "left" if dx > 0 else "right") for dy in (20, -20, 40, -40, 60, -60, 80, -80) for dx in (12, -12)]
_DOT = 6  # half the width of a point, in points


def place_labels(axes: "Axes", x: Sequence[float], y: Sequence[float], labels: Sequence[str]) -> None:
    """Labels points. A label that is not next to its point gets a line to it."""
    from matplotlib.transforms import Bbox

    axes.figure.canvas.draw()  # text has no size before
    inside = axes.get_window_extent()
    pad = _DOT * axes.figure.dpi / 72
    points = list(zip(x, y, strict=True))
    occupied = [
        Bbox.from_extents(px - pad, py - pad, px + pad, py + pad) for px, py in map(axes.transData.transform, points)
    ]
    for point, label in zip(points, labels, strict=True):

        def cost(
            place: tuple[int, int, str], point: tuple[float, float] = point, label: str = label
        ) -> tuple[bool, int]:
            text = _label(axes, point, label, place)
            box = text.get_window_extent()
            text.remove()
            return not _is_within(box, inside), sum(box.overlaps(other) for other in occupied)

        best = min([*_BESIDE, *_AWAY], key=cost)
        occupied.append(_label(axes, point, label, best).get_window_extent())


def _is_within(box: "Bbox", outer: "Bbox") -> bool:
    return bool(outer.x0 <= box.x0 and box.x1 <= outer.x1 and outer.y0 <= box.y0 and box.y1 <= outer.y1)


def _label(axes: "Axes", point: tuple[float, float], label: str, place: tuple[int, int, str]) -> "Annotation":
    dx, dy, side = place
    return axes.annotate(
        label,
        point,
        (dx, dy),
        textcoords="offset points",
        ha=side,
        va="center",
        fontsize=8,
        arrowprops={"arrowstyle": "-", "linewidth": 0.6} if dx and dy else None,
    )
