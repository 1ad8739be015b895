# SPDX-License-Identifier: Apache-2.0
"""Memory by category over the time of a run."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from opacus_memprof.experiments.sweep.reading import Result, first_failure, label, peak_bytes
from opacus_memprof.reports.figures import byte_axis, category_label, drawn, legend, stacked_areas
from opacus_memprof.reports.palette import THEMES, Theme
from opacus_memprof.units import format_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLUMNS = 3  # of several timelines
_ROOM = 1.15  # for what is written above the peak


def draw_timeline(result: Result, path: Path, theme: str) -> None:
    """memory_timeline_config_NAME.png: one run, with its steps and what follows what."""
    with drawn(path, theme, (12, 5)) as figure:
        axes = figure.subplots()
        timeline(axes, result, THEMES[theme])
        legend(figure, axes)


def draw_timelines(results: Mapping[str, Result], path: Path, theme: str) -> None:
    """memory_usage_timeline.png: all runs, on the same scale of bytes."""
    rows = list(results.values())
    columns = min(len(rows), _COLUMNS)
    lines = math.ceil(len(rows) / _COLUMNS)
    size = (12, 5) if len(rows) == 1 else (14, 1 + 2.6 * lines)
    with drawn(path, theme, size) as figure:
        panels = list(figure.subplots(lines, columns, sharey=True, squeeze=False).flat)
        for axes, result in zip(panels, rows, strict=False):
            timeline(axes, result, THEMES[theme])
        for axes in panels[len(rows) :]:
            axes.set_visible(False)
        highest = max(peak_bytes(result) or 0 for result in rows)
        byte_axis(panels[0].yaxis, highest)
        panels[0].set_ylim(0, _ROOM * max(highest, 1))
        legend(figure, *panels[: len(rows)])


def timeline(axes: "Axes", result: Result, theme: Theme) -> None:
    """Stacked categories, the peak, and the steps of the optimizer. A run that ended early says why."""
    ended = "" if result["status"] == "finished" else f" · {result['status'].replace('_', ' ')}"
    axes.set_title(label(result) + ended)
    rows = result["timeline"]
    if not rows:
        axes.text(
            0.5, 0.5, "nothing was measured", ha="center", va="center", transform=axes.transAxes, color=theme.muted
        )
        axes.set_xticks([])
        return
    x, setup = training_seconds(rows["time_ns"], rows["phase"])
    stacked_areas(axes, x, rows["categories"])
    _mark_steps(axes, x, rows["logical_step"], theme)
    highest = max(range(len(x)), key=rows["bytes"].__getitem__)
    peak = rows["bytes"][highest]
    axes.plot(x[highest], peak, marker="v" if first_failure(result) is None else "X", color=theme.accent, clip_on=False)
    left = x[highest] > (x[0] + x[-1]) / 2
    axes.annotate(
        f"{format_bytes(peak)} in {category_label(rows['phase'][highest])}",
        (x[highest], peak),
        (-6 if left else 6, 2),
        textcoords="offset points",
        ha="right" if left else "left",
        fontsize=8,
    )
    axes.set_ylim(0, _ROOM * max(peak, 1))
    axes.set_xlabel("seconds of training" if setup else "seconds")
    if setup:
        axes.set_xticks([tick for tick in axes.get_xticks() if 0 <= tick <= x[-1]])
        axes.annotate(
            f"setup, {setup:.1f} s",
            (x[0], 1),
            (2, -2),
            ("data", "axes fraction"),
            "offset points",
            va="top",
            fontsize=7,
        )
        axes.axvline(0, color=theme.muted, linewidth=1, linestyle=":")


def training_seconds(time_ns: Sequence[int], phases: Sequence[str]) -> tuple[list[float], float]:
    """Seconds since training began, and the seconds of setting up before. What came before is squeezed into an eighth
    of the training's length, for loading a model may take longer than many steps.

    Args:
        time_ns: of each row of a timeline.
        phases: likewise. Training begins with the first forward pass; a run without one is not squeezed, and has a
            setup of 0.
    """
    seconds = [(time - time_ns[0]) / 1e9 for time in time_ns]
    begins = next((index for index, phase in enumerate(phases) if phase == "forward"), 0)
    setup, length = seconds[begins], seconds[-1] - seconds[begins]
    if not setup or not length:
        return seconds, 0.0
    squeeze = min(1.0, length / 8 / setup)
    return [(second - setup) * (squeeze if second < setup else 1) for second in seconds], setup


def _mark_steps(axes: "Axes", x: Sequence[float], steps: Sequence[int], theme: Theme) -> None:
    """A line where a step ends."""
    for index in range(1, len(x)):
        if steps[index] != steps[index - 1]:
            axes.axvline(x[index], color=theme.muted, linewidth=0.6, alpha=0.6)
