# SPDX-License-Identifier: Apache-2.0
"""What the page draws: the profiles without what it does not show, and timelines as fine as the page's size allows."""

import contextlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from opacus_memprof.analysis.device import thin_timeline
from opacus_memprof.analysis.profile import TIMELINE_POINTS, read_timelines
from opacus_memprof.analysis.tax import dp_tax
from opacus_memprof.analysis.virtual import virtual_mark
from opacus_memprof.errors import MemprofError
from opacus_memprof.profiles.directory import OOM_REPORTS
from opacus_memprof.profiles.json_object import JsonObject, read_json_object
from opacus_memprof.profiles.oom_report import OomReport
from opacus_memprof.profiles.profile import Device, DeviceSnapshot, FailedAllocation, Groups, Profile, Timeline
from opacus_memprof.reports.moments import explanation
from opacus_memprof.reports.palette import CATEGORY_COLORS

# Of the page's 5 MB; the rest is for everything else, and the scripts.
_TIMELINE_BYTES = 2_000_000
# Of one device's timeline.
_MOST_ROWS = 20_000
# Of all devices together: what is beyond is summed up or counted.
_MOST_MODULES = 4000
_MOST_STEPS = 4000
_MOST_SNAPSHOTS = 2000
_MOST_FAILURES = 500

_OF_A_PROFILE = ("status", "exit_code", "error", "launch", "versions", "pid", "started_unix_ns", "events", "warnings")
_OF_A_FINDING = ("kind", "module", "bytes", "evidence", "remedy", "device")
_OF_A_SUGGESTION = ("title", "code", "computed", "predicted_peak_bytes", "saved_bytes", "fits")
_NOT_OF_A_PEAK = {"modules", "module_tree", "unix_ns", "source"}
_NOT_OF_A_MOMENT = {"unix_ns"}


@dataclass(frozen=True)
class Run:
    """One profile of a page.

    Attributes:
        name: what the reader chooses it by.
        profile: the content of its profile.json.
        directory: where it came from, for more of the timeline than the profile has; None where there is none.
        without_dp: the profile of the same training without privacy, for what privacy costs.
    """

    name: str
    profile: Profile
    directory: str | os.PathLike[str] | None = None
    without_dp: Profile | None = None


