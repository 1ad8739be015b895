# SPDX-License-Identifier: Apache-2.0
"""The methods' memory at the peak, over time, and against the time that they take."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from opacus_memprof.experiments.comparison import Method, difference, vanilla_of
from opacus_memprof.experiments.labels import place_labels
from opacus_memprof.experiments.timeline import X_LABEL, timeline_panel
from opacus_memprof.profiles.categories import stack_order
from opacus_memprof.reports.figures import byte_axis, category_label, drawn, legend, stacked_bars
from opacus_memprof.reports.palette import THEMES, Theme, category_color
from opacus_memprof.units import format_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MANY = 8  # bars or points, from which on names are out of the way


def breakdown_comparison(compared: Sequence[Method], path: Path, theme: str) -> None:
    """Left: each method's peak by category. Right: what it takes more than vanilla. Raises MemprofError."""
    width = 11 + 0.55 * max(0, len(compared) - 3)
    with drawn(path, theme, (min(width, 24), 6)) as figure:
        left, right = figure.subplots(1, 2)
        left.set_title("Memory at the peak")
        stacked_bars(left, _names(compared), [method.bytes for method in compared])
        _mark_failures(left, compared, THEMES[theme])
        right.set_title("More than vanilla")
        _overheads(right, compared, THEMES[theme])
        legend(figure, left, right)


def _names(compared: Sequence[Method]) -> list[str]:
    """Of bars: few have room for two lines."""
    return [method.short.replace(" ", "\n") if len(compared) <= _MANY else method.short for method in compared]


def _mark_failures(axes: "Axes", compared: Sequence[Method], theme: Theme) -> None:
    """What was wanted on top of what there was, and words over every bar that is not a whole run's."""
    top = axes.get_ylim()[1]
    most = max([method.total for method in compared])
    for place, method in enumerate(compared):
        if method.finished:
            continue
        wanted, words = 0, method.outcome
        if method.refused_bytes:
            wanted = min(method.refused_bytes, most)  # or nothing else could be seen
            words += f"\n+{format_bytes(method.refused_bytes)}"
            axes.bar(
                place,
                wanted,
                bottom=method.total,
                facecolor="none",
                edgecolor=theme.accent,
                linewidth=1.2,
                linestyle="--",
            )
        _note(axes, place, method.total + wanted, words, theme, offset=14)
        top = max(top, (method.total + wanted) * 1.2)
    axes.set_ylim(top=top)
    byte_axis(axes.yaxis, top)


def _overheads(axes: "Axes", compared: Sequence[Method], theme: Theme) -> None:
    vanilla = vanilla_of(compared)
    others = [method for method in compared if method is not vanilla]
    if vanilla is None or not others:
        axes.set_axis_off()
        why = "no other run to compare" if vanilla else "no finished vanilla run to compare with"
        axes.text(0.5, 0.5, why, transform=axes.transAxes, ha="center", color=theme.muted)
        return
    rows = [difference(method, vanilla) if method.finished else {} for method in others]
    above, below = [0] * len(rows), [0] * len(rows)
    for category in stack_order(category for row in rows for category in row):
        sizes = [row.get(category, 0) for row in rows]
        bottoms = [above[i] if size > 0 else below[i] for i, size in enumerate(sizes)]
        axes.bar(
            range(len(rows)), sizes, bottom=bottoms, label=category_label(category), color=category_color(category)
        )
        above = [end + max(size, 0) for end, size in zip(above, sizes, strict=True)]
        below = [end + min(size, 0) for end, size in zip(below, sizes, strict=True)]
    reach = max(max(above), -min(below), 1)
    axes.axhline(0, color=theme.muted, linewidth=0.8)
    for place, (method, row) in enumerate(zip(others, rows, strict=True)):
        if not method.finished:
            _note(axes, place, 0, method.outcome, theme, offset=3)
            continue
        total = sum(row.values())
        axes.plot([place - 0.4, place + 0.4], [total, total], color=theme.text, linewidth=1.5)
        axes.annotate(
            f"{'+' if total > 0 else ''}{format_bytes(total)}",
            (place, above[place]),
            (0, 3),
            textcoords="offset points",
            ha="left" if len(others) > _MANY else "center",
            va="bottom",
            rotation=60 if len(others) > _MANY else 0,
            fontsize=8,
        )
    axes.set_ylim(min(below) - 0.04 * reach, max(above) + 0.16 * reach)
    byte_axis(axes.yaxis, reach)
    slanted = len(others) > _MANY
    axes.set_xticks(
        range(len(others)), _names(others), rotation=30 if slanted else 0, ha="right" if slanted else "center"
    )
    axes.set_xlim(-0.5, max(len(others), 3) - 0.5)


