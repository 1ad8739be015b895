# SPDX-License-Identifier: Apache-2.0
"""Builds the page of a profile, and that of a job: a table of all ranks, and the whole profiles of some of them.

A page has the parts of profiles that it shows, and timelines that are as fine as its size allows.
"""

import html
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import pairwise
from typing import Any

from opacus_memprof.analysis.job_view import JobView
from opacus_memprof.analysis.profile import TIMELINE_POINTS
from opacus_memprof.analysis.profile_view import DeviceView, ProfileView
from opacus_memprof.errors import MemprofError
from opacus_memprof.profiles.files import write_text
from opacus_memprof.profiles.job_summary import JobSummary, Rank
from opacus_memprof.profiles.json_object import JsonObject
from opacus_memprof.profiles.oom_report import OomReport
from opacus_memprof.profiles.profile import DeviceSnapshot, FailedAllocation, Groups, Timeline
from opacus_memprof.reports.figures import CATEGORY_COLORS
from opacus_memprof.reports.html import build_page
from opacus_memprof.reports.text import privacy_sentence

_SCRIPTS = [
    "base.js",
    "address.js",
    "data.js",
    "theme.js",
    "table.js",
    "window.js",
    "chart.js",
    "readout.js",
    "pointer.js",
    "timeline.js",
    "meanings.js",
    "breakdown.js",
    "module_tree.js",
    "modules.js",
    "groups.js",
    "tax.js",
    "verdict.js",
    "suggestions.js",
    "history.js",
    "findings.js",
    "job.js",
    "frame.js",
    "header.js",
    "report.js",
]
_MOST_RANKS = 2000  # of a job: above this, those with the highest peaks are shown
# Of the page's 5 MB; the rest is for everything else, and the scripts.
_TIMELINE_BYTES = 2_000_000
# For one device's timeline.
_MOST_ROWS = 20_000
# For all devices together: further entries are summed up or counted.
_MOST_MODULES = 4000
_MOST_STEPS = 4000
_MOST_SNAPSHOTS = 2000
_MOST_FAILURES = 500

_PROFILE_KEYS = ("status", "exit_code", "error", "launch", "versions", "pid", "started_unix_ns", "events", "warnings")
_FINDING_KEYS = ("kind", "module", "bytes", "evidence", "remedy", "device")
_SUGGESTION_KEYS = ("title", "code", "computed", "predicted_peak_bytes", "saved_bytes", "fits")
_HIDDEN_PEAK_KEYS = {"modules", "module_tree", "unix_ns", "source"}
_HIDDEN_INSTANT_KEYS = {"unix_ns"}


def write_html(view: ProfileView | JobView, path: str | os.PathLike[str]) -> None:
    """Writes the page of a profile or a job to `path`, atomically.

    Raises:
        MemprofError: no rank has a peak, or the file cannot be written.
    """
    write_text(path, _page_of(view))


def framed(view: ProfileView | JobView) -> str:
    """Returns the page of a profile or job in a separate frame, for notebooks."""
    source = html.escape(_page_of(view))
    return f'<iframe srcdoc="{source}" sandbox="allow-scripts" style="width:100%;height:48em;border:0"></iframe>'


def _page_of(view: ProfileView | JobView) -> str:
    return build_html([view]) if isinstance(view, ProfileView) else _build_job_html(view)


def build_html(views: Sequence[ProfileView], job: Mapping[str, Any] | None = None) -> str:
    """Returns the page of one or several profiles, of which the reader chooses one. Its size is at most 5 MB.

    Args:
        views: at least one.
        job: for ranks, the data of the whole job.

    Raises:
        MemprofError: no rank has a peak.
    """
    runs = _runs(views)
    content = {"runs": runs, "job": job}
    return build_page(views[0].name, _SCRIPTS, content, _named_categories(runs), "opacus-memprof report DIRECTORY")


def _build_job_html(view: JobView) -> str:
    if not view.profiles:
        raise MemprofError("no rank has allocated memory on a device that was profiled: there is nothing to draw")
    highest = sorted((row for row in view.summary.ranks if row.peak), key=_peak_bytes, reverse=True)
    return build_html(view.profiles, job=_job(view.summary, highest[:_MOST_RANKS]))


