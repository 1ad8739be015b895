# SPDX-License-Identifier: Apache-2.0
"""Builds the result of one run, whose keys docs/experiments.md describes. Sizes in MB are of 2**20 bytes."""

import platform
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from msgspec import UNSET
from msgspec.structs import replace

from opacus_memprof.analysis.events import ALLOC, FREE, SEED, Events, Rows
from opacus_memprof.analysis.profile import load_profile
from opacus_memprof.errors import MemprofError
from opacus_memprof.experiments.configuration import Configuration
from opacus_memprof.experiments.files import PROGRESS
from opacus_memprof.language import encodable, tr, tr_sentence
from opacus_memprof.profiles.directory import OOM_REPORTS
from opacus_memprof.profiles.experiment_result import (
    AllocatorPeak,
    BestSuggestion,
    DataSource,
    ExperimentResult,
    PhaseEdges,
    RunConfiguration,
    RunEnvironment,
    RunProgress,
    RunTimeline,
    StageSnapshot,
)
from opacus_memprof.profiles.files import read_object
from opacus_memprof.profiles.profile import PROOF, PROOF_OP, Device, DeviceSnapshot, Profile, Timeline
from opacus_memprof.profiles.units import format_count, megabytes
from opacus_memprof.session import outcome
from opacus_memprof.versions import VERSION, installed_version

MB = 2**20
# Suggestions, by kind and value of the action, as options of `experiment`, `experiments` and `sweep`.
_OPTIONS = {
    ("grad_sample_mode", "flash_clip"): "--mode flash_clip",
    ("grad_sample_mode", "ghost"): "--mode ghost",
    ("grad_sample_mode", "hooks"): "--mode hooks",
    ("dtype", "bfloat16"): "--dtype bf16",
    ("dtype", "float16"): "--dtype fp16",
    ("checkpoint", None): "--checkpointing",
}
_TIMELINE_ROWS = 500
_MOST_EDGES = 5000  # changes of phase in a result; later ones are left out


@dataclass
class ProgressLog:
    """The progress of a run, which is printed as it happens, and kept for its result."""

    stage: str = "starting"
    steps_completed: int = 0  # of the optimizer, including warm-up
    step_seconds: list[float] = field(default_factory=list)  # of the measured steps
    data: DataSource | None = None
    parameters: dict[str, int] | None = None

    def begin(self, stage: str) -> None:
        """Begins a stage, such as "loading the model"."""
        self.stage = stage
        self._say(tr(stage))

    def detail(self, message: str) -> None:
        """Prints a detail of the current stage."""
        self._say(f"  {message}")

    def step_ended(self, seconds: float, configuration: Configuration) -> None:
        """Counts a step of the optimizer, and keeps its time unless it is a step of the warm-up."""
        self.steps_completed += 1
        if self.steps_completed > configuration.warmup_steps:
            self.step_seconds.append(seconds)
        total = configuration.warmup_steps + configuration.num_steps
        time = tr(", the last in {time:.1f} ms", time=seconds * 1000) if configuration.virtual_gpu is None else ""
        steps = tr_sentence(format_count(total, "step"))
        self._say(tr("{ended} of {steps}", ended=self.steps_completed, steps=steps) + time)

    @staticmethod
    def _say(line: str) -> None:
        print(encodable(f"{PROGRESS}{line}", sys.stdout.encoding), flush=True)


def build_result(
    configuration: Configuration,
    progress: ProgressLog,
    profile: Profile | None,
    profile_directory: Path,
    error: BaseException | None,
    own_directory: Path,
) -> ExperimentResult:
    """Returns the result of a run.

    Args:
        configuration: the configuration of the run.
        progress: the progress of the run.
        profile: the profile of this process; None without one.
        profile_directory: the profile directory of the run, which contains one directory per rank if there are several.
        error: the error that ended the run, or None.
        own_directory: the directory of this process' profile.
    """
    report = own_directory.absolute() / OOM_REPORTS[0]
    allocator_peak = _allocator_peak()
    times = [] if configuration.virtual_gpu else [1000 * seconds for seconds in progress.step_seconds]
    return ExperimentResult(
        experiment=configuration.mode,
        config=msgspec.convert(configuration.to_json(), RunConfiguration),
        status=outcome(error)[0],
        error=_error_message(error, progress) if error else None,
        refused=isinstance(error, MemprofError),
        progress=RunProgress(
            stage=progress.stage,
            steps_completed=progress.steps_completed,
            steps=configuration.warmup_steps + configuration.num_steps,
        ),
        environment=_environment(configuration),
        data=progress.data,
        parameters=progress.parameters,
        avg_time_ms=sum(times) / len(times) if times else None,
        step_times_ms=times,
        **_memory(profile, allocator_peak, own_directory),
        oom_suggestion=best_suggestion(own_directory),
        allocator_peak=allocator_peak,
        oom_report=str(report.relative_to(profile_directory.absolute().parent)) if report.exists() else None,
        profile=profile_directory.name,
        virtual=profile.virtual if profile else UNSET,
    )


