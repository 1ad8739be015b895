# SPDX-License-Identifier: Apache-2.0
"""One run's memory over time, as a panel of a picture.

Time is counted in events of the allocator. In seconds, a GPU's picture would be of the host's waiting: it allocates all
of a forward in a few milliseconds, and then waits for the device.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from opacus_memprof.reports.figures import event_axis, stacked_areas
from opacus_memprof.reports.palette import Theme

if TYPE_CHECKING:
    from matplotlib.axes import Axes

X_LABEL = "allocations, frees and retags since training began"

_LINE = 0.12  # inches that a name takes beside its mark

_PHASE_NAMES = {
    "forward": ("forward", "fwd"),
    "backward": ("backward", "bwd"),
    "second_backward": ("second backward", "2nd bwd"),
    "optimizer_step": ("optimizer", "opt"),
    "zero_grad": ("zero grad", "zero"),
}


def timeline_panel(axes: "Axes", result: Mapping[str, Any], title: str, theme: Theme) -> None:
    """What a run's result says of its memory over time: stacked categories, the peak, and the phases of its steps.
    Set-up is shown where the peak is there. Events count from its end; the axis is for the caller to label, X_LABEL."""
    axes.set_title(title)
    rows = result["timeline"]
    if not rows or not rows["event"]:
        axes.text(0.5, 0.5, "nothing was recorded", transform=axes.transAxes, ha="center", color=theme.muted)
        return
    set_up = _set_up(result)
    origin = max(set_up.values(), default=0)
    events = [event - origin for event in rows["event"]]
    peak = max(range(len(events)), key=rows["bytes"].__getitem__)
    in_set_up = events[peak] < 0
    first = 0 if in_set_up else max((index for index, event in enumerate(events) if event <= 0), default=0)
    stacked_areas(axes, events[first:], {name: column[first:] for name, column in rows["categories"].items()})
    start, end = events[0] if in_set_up else 0, events[-1]
    axes.set_xlim(start, end if end > start else start + 1)
    event_axis(axes.xaxis)
    marker = "X" if result["status"] == "out_of_memory" else "v"
    axes.plot(events[peak], rows["bytes"][peak], marker=marker, color=theme.accent, markersize=6, clip_on=False)
    axes.set_ylim(0, rows["bytes"][peak] * 1.22)  # room for the phases' names
    _draw_marks(axes, rows, {name: event - origin for name, event in set_up.items()}, origin)


def _set_up(result: Mapping[str, Any]) -> dict[str, int]:
    """The stages of set-up, and the event after which each was done."""
    stages = ("model_loaded", "data_prepared", "optimizer_set_up", "privacy_engine_set_up")
    found = {}
    for entry in result["snapshots"]:
        stage = entry["name"].partition("_")[2]
        if stage in stages and entry["event"] is not None:
            found[stage.replace("_", " ")] = int(entry["event"])
    return found


def _draw_marks(axes: "Axes", rows: Mapping[str, Any], set_up: Mapping[str, int], origin: int) -> None:
    """Set-up from below, phases of the steps from above; names where there is room for them."""
    theme_color = axes.xaxis.label.get_color()
    start, end = axes.get_xlim()
    inches = 0.75 * axes.get_window_extent().width / axes.figure.dpi
    look: dict[str, Any] = {"color": theme_color, "fontsize": 7, "transform": axes.get_xaxis_transform()}
    before = start
    for name, event in set_up.items():
        if start < 0 < event - start:
            axes.axvline(event, color=theme_color, linewidth=0.8, linestyle="--")
            if (event - before) * inches / (end - start) >= _LINE:
                axes.text(event, 0.5, f"{name} ", rotation=90, ha="right", va="center", **look)
                before = event
    letters = inches / 0.055 / (end - start)  # of room for each event
    phases = [phase for phase in _phases(rows, origin) if phase[1] >= start]
    if sum((until - begin) * letters < 1 for _, begin, until in phases) > len(phases) / 2:
        return  # marks of the few that are long enough would be taken for all
    for phase, begin, until in phases:
        room = (until - begin) * letters
        if room < 0.3:
            continue
        axes.axvline(begin, color=theme_color, linewidth=0.4, alpha=0.6)
        if fitting := [name for name in _PHASE_NAMES.get(phase, (phase,)) if len(name) <= room]:
            axes.text((begin + until) / 2, 0.98, fitting[0], ha="center", va="top", **look)


def _phases(rows: Mapping[str, Any], origin: int) -> list[tuple[str, int, int]]:
    """(phase, its beginning, its end) in events, of those in which a model trains."""
    found: list[tuple[str, int, int]] = []
    events = [event - origin for event in rows["event"]]
    for phase, event, until in zip(rows["phase"], events, [*events[1:], events[-1]], strict=True):
        if phase in ("idle", "setup"):
            continue
        if found and found[-1][0] == phase and found[-1][2] == event:
            found[-1] = (phase, found[-1][1], until)
        else:
            found.append((phase, event, until))
    return found
