# SPDX-License-Identifier: Apache-2.0
"""The result of one run, as JSON has it: docs/experiments.md describes its keys. Sizes in MB are of 2**20 bytes."""

import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from msgspec import UNSET, to_builtins
from msgspec.structs import replace

from opacus_memprof.analysis.device import thin_timeline
from opacus_memprof.analysis.profile import load_profile
from opacus_memprof.errors import MemprofError
from opacus_memprof.experiments.configuration import Configuration
from opacus_memprof.experiments.files import PROGRESS
from opacus_memprof.experiments.recorded import best_suggestion, highest_until
from opacus_memprof.profiles.directory import OOM_REPORTS
from opacus_memprof.profiles.json_object import FORMAT
from opacus_memprof.profiles.profile import Device, DeviceSnapshot, Profile, Timeline
from opacus_memprof.profiles.versions import VERSION, installed_version
from opacus_memprof.session import outcome

MB = 2**20
_TIMELINE_ROWS = 500


@dataclass
class RunProgress:
    """How far a run has got: printed as it goes, and kept for its result."""

    stage: str = "starting"
    steps_completed: int = 0  # of the optimizer, warm-up included
    step_seconds: list[float] = field(default_factory=list)  # of the measured steps
    data: dict[str, str] | None = None
    parameters: dict[str, int] | None = None

    def begin(self, stage: str) -> None:
        """Begins a stage, such as "loading the model"."""
        self.stage = stage
        print(f"{PROGRESS}{stage}", flush=True)

    def detail(self, message: str) -> None:
        """Prints something about the stage that has begun."""
        print(f"{PROGRESS}  {message}", flush=True)

    def step_ended(self, seconds: float, configuration: Configuration) -> None:
        """Counts a step of the optimizer, whose time is kept where it is not one of the warm-up's."""
        self.steps_completed += 1
        if self.steps_completed > configuration.warmup_steps:
            self.step_seconds.append(seconds)
        total = configuration.warmup_steps + configuration.num_steps
        print(f"{PROGRESS}{self.steps_completed} of {total} steps, the last in {seconds * 1000:.1f} ms", flush=True)


def result_of(
    configuration: Configuration,
    progress: RunProgress,
    profile: Profile | None,
    profile_directory: Path,
    error: BaseException | None,
    own_directory: Path,
) -> dict[str, Any]:
    """From what a run has left in this process, whose own part of the profile is in `own_directory`."""
    report = own_directory.absolute() / OOM_REPORTS[0]
    allocator_peak = _allocator_peak()
    times = [] if configuration.virtual_gpu else [1000 * seconds for seconds in progress.step_seconds]
    status = outcome(error)[0]
    return {
        "format": FORMAT,
        "experiment": configuration.mode,
        "config": configuration.to_json(),
        "status": status,
        "error": _sentence(error, progress) if error else None,
        "refused": isinstance(error, MemprofError),
        "progress": {
            "stage": progress.stage,
            "steps_completed": progress.steps_completed,
            "steps": configuration.warmup_steps + configuration.num_steps,
        },
        "environment": _environment(configuration),
        "data": progress.data,
        "parameters": progress.parameters,
        "tax": None,
        "avg_time_ms": sum(times) / len(times) if times else None,
        "step_times_ms": times,
        **_memory(profile, allocator_peak, own_directory),
        "oom_suggestion": best_suggestion(own_directory),
        "allocator_peak": allocator_peak,
        "oom_report": str(report.relative_to(profile_directory.absolute().parent)) if report.exists() else None,
        "profile": profile_directory.name,
        **({"virtual": to_builtins(profile.virtual)} if profile and profile.virtual is not UNSET else {}),
    }


def without_result(configuration: Configuration, profile_directory: Path, exit_code: int, last: str) -> dict[str, Any]:
    """Of a process that ended without a result, from the events that it has written until then; of several the first
    one's.

    Args:
        exit_code: as subprocess has it: the negative number of the signal that killed it.
        last: the last line that it printed.
    """
    how = f"was killed by signal {-exit_code}" if exit_code < 0 else f"ended with exit code {exit_code}"
    own = profile_directory / "rank_0" if configuration.nproc > 1 else profile_directory
    try:
        profile = load_profile(own)
    except MemprofError:
        profile = None
    result = result_of(configuration, RunProgress(stage=last), profile, profile_directory, None, own)
    status = "killed" if exit_code < 0 else "failed"
    device = _device(profile)
    steps = max((step.logical_step for step in device.steps), default=0) if device else 0
    result["progress"]["steps_completed"] = steps
    result["environment"] |= {"device_name": None, "device_bytes": None}  # this process has not looked
    result["allocator_peak"] = None
    return {**result, "status": status, "error": f'the process {how}; the last that it said was "{last}"'}