def _peak_bytes(row: Rank) -> int:
    return row.peak.requested_bytes if row.peak else 0


def _job(summary: JobSummary, rows: list[Rank]) -> dict[str, Any]:
    return {
        "ranks": [
            {
                **{key: row[key] for key in ("rank", "host", "status", "steps")},
                "peak_bytes": _peak_bytes(row),
                "categories": row.peak.categories if row.peak else {},
            }
            for row in sorted(rows, key=lambda row: row.rank)
        ],
        "world_size": summary.world_size,
        "imbalance": summary.imbalance,
        "warnings": summary.warnings,
    }


def _runs(views: Sequence[ProfileView]) -> list[dict[str, Any]]:
    """Returns the value of `REPORT.runs` in the page's scripts."""
    share = 1 / max(sum(len(view.devices) for view in views), 1)  # of each device in the space of the page
    return [_run(view, share) for view in views]


def _run(view: ProfileView, share: float) -> dict[str, Any]:
    profile = view.profile
    start = profile.started_unix_ns
    timelines = _timelines(view, int(share * _TIMELINE_BYTES))
    verdicts = {verdict.device: asdict(verdict) for verdict in view.verdicts}
    return {
        "name": view.name,
        "profile": {
            **{key: profile.get(key) for key in _PROFILE_KEYS},
            "virtual_mark": view.virtual_mark,
            "duration_ns": profile.ended_unix_ns - start,
            "findings": [
                {key: finding[key] for key in _FINDING_KEYS if key in finding} for finding in profile.findings
            ],
            "devices": {
                name: {**_device(device, timelines[name], start, share), "verdict": verdicts.get(name)}
                for name, device in view.devices.items()
            },
        },
        "advice": None if view.out_of_memory is None else _advice(view.out_of_memory),
        "privacy_check": [privacy_sentence(sentence) for sentence in view.privacy],
        "tax": view.tax,
    }


def _advice(report: OomReport) -> dict[str, Any]:
    suggestions = [{key: suggestion[key] for key in _SUGGESTION_KEYS} for suggestion in report.suggestions]
    return {"device": report.device, "needed_bytes": report.needed.bytes, "suggestions": suggestions}


def _device(view: DeviceView, timeline: dict[str, Any], start: int, share: float) -> dict[str, Any]:
    device = view.device
    peak, snapshots, failures = device.peak, device.snapshots, device.out_of_memory
    snapshots = snapshots[: int(share * _MOST_SNAPSHOTS)]
    failures = failures[-max(int(share * _MOST_FAILURES), 1) :]
    highest = sorted(device.steps, key=lambda step: -step.peak_bytes)[: int(share * _MOST_STEPS)]
    steps = sorted(highest, key=lambda step: step.step)
    return {
        "peak": {
            **_without(peak, _HIDDEN_PEAK_KEYS),
            "modules": _largest_modules(peak.modules, int(share * _MOST_MODULES)),
        },
        "phases": {name: _without(moment, _HIDDEN_INSTANT_KEYS) for name, moment in device.phases.items()},
        "explanation": view.steps_note,
        "steps": [_without(step, {*_HIDDEN_INSTANT_KEYS, "categories"}) for step in steps],
        "steps_left_out": device.steps_left_out + len(device.steps) - len(steps),
        "snapshots": [_with_time(snapshot, start, {"categories"}) for snapshot in snapshots],
        "snapshots_left_out": len(device.snapshots) - len(snapshots),
        "out_of_memory": [_with_time(failure, start) for failure in failures],
        "out_of_memory_left_out": len(device.out_of_memory) - len(failures),
        "timeline": timeline,
        "end_bytes": device.end_bytes,
        "reserved_peak": device.reserved_peak,
    }


def _without(fields: JsonObject, unwanted: set[str]) -> dict[str, Any]:
    return {key: value for key, value in fields.items() if key not in unwanted}


