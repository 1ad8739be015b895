# SPDX-License-Identifier: Apache-2.0
"""Builds, reads and writes profile.json, the summary that every report reads. docs/format.md documents its fields."""

import contextlib
import fcntl
import json
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from opacus_memprof.analysis.components import Components
from opacus_memprof.analysis.defects import find
from opacus_memprof.analysis.device import (
    Replayed,
    build_device,
    build_device_from_counters,
    build_timeline,
    set_proofs_apart,
)
from opacus_memprof.analysis.events import Events, Names, find_proofs
from opacus_memprof.analysis.findings import Run
from opacus_memprof.analysis.oom.advice import find_improvements
from opacus_memprof.errors import MemprofError
from opacus_memprof.profiles import core
from opacus_memprof.profiles.directory import EVENTS, LOCK, META, OOM_REPORTS, PROFILE, SNAPSHOTS
from opacus_memprof.profiles.files import read_regular, write_text
from opacus_memprof.profiles.json_object import read_json_object, to_json
from opacus_memprof.profiles.layer_shapes import Program, TrainingShapes
from opacus_memprof.profiles.live_memory import LivePeak, Snapshot
from opacus_memprof.profiles.oom_report import OomReport
from opacus_memprof.profiles.profile import (
    EventCounts,
    EventGap,
    Finding,
    Meta,
    Profile,
    Timeline,
    VirtualGpus,
    read_meta,
)

TIMELINE_POINTS = 2000  # maximum number of rows of a timeline in profile.json


def build_profile(
    directory: str | os.PathLike[str],
    *,
    status: str,
    exit_code: int | None,
    error: str | None = None,
    peaks: Mapping[str, LivePeak] | None = None,
    warnings: Iterable[str] = (),
    observations: Sequence[Mapping[str, Any]] = (),
    components: Mapping[str, str] | None = None,
    virtual: VirtualGpus | None = None,
    timeline_points: int = TIMELINE_POINTS,
    dropped: int = 0,
    shapes: TrainingShapes | None = None,
) -> Profile:
    """Builds the content of profile.json from events.bin, meta.json and snapshots.jsonl.

    Args:
        directory: the profile directory; the process may still be writing events.
        status: "finished", "failed", "out_of_memory" or "killed".
        exit_code: exit code of the program; None if it is unknown.
        error: a line with the reason why the program ended; None if nothing went wrong or it is unknown.
        peaks: the live counters' peaks (recording.live.read_peaks()), with the allocator's own counts at the peak, and
            with peaks that a full event file has dropped.
        warnings: sentences about the limits of this profile.
        observations: observations of hooks (recording.observations.recorded()), for the findings.
        components: the user's own rules, regular expression → component; see analysis.components.
        virtual: for a run on virtual GPUs, their description and limits (virtual_gpu.describe_run()); by default the
            data of meta.json, which was written at the start.
        timeline_points: maximum number of rows of a device's timeline.
        dropped: events lost so far; while a process is writing, the file's header lags behind.
        shapes: what was trained, for the predictions of other settings. Only the recording process knows it.

    Raises:
        MemprofError: a rule is not a regular expression, or events.bin or meta.json is missing, truncated, foreign or
            of another version.
    """
    path = Path(directory)
    replayed = _replay(path, timeline_points)
    meta = read_meta(path / META)
    header, gaps = replayed["header"], [EventGap(**gap) for gap in replayed["gaps"]]
    missing = max(sum(gap.events for gap in gaps), dropped)
    names = Names(meta.names, replayed)
    snapshots = _read_snapshots(path / SNAPSHOTS)
    messages = [*warnings, *_file_warnings(replayed, meta)]
    component_of = Components(components, names.components)
    devices, proofs = {}, find_proofs(Events(path))
    by_name = {names.device(device["id"]): device for device in replayed["devices"]}
    for name, device in by_name.items():
        live = None if peaks is None else peaks.get(name)
        devices[name], device_warnings = build_device(
            name, device, header, names, component_of, live, meta.reserved_peaks.get(name), snapshots, missing
        )
        messages += device_warnings
        set_proofs_apart(devices[name], proofs, header["start_unix_ns"])
        if shapes is not None and status != "out_of_memory":
            devices[name].improvements = find_improvements(name, devices[name], device, names, shapes)
    for name, live in (peaks or {}).items() if missing else ():
        if name not in devices and live.requested_bytes:
            devices[name], device_warnings = build_device_from_counters(name, live, component_of, snapshots)
            messages += device_warnings
    return Profile(
        versions=meta.versions,
        virtual=meta.virtual if virtual is None else virtual,
        status=status,
        exit_code=exit_code,
        error=error,
        command=meta.command,
        launch=meta.launch,
        pid=header["pid"],
        started_unix_ns=header["start_unix_ns"],
        ended_unix_ns=header["last_unix_ns"],
        events=EventCounts(
            recorded=replayed["events"],
            dropped=missing,
            capacity=header["capacity"],
            closed=header["closed"],
            contradictions=replayed["contradictions"],
            gaps=gaps,
        ),
        devices=devices,
        components=dict(components or {}),
        findings=find(
            Run(
                devices,
                by_name,
                observations,
                names,
                failed=status == "failed",
                program=Program() if shapes is None else shapes.program,
            )
        ),
        warnings=list(dict.fromkeys(messages)),
    )


