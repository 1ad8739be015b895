# SPDX-License-Identifier: Apache-2.0
"""Bars of memory, additional memory and step time for each run, and performance_tradeoff.png: memory against time."""

import math
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from opacus_memprof.experiments.configuration import SIZES_NOTE
from opacus_memprof.experiments.rows import Row, find_vanilla, overhead
from opacus_memprof.profiles.categories import stack_order
from opacus_memprof.profiles.profile import virtual_gpu_of
from opacus_memprof.profiles.units import format_bytes, format_signed_bytes, shorten_name
from opacus_memprof.reports.figures import (
    THEMES,
    Theme,
    byte_axis,
    category_color,
    category_label,
    label_bars,
    legend,
    saved_figure,
    stacked_bars,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.text import Annotation
    from matplotlib.transforms import Bbox

_LABEL_LENGTH = 60  # characters
_MAX_NAMED = 8  # with more points, names are in a separate list
_LIST_LINE = 0.19  # inches


def breakdown_comparison(rows: Sequence[Row], path: Path, theme: str) -> None:
    """Draws memory_breakdown_comparison.png: each run's peak by category, and its additional memory over vanilla's."""
    with saved_figure(path, theme, (14, height(rows))) as figure:
        headline(figure, rows)
        left, right = figure.subplots(1, 2, sharey=True)
        peaks(left, rows, THEMES[theme])
        overheads(right, rows, THEMES[theme])
        legend(figure, left, right)


def peak_comparison(rows: Sequence[Row], path: Path, theme: str) -> None:
    """Draws peak_memory_comparison.png: each run's memory and step time, or the reason why no run has a time."""
    if not any(row.step_ms for row in rows):
        _memory_alone(rows, path, theme)
        return
    with saved_figure(path, theme, (13, height(rows))) as figure:
        headline(figure, rows)
        explain_labels(figure, rows)
        left, right = figure.subplots(1, 2, sharey=True, width_ratios=(3, 1))
        peaks(left, rows, THEMES[theme])
        step_times(right, rows, THEMES[theme])
        legend(figure, left)


def headline(figure: "Figure", rows: Sequence[Row], title: str = "") -> None:
    """Gives a figure its title, which names the virtual GPUs of its runs; without both it gets none."""
    names = dict.fromkeys(name for row in rows if (name := virtual_gpu_of(row.result.virtual)) is not None)
    lines = [title] if title else []
    lines += [f"On a {' and a '.join(names)}"] if names else []
    if lines:
        figure.suptitle("\n".join(lines), fontweight="bold")


def explain_labels(figure: "Figure", rows: Sequence[Row]) -> None:
    """Writes below a figure what the labels of runs abbreviate."""
    if any(row.names_sizes for row in rows):
        figure.supxlabel(SIZES_NOTE)


def height(rows: Sequence[Row]) -> float:
    """Returns the height in inches of a picture with a bar for each row, and a legend next to them."""
    categories = {category for row in rows for category in row.bytes}
    return max(1.3 + 0.3 * max(len(rows), 4), 0.7 + 0.19 * (len(categories) + 1))


def labels(rows: Sequence[Row]) -> list[str]:
    """Returns the labels of bars."""
    return [shorten_name(row.short_label, _LABEL_LENGTH) for row in rows]


def peaks(axes: "Axes", rows: Sequence[Row], theme: Theme) -> None:
    """Draws the peak of each run by category.

    The bar of a failed run is hatched. Its failed allocation is a dashed bar on top of the bytes in use at that time.
    """
    texts = [_peak_text(row) for row in rows]
    failed = [row for row in rows if not row.finished]
    stacked_bars(axes, labels(rows), [row.bytes for row in rows], texts=texts if failed else None)
    axes.set_title("Memory at the peak, by category")
    highest, width = max((row.total_bytes for row in rows), default=0), 0
    for place, row in enumerate(rows):
        end = row.total_bytes
        if not row.finished:
            axes.barh(place, end, fill=False, hatch="////", edgecolor=theme.accent, linewidth=0)
        if row.failed_allocation is not None:
            in_use = row.failed_allocation.live_bytes
            wanted = min(row.refused_bytes, highest)  # the whole bar would make other bars invisible
            style: dict[str, Any] = {"fill": False, "edgecolor": theme.accent, "linewidth": 1.2, "linestyle": "--"}
            axes.barh(place, wanted, left=in_use, **style)
            end = max(end, in_use + wanted)
        text: Any = axes.texts[place]
        text.xy, width = (end, place), max(width, end)
        text.set_color(theme.text if row.finished else theme.accent)
    if failed:
        axes.set_xlim(0, 1.65 * max(width, 1))
        byte_axis(axes.xaxis, 1.65 * width)


def _peak_text(row: Row) -> str:
    parts = [format_bytes(row.total_bytes)] if row.total_bytes else []
    parts += [] if row.finished else [row.outcome]
    asked = f",\nasked {format_bytes(row.refused_bytes)} more" if row.refused_bytes else ""
    return ", ".join(parts) + asked


def overheads(axes: "Axes", rows: Sequence[Row], theme: Theme) -> None:
    """Draws the bytes by category that each run needs more than vanilla (right) or less (left), and their sum."""
    axes.set_title("More than vanilla")
    vanilla = find_vanilla(rows)
    if vanilla is None or len(rows) == 1:
        why = "no other run to compare" if vanilla else "no finished vanilla run to compare with"
        axes.text(0.5, 0.5, why, transform=axes.transAxes, ha="center", color=theme.muted)
        axes.tick_params(left=False, bottom=False, labelbottom=False)
        axes.grid(visible=False)
        return
    changes = [overhead(row, vanilla) if row.finished else {} for row in rows]
    more, less = [0] * len(rows), [0] * len(rows)
    for category in stack_order(category for change in changes for category in change):
        sizes = [change.get(category, 0) for change in changes]
        starts = [above if size > 0 else below for size, above, below in zip(sizes, more, less, strict=True)]
        axes.barh(range(len(rows)), sizes, left=starts, label=category_label(category), color=category_color(category))
        more = [end + max(size, 0) for end, size in zip(more, sizes, strict=True)]
        less = [end + min(size, 0) for end, size in zip(less, sizes, strict=True)]
    for place, (row, change) in enumerate(zip(rows, changes, strict=True)):
        text = row.outcome if not row.finished else "" if row is vanilla else format_signed_bytes(sum(change.values()))
        if text and row.finished:
            total = sum(change.values())
            ends = [place - 0.45, place + 0.45]
            axes.plot([total, total], ends, color=theme.text, linewidth=1.5, label="all together")
        color = theme.text if row.finished else theme.accent
        style: dict[str, Any] = {"textcoords": "offset points", "va": "center", "fontsize": 8, "color": color}
        axes.annotate(text, (more[place], place), (5, 0), **style)
    axes.axvline(0, color=theme.muted, linewidth=0.8)
    # A small overhead must look small: the axis is at least a twentieth of vanilla's peak.
    width = max(*more, *(-end for end in less), vanilla.total_bytes // 20, 1)
    low, high = min(less) - 0.05 * width, max(*more, width // 2) + 0.3 * width
    axes.set_xlim(low, high)
    label_bars(axes, labels(rows))
    axes.tick_params(axis="y", length=0, labelleft=False)
    byte_axis(axes.xaxis, high - low)


def step_times(axes: "Axes", rows: Sequence[Row], theme: Theme) -> None:
    """Draws the mean time of the measured steps of each run."""
    times = [row.step_ms or 0.0 for row in rows]
    axes.barh(range(len(times)), times, color=theme.muted)
    for place, time in enumerate(times):
        if time:
            text = f"{time:,.0f} ms" if time >= 100 else f"{time:.3g} ms"
            axes.annotate(text, (time, place), (3, 0), textcoords="offset points", va="center", fontsize=8)
    axes.set_title("Time of a step")
    axes.set_xlim(0, 1.35 * max([*times, 1e-9]))
    label_bars(axes, labels(rows))
    axes.tick_params(axis="y", length=0, labelleft=False)
    axes.set_xlabel("ms")


def performance_tradeoff(rows: Sequence[Row], path: Path, theme: str) -> None:
    """Draws each run's peak against the time of a step. Raises MemprofError if the file cannot be written.

    If no run has a time, it draws bars of memory instead, with the reason.
    """
    from matplotlib.lines import Line2D

    palette = THEMES[theme]
    measured = [row for row in rows if row.finished and row.step_ms]
    if not measured:
        _memory_alone(rows, path, theme)
        return
    vanilla = find_vanilla(rows)
    names = [_relative(row, vanilla) for row in measured]
    many = len(measured) > _MAX_NAMED
    size = (14, max(6, 0.5 + _LIST_LINE * len(measured))) if many else (9, 6)
    with saved_figure(path, theme, size) as figure:
        headline(figure, rows)
        axes = figure.subplots()
        axes.set_title("Memory against time")
        axes.set_xlabel("time of a step, in ms")
        axes.set_ylabel("memory at the peak")
        axes.grid(axis="both", visible=True)
        times = [row.step_ms or 0.0 for row in measured]
        totals = [row.total_bytes for row in measured]
        colors = [palette.background if row is vanilla else palette.text for row in measured]  # hues are for categories
        axes.scatter(times, totals, s=60, c=colors, edgecolors=palette.text, linewidths=1.5, zorder=3)
        axes.set_xlim(0, max(times) * 1.25)
        axes.set_ylim(0, max(totals) * 1.15)
        byte_axis(axes.yaxis, max(totals))
        if many:
            numbers = [str(number) for number in range(1, len(measured) + 1)]
            lines = [f"{number}  {name}".replace("\n", ": ") for number, name in zip(numbers, names, strict=True)]
            figure.legend([Line2D([], [])] * len(lines), lines, loc="outside right upper", handlelength=0)
            names = numbers
        if missing := [_without_time(row) for row in rows if row not in measured]:
            color = palette.text if all(row.finished for row in rows) else palette.accent
            place: dict[str, Any] = {"loc": "outside lower left", "ncols": 1 if len(missing) <= _MAX_NAMED else 3}
            figure.legend([Line2D([], [])] * len(missing), missing, handlelength=0, labelcolor=color, **place)
        place_labels(axes, times, totals, names, shared=many)  # in the space that the lists leave


def _memory_alone(rows: Sequence[Row], path: Path, theme: str) -> None:
    """Draws bars of memory, with the reason why there are no times."""
    with saved_figure(path, theme, (11, height(rows))) as figure:
        why = "a virtual GPU measures no time" if any(row.finished for row in rows) else "no run finished"
        headline(figure, rows, f"Memory without time: {why}")
        explain_labels(figure, rows)
        axes = figure.subplots()
        peaks(axes, rows, THEMES[theme])
        legend(figure, axes)


def _without_time(row: Row) -> str:
    """Returns a line on a run that has no point. Runs on a virtual GPU finish without a time."""
    return f"{row.short_label}: " + (f"{format_bytes(row.total_bytes)}, no time" if row.finished else row.outcome)


def _relative(row: Row, vanilla: Row | None) -> str:
    if vanilla is None or row is vanilla or not vanilla.step_ms or not row.step_ms:
        return row.short_label
    memory, time = row.total_bytes / vanilla.total_bytes, row.step_ms / vanilla.step_ms
    return f"{row.short_label}\n{memory:.2f} x memory, {time:.2f} x time"


# The positions of a label relative to its point, in points (1/72 inch); the first free one is used.
_BESIDE = [(9, 0, "left"), (-9, 0, "right"), (0, 22, "center"), (0, -22, "center")]
_AWAY = [
    (dx, dy, "left" if dx > 0 else "right")
    for dy in (20, -20, 40, -40, 60, -60, 80, -80, 110, -110, 140, -140)
    for dx in (12, -12, 60, -60)
]
_DOT = 6  # half the width of a point, in points
_LABEL_WIDTH = 30  # characters of numbers


def place_labels(
    axes: "Axes", x: Sequence[float], y: Sequence[float], labels: Sequence[str], *, shared: bool = False
) -> None:
    """Labels points. A label that is not next to its point gets a line to it.

    Args:
        axes: the axes.
        x: the positions of the points.
        y: the positions of the points.
        labels: their labels.
        shared: whether points on one another get one label, of all theirs.
    """
    from matplotlib.transforms import Bbox

    axes.figure.canvas.draw()  # gives texts their size and axes their position
    inside = axes.get_window_extent()
    pad = _DOT * axes.figure.dpi / 72
    points = list(zip(x, y, strict=True))
    places = [tuple(place) for place in axes.transData.transform(points)]
    occupied = [Bbox.from_extents(px - pad, py - pad, px + pad, py + pad) for px, py in places]
    groups: list[list[int]] = []
    for index, place in enumerate(places):
        near = (group for group in groups if shared and math.dist(places[group[0]], place) < 3 * pad)
        if group := next(near, None):
            group.append(index)
        else:
            groups.append([index])
    for group in groups:
        text = labels[group[0]] if not shared else textwrap.fill(", ".join(labels[i] for i in group), _LABEL_WIDTH)

        def cost(place: tuple[int, int, str], first: int = group[0], text: str = text) -> tuple[bool, int]:
            label = _label(axes, points[first], text, place)
            box = _extent(label)
            label.remove()
            return not _is_within(box, inside), sum(box.overlaps(other) for other in occupied)

        best = min([*_BESIDE, *_AWAY], key=cost)
        occupied.append(_extent(_label(axes, points[group[0]], text, best)))


def _extent(label: "Annotation") -> "Bbox":
    """Returns where a label's text is, without its line."""
    from matplotlib.text import Text

    label.get_window_extent()  # places the text
    return Text.get_window_extent(label)


def _is_within(box: "Bbox", outer: "Bbox") -> bool:
    return bool(outer.x0 <= box.x0 and box.x1 <= outer.x1 and outer.y0 <= box.y0 and box.y1 <= outer.y1)


def _label(axes: "Axes", point: tuple[float, float], label: str, place: tuple[int, int, str]) -> "Annotation":
    from matplotlib import rcParams

    dx, dy, side = place
    return axes.annotate(
        label,
        point,
        (dx, dy),
        textcoords="offset points",
        ha=side,
        va="center",
        fontsize=8,
        arrowprops={"arrowstyle": "-", "linewidth": 0.6, "color": rcParams["text.color"]} if dy else None,
    )