def _memory(profile: Profile | None, allocator_peak: Mapping[str, int] | None, directory: Path) -> dict[str, Any]:
    """What the profile says, in the result's words."""
    device = _device(profile)
    if profile is None or device is None:
        nothing = dict.fromkeys(("device", "started_unix_ns", "peak_memory_mb", "breakdown", "peak"))
        lists: dict[str, Any] = {"snapshots": [], "steps": [], "out_of_memory": [], "findings": [], "warnings": []}
        return {**nothing, **lists, "phases": {}, "timeline": {}}
    peak = device.peak
    allocated = peak.requested_bytes if peak.allocated_bytes is None else peak.allocated_bytes
    name = next(name for name, found in profile.devices.items() if found is device)
    return {
        "device": name,
        "started_unix_ns": profile.started_unix_ns,
        "peak_memory_mb": allocated / MB,
        "breakdown": {
            **{f"{category}_mb": size / MB for category, size in peak.categories.items()},
            "total_allocated_mb": allocated / MB,
            "peak_allocated_mb": (allocator_peak["max_allocated_bytes"] if allocator_peak else allocated) / MB,
        },
        "snapshots": _snapshots(device.snapshots, name, directory),
        "peak": to_builtins(peak),
        "phases": to_builtins(device.phases),
        "steps": to_builtins(device.steps),
        "out_of_memory": to_builtins(device.out_of_memory),
        "timeline": to_builtins(_thin(device.timeline)),
        "findings": to_builtins(profile.findings),
        "warnings": profile.warnings,
    }


def _device(profile: Profile | None) -> Device | None:
    """The GPU's part of a profile where there is one, else the CPU's."""
    devices = profile.devices if profile else {}
    return next((devices[name] for name in sorted(devices, key=lambda name: (name == "cpu", name))), None)


def _snapshots(entries: Sequence[DeviceSnapshot], device: str, directory: Path) -> list[dict[str, Any]]:
    """With the highest bytes since the snapshot before, `peak_bytes`; None where events are missing."""
    found = [_snapshot(entry) for entry in entries]
    events = [entry.event for entry in entries if entry.event is not None]
    if len(events) < len(entries):  # the event file was full
        return [{**entry, "peak_bytes": None} for entry in found]
    sizes = [entry.requested_bytes for entry in entries]
    try:
        highest = highest_until(directory, device, events)
    except MemprofError:
        return [{**entry, "peak_bytes": None} for entry in found]
    return [
        {**entry, "peak_bytes": max(between, before, after)}
        for entry, between, before, after in zip(found, highest, [0, *sizes], sizes, strict=False)
    ]


def _snapshot(entry: DeviceSnapshot) -> dict[str, Any]:
    allocated, reserved = entry.get("allocated_bytes"), entry.get("reserved_bytes")
    return {
        "name": entry["name"],
        "allocated_mb": None if allocated is None else allocated / MB,
        "reserved_mb": None if reserved is None else reserved / MB,
        "timestamp": entry["unix_ns"] / 1e9,
        **{key: value for key, value in entry.items() if key != "name"},
    }


def _thin(timeline: Timeline) -> Timeline:
    """With at most _TIMELINE_ROWS. Categories that never have a byte are left out."""
    used = {name: sizes for name, sizes in timeline.categories.items() if any(sizes)}
    return thin_timeline(replace(timeline, categories=used), max(1, -(-len(timeline.bytes) // _TIMELINE_ROWS)))


def _sentence(error: BaseException, progress: RunProgress) -> str:
    if isinstance(error, MemprofError):
        return str(error)
    first = str(error).strip().splitlines()[0] if str(error).strip() else "no message"
    return f"{type(error).__name__} while {progress.stage}: {first}"


def _environment(configuration: Configuration) -> dict[str, Any]:
    cuda = torch.cuda.is_available() and torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return {
        "device_name": _device_name(configuration) if cuda else f"CPU ({platform.machine()})",
        "device_bytes": torch.cuda.get_device_properties(0).total_memory if cuda else None,
        "torch": str(torch.__version__),
        "cuda": torch.version.cuda if cuda else None,
        **{name: installed_version(name) for name in ("opacus", "transformers", "peft")},
        "opacus_memprof": VERSION,
        "python": platform.python_version(),
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
    }


def _device_name(configuration: Configuration) -> str:
    return f"{'virtual ' if configuration.virtual_gpu else ''}{torch.cuda.get_device_name()}"


def _allocator_peak() -> dict[str, int] | None:
    """What torch's allocator itself has counted; None on the CPU."""
    if not torch.cuda.is_available() or not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return None
    return {
        "max_allocated_bytes": torch.cuda.max_memory_allocated(),
        "max_reserved_bytes": torch.cuda.max_memory_reserved(),
    }