def _note(axes: "Axes", place: float, height: float, words: str, theme: Theme, offset: int) -> None:
    axes.annotate(
        words,
        (place, height),
        (0, offset),
        textcoords="offset points",
        ha="center",
        va="bottom",
        fontsize=8,
        color=theme.accent,
    )


def timeline(compared: Sequence[Method], path: Path, theme: str) -> None:
    """A panel for each method: what is live, by category, while it trains, with its phases marked. Set-up is shown too
    where the peak is there. Raises MemprofError."""
    columns = 1 if len(compared) <= 6 else 2 if len(compared) <= 12 else 3
    rows = math.ceil(len(compared) / columns)
    with drawn(path, theme, (11 if columns == 1 else 8 * columns, 0.6 + 2.5 * rows)) as figure:
        panels = figure.subplots(rows, columns, squeeze=False).flatten()
        for axes, method in zip(panels, compared, strict=False):
            ended = "" if method.finished else f": {method.outcome}"
            timeline_panel(axes, method.result, method.short + ended, THEMES[theme])
        for axes in panels[len(compared) :]:
            axes.set_axis_off()
        used = panels[: len(compared)]
        top = max(axes.get_ylim()[1] for axes in used)
        for axes in used:
            axes.set_ylim(0, top)
            byte_axis(axes.yaxis, top)
        for axes in used[-columns:]:
            axes.set_xlabel(X_LABEL)
        legend(figure, *used)


def tradeoff(compared: Sequence[Method], path: Path, theme: str) -> None:
    """Each method's peak against the time of a step. Raises MemprofError."""
    from matplotlib.lines import Line2D

    look = THEMES[theme]
    placed = [method for method in compared if method.finished and method.milliseconds]
    vanilla = vanilla_of(compared)
    names = [_relative(method, vanilla) for method in placed]
    many = len(placed) > _MANY
    with drawn(path, theme, (14 if many else 9, 6)) as figure:
        axes = figure.subplots()
        axes.set_title("Memory against time")
        axes.set_xlabel("time of a step, in ms")
        axes.set_ylabel("memory at the peak")
        axes.grid(axis="both", visible=True)
        times = [method.milliseconds or 0.0 for method in placed]
        totals = [method.total for method in placed]
        colors = [look.muted if method is vanilla else category_color("activation_hooks") for method in placed]
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
        if absent := [f"{method.short}: {method.outcome}" for method in compared if method not in placed]:
            axes.text(0.01, 0.01, "\n".join(absent), transform=axes.transAxes, va="bottom", color=look.accent)


def _relative(method: Method, vanilla: Method | None) -> str:
    if vanilla is None or method is vanilla or not vanilla.milliseconds or not method.milliseconds:
        return method.short
    memory, time = method.total / vanilla.total, method.milliseconds / vanilla.milliseconds
    return f"{method.short}\n{memory:.2f} x memory, {time:.2f} x time"


PICTURES: dict[str, Callable[[Sequence[Method], Path, str], None]] = {
    "memory_breakdown_comparison": breakdown_comparison,
    "memory_timeline": timeline,
    "performance_tradeoff": tradeoff,
}