def payload(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """What the page's scripts find in `REPORT.runs`.

    Raises MemprofError where a run cannot be compared with the one without privacy (see analysis.tax.dp_tax).
    """
    share = 1 / max(sum(len(run.profile.devices) for run in runs), 1)  # of each device in what the page may hold
    return [_run(run, share) for run in runs]


def _run(run: Run, share: float) -> dict[str, Any]:
    profile = run.profile
    start = profile.started_unix_ns
    timelines = _timelines(run, int(share * _TIMELINE_BYTES))
    return {
        "name": run.name,
        "profile": {
            **{key: profile.get(key) for key in _OF_A_PROFILE},
            "virtual_mark": virtual_mark(profile.virtual),
            "duration_ns": profile.ended_unix_ns - start,
            "findings": [
                {key: finding[key] for key in _OF_A_FINDING if key in finding} for finding in profile.findings
            ],
            "devices": {
                name: _device(device, timelines[name], start, share) for name, device in profile.devices.items()
            },
        },
        "advice": _advice(run),
        "tax": None if run.without_dp is None else dp_tax(profile, run.without_dp),
    }


def _advice(run: Run) -> dict[str, Any] | None:
    """What would have fitted, where the run ended out of memory and said so."""
    path = None if run.directory is None else Path(run.directory) / OOM_REPORTS[1]
    if path is None or not path.is_file():
        return None
    with contextlib.suppress(MemprofError):
        report = read_json_object(path, OomReport)
        suggestions = [{key: one[key] for key in _OF_A_SUGGESTION} for one in report.suggestions]
        return {"device": report.device, "needed_bytes": report.needed.bytes, "suggestions": suggestions}
    return None


def _device(device: Device, timeline: dict[str, Any], start: int, share: float) -> dict[str, Any]:
    peak, snapshots, failures = device.peak, device.snapshots, device.out_of_memory
    snapshots = snapshots[: int(share * _MOST_SNAPSHOTS)]
    failures = failures[-max(int(share * _MOST_FAILURES), 1) :]
    highest = sorted(device.steps, key=lambda step: -step.peak_bytes)[: int(share * _MOST_STEPS)]
    steps = sorted(highest, key=lambda step: step.step)
    return {
        "peak": {
            **_without(peak, _NOT_OF_A_PEAK),
            "modules": _largest_modules(peak.modules, int(share * _MOST_MODULES)),
        },
        "phases": {name: _without(moment, _NOT_OF_A_MOMENT) for name, moment in device.phases.items()},
        "explanation": explanation(
            device.phases,
            [(phase.step, phase.logical_step) for phase in device.phases.values()]
            + [(step.step, step.logical_step) for step in device.steps],
        ),
        "steps": [_without(step, {*_NOT_OF_A_MOMENT, "categories"}) for step in steps],
        "steps_left_out": device.steps_left_out + len(device.steps) - len(steps),
        "snapshots": [_moment(snapshot, start, {"categories"}) for snapshot in snapshots],
        "snapshots_left_out": len(device.snapshots) - len(snapshots),
        "out_of_memory": [_moment(failure, start) for failure in failures],
        "out_of_memory_left_out": len(device.out_of_memory) - len(failures),
        "timeline": timeline,
        "end_bytes": device.end_bytes,
    }


def _without(fields: JsonObject, unwanted: set[str]) -> dict[str, Any]:
    return {key: value for key, value in fields.items() if key not in unwanted}


def _moment(
    moment: DeviceSnapshot | FailedAllocation, start: int, unwanted: frozenset[str] | set[str] = frozenset()
) -> dict[str, Any]:
    """With its time since the start: JavaScript's numbers do not hold nanoseconds since 1970."""
    return {**_without(moment, {"unix_ns", *unwanted}), "time_ns": moment.unix_ns - start}


def _largest_modules(modules: Groups, most: int) -> Groups:
    """The largest, and all others as one entry, so that the sum stays the peak."""
    ordered = sorted(modules, key=lambda name: -sum(modules[name].values()))
    kept = {name: modules[name] for name in ordered[:most]}
    if rest := ordered[most:]:
        total: dict[str, int] = {}
        for name in rest:
            for category, size in modules[name].items():
                total[category] = total.get(category, 0) + size
        kept[f"({len(rest)} small modules)"] = total
    return kept


def _timelines(run: Run, room: int) -> dict[str, dict[str, Any]]:
    """The timelines of a run's devices, each encoded and at most `room` bytes long where that is possible: as the
    profile has them, or finer from the events, if they are there and no longer growing."""
    profile = run.profile
    events = profile.events.recorded
    given = {name: device.timeline for name, device in profile.devices.items()}
    a_row = max(-(-events // TIMELINE_POINTS), 1)
    coarse = {name: _encoded(timeline, a_row) for name, timeline in given.items()}
    longest = max((len(json.dumps(timeline, separators=(",", ":"))) for timeline in coarse.values()), default=1)
    points = min(_MOST_ROWS, TIMELINE_POINTS * room // longest)
    if points < TIMELINE_POINTS:
        together = -(-TIMELINE_POINTS // max(points, 1))
        return {name: _encoded(thin_timeline(timeline, together), together * a_row) for name, timeline in given.items()}
    if run.directory is None or profile.status == "running" or min(points, events) <= TIMELINE_POINTS:
        return coarse
    try:
        fine = read_timelines(run.directory, points)
    except MemprofError:  # profile.json alone was kept
        return coarse
    return {name: _encoded(fine[name], -(-events // points)) if name in fine else coarse[name] for name in coarse}


def _encoded(timeline: Timeline, events_a_row: int) -> dict[str, Any]:
    """Differences from row to row, most of which are 0. A row's bytes are the sum of its categories. `events_a_row`:
    of how many events in a row each shows the highest."""
    phases = list(dict.fromkeys(timeline.phase))
    return {
        **{key: _differences(timeline[key]) for key in ("event", "time_ns", "step", "logical_step")},
        "events_a_row": events_a_row,
        "phases": phases,
        "phase": _differences([phases.index(phase) for phase in timeline.phase]),
        "categories": [[name, _differences(sizes)] for name, sizes in timeline.categories.items()],
    }


def _differences(values: Sequence[int]) -> list[int]:
    return [after - before for before, after in pairwise([0, *values])]


def categories(runs: Sequence[Mapping[str, Any]]) -> set[str]:
    """The built-in categories, and the program's own that a page names."""
    found = set(CATEGORY_COLORS)
    for run in runs:
        for device in run["profile"]["devices"].values():
            moments = [device["peak"], *device["phases"].values(), *device["out_of_memory"]]
            found.update(*(moment["categories"] for moment in moments))
            found.update(name for name, _ in device["timeline"]["categories"])
            found.update(failure["category"] for failure in device["out_of_memory"])
        for difference in (run["tax"] or {"devices": {}})["devices"].values():
            found.update(difference["categories"])
    return found
