# SPDX-License-Identifier: Apache-2.0
"""Draws memory by category over the time of runs.

Time is counted in events of the allocator. In seconds, a GPU's picture would mostly show the host waiting: it allocates
all of a forward in a few milliseconds, and then waits for the device.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from opacus_memprof.experiments.figures.bars import headline
from opacus_memprof.experiments.rows import SET_UP, Row
from opacus_memprof.profiles.experiment_result import ExperimentResult
from opacus_memprof.profiles.units import format_bytes
from opacus_memprof.reports.figures import (
    byte_axis,
    category_label,
    event_axis,
    legend,
    phase_legend,
    phase_strip,
    saved_figure,
    stacked_areas,
)
from opacus_memprof.reports.palette import THEMES, Theme

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_AXIS = "allocations, frees and retags since training began"
_LINE = 0.12  # inches that a name needs next to its mark
_STRIP = (0.94, 1.0)  # of the height: the phases


def timelines(rows: Sequence[Row], path: Path, theme: str) -> None:
    """Draws a panel for each run, on the same scale of bytes: live bytes by category, and phases.

    Set-up is shown only if the peak is in it.
    """
    columns = 1 if len(rows) <= 6 else 2 if len(rows) <= 12 else 3
    lines = math.ceil(len(rows) / columns)
    size = (12, 5) if len(rows) == 1 else (11 if columns == 1 else 8 * columns, 1 + 2.5 * lines)
    with saved_figure(path, theme, size) as figure:
        headline(figure, rows)
        panels = figure.subplots(lines, columns, squeeze=False).flatten()
        used = panels[: len(rows)]
        phases = [phase for axes, row in zip(used, rows, strict=True) for phase in _panel(axes, row, THEMES[theme])]
        for axes in panels[len(rows) :]:
            axes.set_axis_off()
        top = max(axes.get_ylim()[1] for axes in used)
        for axes in used:
            axes.set_ylim(0, top)
            byte_axis(axes.yaxis, top)
        for axes in used[-columns:]:
            axes.set_xlabel(_AXIS)
        legend(figure, *used)
        phase_legend(figure, phases, loc="outside lower center")


def _title(row: Row) -> str:
    peak = f": {format_bytes(row.total_bytes)} in {category_label(row.peak.phase)}" if row.peak else ""
    return row.short_label + peak + ("" if row.finished else f", {row.outcome}")


def _panel(axes: "Axes", row: Row, theme: Theme) -> Sequence[str]:
    """Draws stacked categories, the peak, the failed allocation, and above them the phases. Returns the phases.

    Events count from the end of set-up.
    """
    axes.set_title(_title(row))
    result, timeline = row.result, row.result.timeline
    if not timeline.event:
        axes.text(0.5, 0.5, "nothing was recorded", transform=axes.transAxes, ha="center", color=theme.muted)
        axes.tick_params(bottom=False, labelbottom=False)
        return ()
    stage_ends = _stage_ends(result)
    origin = max(stage_ends.values(), default=0)
    events = [event - origin for event in timeline.event]
    peak = max(range(len(events)), key=timeline.bytes.__getitem__)
    in_set_up = events[peak] < 0
    first = 0 if in_set_up else max((index for index, event in enumerate(events) if event <= 0), default=0)
    stacked_areas(axes, events[first:], {name: column[first:] for name, column in timeline.categories.items()})
    start, end = events[0] if in_set_up else 0, events[-1]
    axes.set_xlim(start, end if end > start else start + 1)
    event_axis(axes.xaxis)
    mark: dict[str, Any] = {"color": theme.accent, "linestyle": "", "markersize": 6, "clip_on": False}
    axes.plot(events[peak], timeline.bytes[peak], marker="v", label="peak", **mark)
    failed = row.failed_allocation
    if failed is not None and failed.event - origin >= start:
        axes.plot(min(failed.event - origin, end), failed.live_bytes, marker="X", label="out of memory", **mark)
    axes.set_ylim(0, timeline.bytes[peak] * 1.22)  # room for the phases
    phase_strip(axes, events[first:], timeline.phase[first:], timeline.step[first:], _STRIP)
    if in_set_up:
        _mark_stages(axes, {name: event - origin for name, event in stage_ends.items()})
    return timeline.phase[first:-1]  # the last row is an instant


def _stage_ends(result: ExperimentResult) -> dict[str, int]:
    """Returns the last event of each stage of set-up."""
    ends = {}
    for snapshot in result.snapshots:
        stage = snapshot.name.partition("_")[2]
        if stage in SET_UP and snapshot.event is not None:
            ends[stage.replace("_", " ")] = snapshot.event
    return ends


def _mark_stages(axes: "Axes", stage_ends: Mapping[str, int]) -> None:
    """Draws a line at the end of each stage, and its name if there is room for it."""
    color = axes.xaxis.label.get_color()
    start, end = axes.get_xlim()
    inches = 0.75 * axes.get_window_extent().width / axes.figure.dpi
    before = start
    for name, event in stage_ends.items():
        if event <= start:
            continue
        axes.axvline(event, color=color, linewidth=0.8, linestyle="--")
        if (event - before) * inches / (end - start) >= _LINE:
            style: dict[str, Any] = {"color": color, "fontsize": 7, "transform": axes.get_xaxis_transform()}
            axes.text(event, 0.5, f"{name} ", rotation=90, ha="right", va="center", **style)
            before = event