def _with_time(
    moment: DeviceSnapshot | FailedAllocation, start: int, unwanted: frozenset[str] | set[str] = frozenset()
) -> dict[str, Any]:
    """Returns the fields of an instant, with nanoseconds since the start.

    Nanoseconds since 1970 are too large for JavaScript's numbers.
    """
    return {**_without(moment, {"unix_ns", *unwanted}), "time_ns": moment.unix_ns - start}


def _largest_modules(modules: Groups, count: int) -> Groups:
    """Returns the largest modules, and one entry for all others, so that the sum is still the peak."""
    ordered = sorted(modules, key=lambda name: -sum(modules[name].values()))
    kept = {name: modules[name] for name in ordered[:count]}
    if rest := ordered[count:]:
        total: dict[str, int] = {}
        for name in rest:
            for category, size in modules[name].items():
                total[category] = total.get(category, 0) + size
        kept[f"({len(rest)} small modules)"] = total
    return kept


def _timelines(view: ProfileView, max_bytes: int) -> dict[str, dict[str, Any]]:
    """Returns the encoded timelines of a run's devices, of about `max_bytes` bytes each.

    They are those of the profile or, for a run that has ended, finer ones from its events.
    """
    profile = view.profile
    events = profile.events.recorded
    timelines = {name: device.timeline for name, device in profile.devices.items()}
    events_per_row = max(-(-events // TIMELINE_POINTS), 1)
    coarse = {name: _encode(timeline, events_per_row) for name, timeline in timelines.items()}
    longest = max((len(json.dumps(timeline, separators=(",", ":"))) for timeline in coarse.values()), default=1)
    points = min(_MOST_ROWS, TIMELINE_POINTS * max_bytes // longest)
    if points < TIMELINE_POINTS:
        group_size = -(-TIMELINE_POINTS // max(points, 1))
        return {
            name: _encode(timeline.thinned(group_size), group_size * events_per_row, timeline)
            for name, timeline in timelines.items()
        }
    if view.directory is None or profile.status == "running" or min(points, events) <= TIMELINE_POINTS:
        return coarse
    try:
        fine = view.timelines(points)
    except MemprofError:  # profile.json alone was kept
        return coarse
    return {name: _encode(fine[name], -(-events // points)) if name in fine else coarse[name] for name in coarse}


def _encode(timeline: Timeline, events_per_row: int, whole: Timeline | None = None) -> dict[str, Any]:
    """Returns a timeline with each column as differences from row to row, which are mostly 0.

    A row shows the event with the most live bytes of each `events_per_row` events. Such an event is hardly ever in a
    phase that takes little memory, such as noise: where phases begin is taken from `whole`, which has more rows.
    """
    whole = timeline if whole is None else whole
    phases = list(dict.fromkeys(whole.phase))
    begins = [row for row, phase in enumerate(whole.phase) if not row or phase != whole.phase[row - 1]]
    begins = _longest_runs(begins, len(whole.phase), 2 * len(timeline.phase))
    return {
        **{key: _differences(timeline[key]) for key in ("event", "time_ns", "step", "logical_step")},
        "events_a_row": events_per_row,
        "phases": phases,
        "phase": _differences([phases.index(phase) for phase in timeline.phase]),
        "phase_runs": {
            **{key: _differences([whole[key][row] for row in begins]) for key in ("event", "time_ns")},
            "phase": [phases.index(whole.phase[row]) for row in begins],
        },
        "categories": [[name, _differences(sizes)] for name, sizes in timeline.categories.items()],
    }


def _longest_runs(begins: Sequence[int], end: int, most: int) -> list[int]:
    """Returns at most `most` of the rows at which runs begin: of each group of neighbours, the longest run's."""
    lengths = dict(zip(begins, (after - before for before, after in pairwise([*begins, end])), strict=True))
    size = -(-len(begins) // max(most, 1)) or 1
    return [max(begins[first : first + size], key=lengths.__getitem__) for first in range(0, len(begins), size)]


def _differences(values: Sequence[int]) -> list[int]:
    return [after - before for before, after in pairwise([0, *values])]


def _named_categories(runs: Sequence[Mapping[str, Any]]) -> set[str]:
    """Returns the categories that a page names: the built-in ones, and the program's own."""
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
