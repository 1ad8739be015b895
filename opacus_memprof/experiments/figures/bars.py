# SPDX-License-Identifier: Apache-2.0
"""Horizontal bars, one for each run: its memory, its additional memory compared with vanilla, and its step time."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from opacus_memprof.experiments.rows import Row, find_vanilla, overhead
from opacus_memprof.profiles.categories import stack_order
from opacus_memprof.profiles.profile import virtual_gpu_of
from opacus_memprof.profiles.units import format_bytes, format_signed_bytes, shorten_name
from opacus_memprof.reports.figures import byte_axis, category_label, label_bars, legend, saved_figure, stacked_bars
from opacus_memprof.reports.palette import THEMES, Theme, category_color

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_LABEL_LENGTH = 60  # characters


def breakdown_comparison(rows: Sequence[Row], path: Path, theme: str) -> None:
    """Draws memory_breakdown_comparison.png: each run's peak by category, and its additional memory over vanilla's."""
    with saved_figure(path, theme, (14, height(rows))) as figure:
        headline(figure, rows)
        left, right = figure.subplots(1, 2, sharey=True)
        peaks(left, rows, THEMES[theme])
        overheads(right, rows, THEMES[theme])
        legend(figure, left, right)


def peak_comparison(rows: Sequence[Row], path: Path, theme: str) -> None:
    """Draws peak_memory_comparison.png: each run's memory and step time."""
    with saved_figure(path, theme, (13, height(rows))) as figure:
        headline(figure, rows)
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
