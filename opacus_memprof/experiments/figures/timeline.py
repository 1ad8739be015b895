# SPDX-License-Identifier: Apache-2.0
"""Draws memory by category over the time of runs.

Time is counted in events of the allocator, or in seconds of the host. In seconds, a GPU's picture mostly shows the host
waiting: it allocates all of a forward in a few milliseconds, and then waits for the device.
"""

import math
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from opacus_memprof.experiments.configuration import SIZES_NOTE
from opacus_memprof.experiments.figures.bars import headline
from opacus_memprof.experiments.rows import SET_UP, Row
from opacus_memprof.profiles.experiment_result import ExperimentResult
from opacus_memprof.profiles.profile import PROOF
from opacus_memprof.profiles.units import format_bytes
from opacus_memprof.reports.figures import (
    THEMES,
    Theme,
    byte_axis,
    category_label,
    event_axis,
    legend,
    phase_legend,
    phase_strip,
    saved_figure,
    second_axis,
    stacked_areas,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

TimeAxis = Literal["events", "seconds"]
_AXES = {
    "events": "allocations, frees and retags since training began",
    "seconds": "seconds of the host since training began",
}
_MOST_STEPS = 60  # more lines than these would hide the picture
_LINE = 0.12  # inches that a name needs next to its mark
_STRIP = (0.94, 1.0)  # of the height: the phases


def timelines(rows: Sequence[Row], path: Path, theme: str, axis: TimeAxis = "events") -> None:
    """Draws a panel for each run, on the same scale of bytes: live bytes by category, phases, and optimizer steps.

    Set-up, and the proof with which flash_clip begins, are shown only if the peak is in them.
    """
    columns = 1 if len(rows) <= 6 else 2 if len(rows) <= 12 else 3
    lines = math.ceil(len(rows) / columns)
    size = (12, 5) if len(rows) == 1 else (11 if columns == 1 else 8 * columns, 1 + 2.5 * lines)
    with saved_figure(path, theme, size) as figure:
        headline(figure, rows)
        panels = figure.subplots(lines, columns, squeeze=False).flatten()
        used = panels[: len(rows)]
        phases = [
            phase for axes, row in zip(used, rows, strict=True) for phase in _panel(axes, row, THEMES[theme], axis)
        ]
        for axes in panels[len(rows) :]:
            axes.set_axis_off()
        top = max(axes.get_ylim()[1] for axes in used)
        for axes in used:
            axes.set_ylim(0, top)
            byte_axis(axes.yaxis, top)
        for axes in used[-columns:]:
            axes.set_xlabel(_AXES[axis] + (f"\n{SIZES_NOTE}" if any(row.names_sizes for row in rows) else ""))
        legend(figure, *used)
        phase_legend(figure, phases, loc="outside lower center")


def _title(row: Row) -> str:
    peak = f": {format_bytes(row.total_bytes)} in {category_label(row.peak.phase)}" if row.peak else ""
    return row.short_label + peak + ("" if row.finished else f", {row.outcome}")


@dataclass(frozen=True)
class _Window:
    """The part of a run that its panel shows.

    Attributes:
        first: the first event.
        stage_ends: the last event of each stage of set-up that is shown.
        note: what is left out, as part of a title.
    """

    first: int
    stage_ends: Mapping[str, int]
    note: str = ""


def _window(result: ExperimentResult, peak: int) -> _Window:
    """Returns the window of a run: from its beginning, from the end of set-up, or from that of a proof."""
    timeline, edges = result.timeline, result.phase_edges
    stage_ends = _stage_ends(result)
    begin = max(stage_ends.values(), default=0)
    if peak < begin:
        return _Window(timeline.event[0], stage_ends)
    proofs = [index for index, phase in enumerate(edges.phase[:-1]) if phase == PROOF]
    if not proofs or peak < edges.event[proofs[0] + 1]:
        return _Window(begin, {})
    start, end = edges.event[proofs[0]], edges.event[proofs[0] + 1]
    highest = max(
        (size for event, size in zip(timeline.event, timeline.bytes, strict=True) if start <= event < end), default=0
    )
    note = f"\nwithout flash_clip's proof before its first step: {end - start:,} events, up to {format_bytes(highest)}"
    return _Window(end, {}, note)


def _panel(axes: "Axes", row: Row, theme: Theme, axis: TimeAxis) -> Sequence[str]:
    """Draws stacked categories, the peak, the failed allocation, optimizer steps, and above them the phases.

    Returns the phases.
    """
    axes.set_title(_title(row))
    result, timeline, edges = row.result, row.result.timeline, row.result.phase_edges
    if not timeline.event:
        axes.text(0.5, 0.5, "nothing was recorded", transform=axes.transAxes, ha="center", color=theme.muted)
        axes.tick_params(bottom=False, labelbottom=False)
        return ()
    peak = max(range(len(timeline.event)), key=timeline.bytes.__getitem__)
    window = _window(result, timeline.event[peak])
    axes.set_title(_title(row) + window.note)
    place = _placement(result, axis)
    first = max(bisect_right(timeline.event, window.first) - 1, 0)
    x = [place(event) for event in timeline.event]
    stacked_areas(axes, x[first:], {name: column[first:] for name, column in timeline.categories.items()})
    start, end = place(window.first), x[-1]
    axes.set_xlim(start, end if end > start else start + 1)
    (event_axis if axis == "events" else second_axis)(axes.xaxis)
    mark: dict[str, Any] = {"linestyle": "", "markersize": 6, "clip_on": False}
    axes.plot(x[peak], timeline.bytes[peak], marker="v", label="peak", color=theme.text, **mark)
    failed = row.failed_allocation
    if failed is not None and failed.event >= window.first:
        at = min(place(failed.event), end)
        axes.plot(at, failed.live_bytes, marker="X", label="out of memory", color=theme.accent, **mark)
    axes.set_ylim(0, timeline.bytes[peak] * 1.22)  # room for the phases
    if edges.event:
        shown = max(bisect_right(edges.event, window.first) - 1, 0)
        places, phases, steps = [*map(place, edges.event[shown:]), end], edges.phase[shown:], edges.step[shown:]
    else:  # the events could not be read
        places, phases, steps = x[first:], timeline.phase[first:-1], timeline.step[first:]
    places = [max(each, start) for each in places]
    phase_strip(axes, places, phases, steps, _STRIP)
    _mark_steps(axes, places, phases, theme)
    _mark_stages(axes, {name: place(event) for name, event in window.stage_ends.items()})
    return phases


def _placement(result: ExperimentResult, axis: TimeAxis) -> Callable[[int], float]:
    """Returns the function that places an event on the axis: 0 is the end of set-up."""
    begin = max(_stage_ends(result).values(), default=0)
    if axis == "events":
        return lambda event: event - begin
    known = sorted(
        {
            *zip(result.timeline.event, result.timeline.time_ns, strict=True),
            *zip(result.phase_edges.event, result.phase_edges.time_ns, strict=True),
        }
    )
    events, times = [event for event, _ in known], [time / 1e9 for _, time in known]
    return lambda event: np.interp(event, events, times).item() - np.interp(begin, events, times).item()


def _mark_steps(axes: "Axes", places: Sequence[float], phases: Sequence[str], theme: Theme) -> None:
    """Draws a line at the beginning of each optimizer step."""
    begins = [at for at, phase in zip(places, phases, strict=False) if phase == "optimizer_step"]
    for number, at in enumerate(begins if len(begins) <= _MOST_STEPS else []):
        label = "" if number else "optimizer step"
        axes.axvline(at, color=theme.muted, linewidth=0.8, linestyle=(0, (2, 3)), label=label or None)


def _stage_ends(result: ExperimentResult) -> dict[str, int]:
    """Returns the last event of each stage of set-up."""
    ends = {}
    for snapshot in result.snapshots:
        stage = snapshot.name.partition("_")[2]
        if stage in SET_UP and snapshot.event is not None:
            ends[stage.replace("_", " ")] = snapshot.event
    return ends


def _mark_stages(axes: "Axes", stage_ends: Mapping[str, float]) -> None:
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