def result_from_events(
    configuration: Configuration, profile_directory: Path, exit_code: int, last_line: str
) -> ExperimentResult:
    """Returns the result of a process that has left none, from the events that it has written.

    For several processes, these are the events of the first.

    Args:
        configuration: the configuration of the run.
        profile_directory: the profile directory of the run.
        exit_code: subprocess' exit code: negative for the signal that killed it.
        last_line: the last line of its output.
    """
    how = f"was killed by signal {-exit_code}" if exit_code < 0 else f"ended with exit code {exit_code}"
    own = profile_directory / "rank_0" if configuration.nproc > 1 else profile_directory
    try:
        with megabytes():
            profile = load_profile(own)
    except MemprofError:
        profile = None
    result = build_result(configuration, ProgressLog(stage=last_line), profile, profile_directory, None, own)
    result.status = "killed" if exit_code < 0 else "failed"
    result.error = f'the process {how}; the last that it said was "{last_line}"'
    device = _main_device(profile)
    result.progress.steps_completed = max((step.logical_step for step in device.steps), default=0) if device else 0
    result.environment.device_name = result.environment.device_bytes = None  # those of the other process are unknown
    result.allocator_peak = None
    return result


def _memory(profile: Profile | None, allocator_peak: AllocatorPeak | None, directory: Path) -> dict[str, Any]:
    """Returns the fields of a result that come from its profile."""
    device = _main_device(profile)
    if profile is None or device is None:
        empty: dict[str, Any] = dict.fromkeys(("peak_memory_mb", "breakdown", "peak"))
        empty |= {key: [] for key in ("snapshots", "out_of_memory", "findings")}
        return {**empty, "phases": {}, "timeline": RunTimeline()}
    peak = device.peak
    allocated = peak.requested_bytes if peak.allocated_bytes is None else peak.allocated_bytes
    name = next(name for name, entry in profile.devices.items() if entry is device)
    return {
        "device": name,
        "started_unix_ns": profile.started_unix_ns,
        "peak_memory_mb": allocated / MB,
        "breakdown": {
            **{f"{category}_mb": size / MB for category, size in peak.categories.items()},
            "rounding_mb": (allocated - peak.requested_bytes) / MB,
            "total_allocated_mb": allocated / MB,
            "peak_allocated_mb": (allocator_peak.max_allocated_bytes if allocator_peak else allocated) / MB,
        },
        "snapshots": _stage_snapshots(device.snapshots, name, directory),
        "peak": peak,
        "phases": device.phases,
        "steps": device.steps,
        "out_of_memory": device.out_of_memory,
        "timeline": _short_timeline(device.timeline),
        "phase_edges": find_phase_edges(directory),
        "findings": profile.findings,
        "warnings": profile.warnings,
    }


def _main_device(profile: Profile | None) -> Device | None:
    """Returns the first GPU of a profile; without one, the CPU."""
    devices = profile.devices if profile else {}
    return next((devices[name] for name in sorted(devices, key=lambda name: (name == "cpu", name))), None)


def _stage_snapshots(snapshots: Sequence[DeviceSnapshot], device: str, directory: Path) -> list[StageSnapshot]:
    """Returns the snapshots with the highest bytes since the previous snapshot; None if events are missing."""
    events = [snapshot.event for snapshot in snapshots if snapshot.event is not None]
    sizes = [snapshot.requested_bytes for snapshot in snapshots]
    peaks: list[int | None] = [None] * len(snapshots)
    if len(events) == len(snapshots):  # otherwise the event file was full
        try:
            highest = peaks_between(directory, device, events)
            peaks = [max(bytes) for bytes in zip(highest, [0, *sizes], sizes, strict=False)]
        except MemprofError:
            pass
    return [
        StageSnapshot(
            **snapshot,
            allocated_mb=_in_mb(snapshot.get("allocated_bytes")),
            reserved_mb=_in_mb(snapshot.get("reserved_bytes")),
            timestamp=snapshot.unix_ns / 1e9,
            peak_bytes=peak,
        )
        for snapshot, peak in zip(snapshots, peaks, strict=True)
    ]


def _in_mb(size: int | None) -> float | None:
    return None if size is None else size / MB