def find_again(
    directory: str | os.PathLike[str], profile: Profile, observations: Sequence[Mapping[str, Any]], program: Program
) -> list[Finding]:
    """Returns the findings of a profile that `build_profile` has built, with sentences in the current unit.

    Args:
        directory: the profile directory.
        profile: its profile.
        observations: see `build_profile`.
        program: the names that the program has for its model, optimizer and loader.

    Raises:
        MemprofError: events.bin or meta.json cannot be read.
    """
    replayed = _replay(Path(directory), 1)
    names = Names(read_meta(Path(directory) / META).names, replayed)
    by_name = {names.device(device["id"]): device for device in replayed["devices"]}
    return find(Run(profile.devices, by_name, observations, names, failed=profile.status == "failed", program=program))


def build_profile_from_counters(
    directory: str | os.PathLike[str],
    *,
    status: str,
    exit_code: int | None,
    error: str | None,
    started_unix_ns: int,
    peaks: Mapping[str, LivePeak],
    warnings: Iterable[str],
) -> Profile:
    """Builds a profile without readable events: the peaks of the live counters, and the snapshots.

    See `build_profile` for the arguments.

    Args:
        directory: see `build_profile`.
        status: see `build_profile`.
        exit_code: see `build_profile`.
        error: see `build_profile`.
        started_unix_ns: when recording began, in nanoseconds since 1970.
        peaks: see `build_profile`.
        warnings: see `build_profile`.
    """
    path = Path(directory)
    meta, snapshots, sentences = Meta(), dict[int, Snapshot](), list(warnings)
    try:
        meta = read_meta(path / META)
        snapshots = _read_snapshots(path / SNAPSHOTS)
    except (MemprofError, OSError) as trouble:
        sentences.append(f"{META} or {SNAPSHOTS} cannot be read ({trouble})")
    sentences.append(f"{EVENTS} cannot be read: the profile has only the peaks of the live counters, without modules")
    component_of = Components({}, {})
    return Profile(
        versions=meta.versions,
        virtual=meta.virtual,
        status=status,
        exit_code=exit_code,
        error=error,
        command=meta.command,
        launch=meta.launch,
        pid=os.getpid(),
        started_unix_ns=started_unix_ns,
        ended_unix_ns=max(time.time_ns(), started_unix_ns),
        events=EventCounts(recorded=0, dropped=0, capacity=0, closed=True, contradictions={}),
        devices={
            name: build_device_from_counters(name, peak, component_of, snapshots)[0]
            for name, peak in peaks.items()
            if peak.requested_bytes
        },
        findings=[],
        warnings=list(dict.fromkeys(sentences)),
    )


def refuse_no_directory(path: Path) -> None:
    """Raises MemprofError if `path` is not a directory."""
    if not path.is_dir():
        raise MemprofError(f"{path} is {'a file' if path.exists() else 'not there'}: give the directory of a profile")


def load_profile(directory: str | os.PathLike[str]) -> Profile:
    """Loads the profile of a directory.

    Without profile.json, the process was killed or is still running: the profile is then built from the events, with
    the status "killed" or "running". Likewise if profile.json is cut off. With the report of a failed allocation alone,
    the profile has no devices.

    Raises:
        MemprofError: the directory does not exist, or holds no profile of this version with all fields.
    """
    path = Path(directory)
    refuse_no_directory(path)
    summary = path / PROFILE
    if not summary.exists():
        if not (path / EVENTS).exists():
            if (path / OOM_REPORTS[1]).is_file():
                return _profile_of_failure(path)
            raise MemprofError(f"{path} holds no profile: there is neither {PROFILE} nor {EVENTS} in it")
        status = "running" if is_being_written(path) else "killed"
        return build_profile(path, status=status, exit_code=None)
    try:
        return read_json_object(summary, Profile)
    except MemprofError:
        if not summary.is_file() or not (path / EVENTS).exists() or _is_json(summary):  # a pipe cannot be read again
            raise
        profile = build_profile(path, status="killed", exit_code=None)
        profile.warnings.append(f"{PROFILE} is cut off: this is read from {EVENTS}, which has no predictions")
        return profile


