# SPDX-License-Identifier: Apache-2.0
"""Draws a device's memory as one picture: over time, and at the peak by category, module and component."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from opacus_memprof.analysis.profile_view import DeviceView, Part, ProfileView
from opacus_memprof.profiles.profile import PROOF, Device, EventGap, FailedAllocation, Peak, Timeline
from opacus_memprof.profiles.units import format_bytes, format_moment, shorten_name
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
    stacked_areas,
    stacked_bars,
    translated,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_SIZE = (13.0, 10.0)  # inches
_LABEL_LENGTH = 28  # characters of a name
_COLUMNS = 1000  # of the timeline: about one for each dot
_MOST_STEPS = 60  # more lines than these would hide the picture
_LABELLED_STEPS = 15


def picture_paths(view: ProfileView, path: str | os.PathLike[str]) -> dict[tuple[str, str], Path]:
    """Returns the files of write_pictures by device and theme: `a.png` and `a-dark.png`.

    With several devices, the device's name is in between.
    """
    target = Path(path)
    devices = list(view.devices) or [""]
    paths = {}
    for device in devices:
        device_part = f"-{device.replace(':', '')}" if len(devices) > 1 else ""
        for theme in THEMES:
            theme_part = "-dark" if theme == "dark" else ""
            paths[device, theme] = target.with_name(f"{target.stem}{device_part}{theme_part}{target.suffix}")
    return paths


def write_pictures(view: ProfileView, path: str | os.PathLike[str]) -> list[Path]:
    """Draws each device in light and in dark, and returns the files.

    Raises:
        MemprofError: matplotlib is not installed, or a file cannot be written.
    """
    paths = picture_paths(view, path)
    for (name, theme), file in paths.items():
        if name:
            _draw_device(view.devices[name], view.profile.events.gaps, theme, file)
        else:
            with saved_figure(file, theme, (8, 2)) as figure:
                figure.text(0.5, 0.5, "No memory was allocated on a device that was profiled.", ha="center")
    return list(paths.values())


def _draw_device(view: DeviceView, gaps: Sequence[EventGap], theme: str, file: Path) -> None:
    modules, components = view.modules, view.components
    with saved_figure(file, theme, _SIZE) as figure:
        grid = figure.add_gridspec(4, 2, height_ratios=(20, 1.5, 8 + len(modules), 8 + len(components)))
        timeline = figure.add_subplot(grid[0, :])
        shown, note = _without_first_proof(view.device)
        timeline.set_title(f"Requested memory of {view.title}, event by event{note}")
        _draw_timeline(timeline, view.device, _visible_timeline(shown, gaps, _COLUMNS), gaps, THEMES[theme])
        # Of all rows: the highest of several is never in the phases that take little memory, such as noise.
        _draw_phases(figure.add_subplot(grid[1, :], sharex=timeline), _visible_timeline(shown, gaps, len(shown.bytes)))
        places: list[tuple[Any, str, Sequence[Part]]] = [
            (grid[2:, 0], "At the peak, by category", view.categories),
            (grid[2, 1], "At the peak, by module", modules),
            (grid[3, 1], "At the peak, by component", components),
        ]
        bars = []
        for cell, title, parts in (place for place in places if place[2]):  # a peak from counters has no modules
            axes = figure.add_subplot(cell)
            axes.set_title(title)
            named = (translated(part.name) if part.is_rest else part.name for part in parts)
            names = [shorten_name(name or translated("(no module)"), _LABEL_LENGTH) for name in named]
            if parts is view.categories:
                names = list(map(category_label, names))  # as in the legend
            stacked_bars(axes, names, [part.categories for part in parts])
            bars.append(axes)
        legend(figure, timeline, *bars)


def _without_first_proof(device: Device) -> tuple[Timeline, str]:
    """Returns the timeline from the end of flash_clip's proof in the first step on, unless the peak is in a proof.

    The second value says what is left out. Otherwise the proof would fill most of a short run's picture.
    """
    timeline = device.timeline
    proved = [row for row, phase in enumerate(timeline.phase) if phase == PROOF]
    of_first = [row for row in proved if timeline.step[row] == timeline.step[proved[0]]]
    first = of_first[-1] + 1 if of_first else 0
    if not first or device.peak.phase == PROOF or first == len(timeline.event):
        return timeline, ""
    columns = {name: column[first:] for name, column in timeline.items() if name != "categories"}
    categories = {name: column[first:] for name, column in timeline.categories.items()}
    highest = format_bytes(max(timeline.bytes[row] for row in of_first))
    return Timeline(**columns, categories=categories), f", from flash_clip's proof (up to {highest}) on"


def _visible_timeline(timeline: Timeline, gaps: Sequence[EventGap], most: int) -> Timeline:
    """Thins the timeline to `most` rows, and repeats the last one at its end."""
    rows = timeline.thinned(max(-(-len(timeline.bytes) // max(most, 1)), 1))
    columns = {name: [*column, *column[-1:]] for name, column in rows.items() if name != "categories"}
    columns["event"] = [_place_event(event, gaps) for event in columns["event"]]
    columns["event"][-1:] = [event + 1 for event in columns["event"][-1:]]
    categories = {category: [*column, *column[-1:]] for category, column in rows.categories.items()}
    return Timeline(**columns, categories=categories)


def _place_event(event: int, gaps: Sequence[EventGap]) -> int:
    """Returns the number of recorded events before an event. The picture's axis omits gaps."""
    return event - sum(gap.events for gap in gaps if gap.first_event + gap.events <= event)