def _short_timeline(timeline: Timeline) -> RunTimeline:
    """Returns the timeline with about _TIMELINE_ROWS rows, without categories that never have a byte."""
    used = {name: sizes for name, sizes in timeline.categories.items() if any(sizes)}
    rows = max(1, -(-len(timeline.bytes) // _TIMELINE_ROWS))
    return RunTimeline(**replace(timeline, categories=used).thinned(rows))


def _error_message(error: BaseException, progress: ProgressLog) -> str:
    if isinstance(error, MemprofError):
        return str(error)
    first = str(error).strip().splitlines()[0] if str(error).strip() else "no message"
    return f"{type(error).__name__} while {progress.stage}: {first}"


def _environment(configuration: Configuration) -> RunEnvironment:
    cuda = torch.cuda.is_available() and torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return RunEnvironment(
        device_name=_device_name(configuration) if cuda else f"CPU ({platform.machine()})",
        device_bytes=torch.cuda.get_device_properties(0).total_memory if cuda else None,
        torch=str(torch.__version__),
        cuda=torch.version.cuda if cuda else None,
        **{name: installed_version(name) for name in ("opacus", "transformers", "peft")},
        opacus_memprof=VERSION,
        python=platform.python_version(),
        float32_matmul_precision=torch.get_float32_matmul_precision(),
    )


def _device_name(configuration: Configuration) -> str:
    return f"{'virtual ' if configuration.virtual_gpu else ''}{torch.cuda.get_device_name()}"


def _allocator_peak() -> AllocatorPeak | None:
    """Returns the peaks that torch's allocator itself has counted; None on the CPU."""
    if not torch.cuda.is_available() or not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return None
    return AllocatorPeak(
        max_allocated_bytes=torch.cuda.max_memory_allocated(), max_reserved_bytes=torch.cuda.max_memory_reserved()
    )


def peaks_between(directory: Path, device: str, ends: Sequence[int]) -> list[int]:
    """Returns the highest live bytes of a device in each interval of events.

    The intervals are (start, ends[0]], (ends[0], ends[1]] and so on. An interval without events of the device has 0.

    Args:
        directory: the directory of the profile.
        device: the device, such as "cuda:0".
        ends: numbers of events, ascending.

    Raises:
        MemprofError: the events cannot be read.
    """
    id = 0 if device == "cpu" else 1 + int(device.partition(":")[2])
    highest, live = [0] * len(ends), 0

    def update(rows: Rows) -> None:
        nonlocal live
        of_device = rows[(rows["device"] == id) & (rows["block"] >= 0)]
        sign = np.select([np.isin(of_device["kind"], (ALLOC, SEED)), of_device["kind"] == FREE], [1, -1])
        levels = live + np.cumsum(sign * of_device["bytes"].astype(np.int64))
        intervals = np.searchsorted(ends, of_device["event"])
        for interval in np.unique(intervals[intervals < len(ends)]).tolist():
            highest[interval] = max(highest[interval], int(levels[intervals == interval].max()))
        live = int(levels[-1]) if len(levels) else live

    Events(directory).for_each_chunk(update)
    return highest


def find_phase_edges(directory: Path) -> PhaseEdges:
    """Returns where the program's phase changes; nothing if the events cannot be read."""
    edges: list[tuple[int, int, int, str]] = []

    def update(rows: Rows) -> None:
        ids = [id for id in np.unique(rows["op"]).tolist() if events.names.op(id) == PROOF_OP]
        proves = np.isin(rows["op"], ids)
        changes = np.diff((rows["step"].astype(np.int64) * 256 + rows["phase"]) * 2 + proves, prepend=-1)
        for row, is_proof in zip(rows[changes != 0], proves[changes != 0], strict=True):
            phase = events.names.phase(int(row["phase"]))
            phase = PROOF if is_proof and phase == "forward" else phase
            edge = (int(row["event"]), int(row["time_ns"]), int(row["step"]), phase)
            if len(edges) > 1 and edges[-1][3] == "idle" and edges[-2][2:] == edge[2:]:
                del edges[-1]  # worker threads, which allocate for a backward, are in no phase
            elif not edges or edges[-1][2:] != edge[2:]:
                edges.append(edge)

    try:
        events = Events(directory)
        events.for_each_chunk(update)
    except MemprofError:
        return PhaseEdges()
    columns = zip(*edges[:_MOST_EDGES], strict=True)
    return PhaseEdges(**dict(zip(PhaseEdges.__struct_fields__, map(list, columns), strict=False)))


def best_suggestion(directory: Path) -> BestSuggestion | None:
    """Returns the first suggestion of the latest failure's report, which fits if any does; None if there is none."""
    try:
        suggestions = read_object(directory / OOM_REPORTS[1])["suggestions"]
    except MemprofError:
        return None
    if not suggestions:
        return None
    best = {key: suggestions[0][key] for key in BestSuggestion.__struct_fields__}
    options = [_OPTIONS.get((each["kind"], each.get("value"))) for each in suggestions[0].get("actions", ())]
    if options and all(options):
        best["code"] = " ".join(map(str, options))
    return BestSuggestion(**best)