def _profile_of_failure(directory: Path) -> Profile:
    """Returns the profile of a directory that has nothing but the report of a failed allocation."""
    report = read_json_object(directory / OOM_REPORTS[1], OomReport)
    return Profile(
        versions={},
        virtual=report.virtual,
        status="out_of_memory",
        exit_code=None,
        error=None,
        command=[],
        launch=None,
        pid=0,
        started_unix_ns=0,
        ended_unix_ns=0,
        events=EventCounts(recorded=0, dropped=0, capacity=0, closed=True, contradictions={}),
        devices={},
        findings=[],
        warnings=[
            f"{PROFILE} and {EVENTS} are missing: this is read from {OOM_REPORTS[1]}, which has only the failed "
            "allocation"
        ],
    )


def _is_json(path: Path) -> bool:
    """Returns whether a file is whole, as one of another version is."""
    try:
        json.loads(path.read_bytes())
    except ValueError:
        return False
    except RecursionError:  # nested too deeply, but not cut off
        return True
    return True


def read_timelines(directory: str | os.PathLike[str], points: int) -> dict[str, Timeline]:
    """Returns the timelines of a profile by device, with up to `points` rows instead of TIMELINE_POINTS.

    Each includes the peak.

    Raises:
        MemprofError: events.bin or meta.json is missing, truncated, foreign or of another version.
    """
    path = Path(directory)
    replayed = _replay(path, points)
    names = Names(read_meta(path / META).names, replayed)
    return {names.device(device["id"]): build_timeline(device["timeline"], names) for device in replayed["devices"]}


def write_profile(profile: Profile, directory: str | os.PathLike[str]) -> None:
    """Writes profile.json atomically. Raises MemprofError if it cannot be written."""
    try:
        write_text(Path(directory) / PROFILE, to_json(profile))
    except MemprofError as error:
        raise MemprofError(f"the profile could not be written: {error}") from error


def _replay(directory: Path, points: int) -> Replayed:
    try:
        return core.replay(str(directory), timeline_points=points)
    except RuntimeError as error:
        raise MemprofError(f"there is no readable profile in {directory}: {error}") from error


def _file_warnings(replayed: Replayed, meta: Meta) -> list[str]:
    messages = []
    header = replayed["header"]
    if gaps := [EventGap(**gap) for gap in replayed["gaps"]]:
        messages += _gap_warnings(header, gaps)
    if wrong := {kind: count for kind, count in replayed["contradictions"].items() if count}:
        listed = ", ".join(f"{count} {kind.replace('_', ' ')}" for kind, count in wrong.items())
        messages.append(f"{EVENTS} contradicts itself ({listed}): its figures are doubtful")
    if not meta.names.categories:
        messages.append(f"there is no {META}: modules, ops and categories of the program's own have no names")
    return messages


def _gap_warnings(header: Replayed, gaps: Sequence[EventGap]) -> list[str]:
    missing, count = sum(gap.events for gap in gaps), header["count"]
    listed = ", ".join(_describe_gap(gap) for gap in gaps)
    messages = [
        f"{missing} of {max(count, gaps[-1].first_event + gaps[-1].events)} events are not in the event files, which "
        f"hold at most {header['capacity']} records: {listed}. The peak and the end of the run are recorded; other "
        "highs in the gaps are unknown"
    ]
    if header["dropped"]:
        messages.append(
            f"{header['dropped']} events were lost on their way to the disk, because it was full or too slow"
        )
    at_end = gaps[-1].first_event + gaps[-1].events >= count
    if at_end and gaps[-1].events > header["dropped"]:
        messages.append(f"an event file is truncated or missing: the last {gaps[-1].events} events cannot be read")
    return messages


def _describe_gap(gap: EventGap) -> str:
    steps = f"in step {gap.step}" if gap.step == gap.end_step else f"from step {gap.step} to step {gap.end_step}"
    return f"{gap.events} after event {gap.first_event} ({steps})"


def _read_snapshots(path: Path) -> dict[int, Snapshot]:
    """Reads snapshots.jsonl by number, without the incomplete last line of a killed process."""
    if not path.exists():
        return {}
    snapshots = {}
    try:
        lines = read_regular(path).splitlines()
    except OSError as error:
        raise MemprofError(f"{path} cannot be read ({error.strerror}): remove it") from error
    for line in lines:
        with contextlib.suppress(ValueError, RecursionError):
            snapshot = msgspec.json.decode(line, type=Snapshot)
            snapshots[snapshot.index] = snapshot
    return snapshots


def is_being_written(directory: Path) -> bool:
    """Returns whether a profiler holds the directory's lock."""
    try:
        with open(os.open(directory / LOCK, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        pass
    return False