def _draw_timeline(axes: "Axes", device: Device, timeline: Timeline, gaps: Sequence[EventGap], theme: Theme) -> None:
    peak, events = device.peak, timeline.event
    stacked_areas(axes, events, timeline.categories)
    if not events:  # a device without any events in the files
        axes.set_xlim(0, 1)
    axes.tick_params(labelbottom=False)
    highest = peak.requested_bytes
    axes.set_ylim(0, max(highest, 1) * (1.2 if device.out_of_memory else 1.12))
    byte_axis(axes.yaxis, highest)
    if peak.event is None:
        axes.axhline(highest, color=theme.text, linestyle="--")
        _mark(
            axes,
            next(iter(events), 0),
            highest,
            f"peak, not among these events: {_describe_instant(highest, peak)}",
            theme.text,
        )
    else:
        _mark(axes, _place_event(peak.event, gaps), highest, f"peak: {_describe_instant(highest, peak)}", theme.text)
    for failure in device.out_of_memory[-1:]:
        text = f"out of memory: {_describe_instant(failure.requested_bytes, failure)}"
        _mark(
            axes, _place_event(failure.event, gaps), failure.live_bytes, text, theme.accent, line=1
        )  # it is near the peak, mostly
    for gap in gaps:
        place = _place_event(gap.first_event, gaps)
        axes.axvline(place, color=theme.accent, linewidth=1.2, linestyle="--")
        label = f" {gap.events:,} events are missing"
        axes.annotate(
            label, (place, 0), xycoords=("data", "axes fraction"), rotation=90, va="bottom", color=theme.accent
        )
    steps = timeline.step
    begins = [(events[row], steps[row]) for row in range(1, len(steps)) if steps[row] != steps[row - 1]]
    for event, step in begins if len(begins) <= _MOST_STEPS else []:
        axes.axvline(event, color=theme.muted, linewidth=0.6, linestyle=(0, (2, 3)))
        if len(begins) <= _LABELLED_STEPS:
            style: dict[str, Any] = {
                "xycoords": ("data", "axes fraction"),
                "va": "top",
                "fontsize": 7,
                "color": theme.muted,
            }
            axes.annotate(f" step {step}", (event, 1), **style)


def _describe_instant(size: int, moment: Peak | FailedAllocation) -> str:
    return f"{format_bytes(size)} in {format_moment(moment.phase, moment.step, moment.logical_step)}"


def _mark(axes: "Axes", event: int, size: int, text: str, color: str, line: int = 0) -> None:
    """Marks a point with a text, `line` lines above it, on the side that has more space."""
    low, high = axes.get_xlim()
    right = event > (low + high) / 2
    axes.plot([event], [size], marker="v", color=color, markersize=7, clip_on=False)
    axes.annotate(
        text,
        (event, size),
        (-8 if right else 8, 4 + 16 * line),
        textcoords="offset points",
        ha="right" if right else "left",
        color=color,
        fontweight="bold",
    )


def _draw_phases(axes: "Axes", timeline: Timeline) -> None:
    """Draws a strip of the program's phases."""
    phase_strip(axes, timeline.event, timeline.phase, timeline.step, (0, 1))
    axes.set_ylim(0, 1)
    event_axis(axes.xaxis)
    axes.set_yticks([0.5], [translated("phase")])
    axes.tick_params(axis="y", length=0)
    axes.grid(visible=False)
    axes.margins(x=0)
    phase_legend(axes, timeline["phase"], loc="upper left", bbox_to_anchor=(0, -0.9))
