# SPDX-License-Identifier: Apache-2.0
"""The result of one run, as JSON has it: docs/experiments.md describes its keys. Sizes in MB are of 2**20 bytes."""

import platform
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import opacus_memprof
from opacus_memprof.analysis.device import thinned
from opacus_memprof.analysis.profile import load_profile
from opacus_memprof.errors import MemprofError
from opacus_memprof.experiments.configuration import Configuration
from opacus_memprof.experiments.process import PROGRESS
from opacus_memprof.session import outcome
from opacus_memprof.versions import installed

FORMAT = 1
MB = 2**20
_TIMELINE_ROWS = 500


@dataclass
class Course:
    """How far a run has got. It prints what begins and ends, for the one who waits."""

    stage: str = "starting"
    steps_completed: int = 0  # of the optimizer, warm-up included
    step_seconds: list[float] = field(default_factory=list)  # of the measured steps
    data: dict[str, str] | None = None
    parameters: dict[str, int] | None = None

    def begin(self, stage: str) -> None:
        self.stage = stage
        print(f"{PROGRESS}{stage}", flush=True)

    def detail(self, said: str) -> None:
        """Of what was begun."""
        print(f"{PROGRESS}  {said}", flush=True)

    def step_ended(self, seconds: float, configuration: Configuration) -> None:
        self.steps_completed += 1
        if self.steps_completed > configuration.warmup_steps:
            self.step_seconds.append(seconds)
        total = configuration.warmup_steps + configuration.num_steps
        print(f"{PROGRESS}step {self.steps_completed} of {total}: {seconds * 1000:.1f} ms", flush=True)


def result_of(
    configuration: Configuration,
    course: Course,
    profile: Mapping[str, Any] | None,
    profile_directory: Path,
    error: BaseException | None,
) -> dict[str, Any]:
    """From what a run has left in this process."""
    allocator_peak = _allocator_peak()
    times = [1000 * seconds for seconds in course.step_seconds]
    status = outcome(error)[0]
    return {
        "format": FORMAT,
        "experiment": configuration.mode,
        "config": configuration.to_json(),
        "status": status,
        "error": _sentence(error, course) if error else None,
        "refused": isinstance(error, MemprofError),
        "progress": {
            "stage": course.stage,
            "steps_completed": course.steps_completed,
            "steps": configuration.warmup_steps + configuration.num_steps,
        },
        "environment": _environment(),
        "data": course.data,
        "parameters": course.parameters,
        "tax": None,
        "avg_time_ms": sum(times) / len(times) if times else None,
        "step_times_ms": times,
        **_memory(profile, allocator_peak),
        "allocator_peak": allocator_peak,
        "profile": profile_directory.name,
    }


def without_result(configuration: Configuration, profile_directory: Path, exit_code: int, last: str) -> dict[str, Any]:
    """Of a process that ended without a result, from the events that it has written until then; of several the first
    one's.

    Args:
        exit_code: as subprocess has it: the negative number of the signal that killed it.
        last: the last line that it printed.
    """
    how = f"was killed by signal {-exit_code}" if exit_code < 0 else f"ended with exit code {exit_code}"
    try:
        profile = load_profile(profile_directory / "rank_0" if configuration.nproc > 1 else profile_directory)
    except MemprofError:
        profile = None
    result = result_of(configuration, Course(stage=last), profile, profile_directory, None)
    status = "killed" if exit_code < 0 else "failed"
    steps = max((step["logical_step"] for step in _device(profile).get("steps", ())), default=0)
    result["progress"]["steps_completed"] = steps
    result["environment"] |= {"device_name": None, "device_bytes": None}  # this process has not looked
    result["allocator_peak"] = None
    return {**result, "status": status, "error": f'the process {how}; the last that it said was "{last}"'}


def _memory(profile: Mapping[str, Any] | None, allocator_peak: Mapping[str, int] | None) -> dict[str, Any]:
    """What the profile says, in the result's words."""
    device = _device(profile)
    if profile is None or not device:
        nothing = dict.fromkeys(("device", "started_unix_ns", "peak_memory_mb", "breakdown", "peak"))
        lists: dict[str, Any] = {"snapshots": [], "steps": [], "out_of_memory": [], "findings": [], "warnings": []}
        return {**nothing, **lists, "phases": {}, "timeline": {}}
    peak = device["peak"]
    allocated = peak["requested_bytes"] if peak["allocated_bytes"] is None else peak["allocated_bytes"]
    name = next(name for name, found in profile["devices"].items() if found is device)
    return {
        "device": name,
        "started_unix_ns": profile["started_unix_ns"],
        "peak_memory_mb": allocated / MB,
        "breakdown": {
            **{f"{category}_mb": size / MB for category, size in peak["categories"].items()},
            "total_allocated_mb": allocated / MB,
            "peak_allocated_mb": (allocator_peak["max_allocated_bytes"] if allocator_peak else allocated) / MB,
        },
        "snapshots": [_snapshot(entry) for entry in device["snapshots"]],
        "peak": peak,
        "phases": device["phases"],
        "steps": device["steps"],
        "out_of_memory": device["out_of_memory"],
        "timeline": _thin(device["timeline"]),
        "findings": profile["findings"],
        "warnings": profile["warnings"],
    }


def _device(profile: Mapping[str, Any] | None) -> dict[str, Any]:
    """The GPU's part of a profile where there is one, else the CPU's."""
    devices: dict[str, dict[str, Any]] = dict(profile["devices"]) if profile else {}
    return next((devices[name] for name in sorted(devices, key=lambda name: (name == "cpu", name))), {})


def _snapshot(entry: Mapping[str, Any]) -> dict[str, Any]:
    allocated, reserved = entry.get("allocated_bytes"), entry.get("reserved_bytes")
    return {
        "name": entry["name"],
        "allocated_mb": None if allocated is None else allocated / MB,
        "reserved_mb": None if reserved is None else reserved / MB,
        "timestamp": entry["unix_ns"] / 1e9,
        **{key: value for key, value in entry.items() if key != "name"},
    }


def _thin(timeline: Mapping[str, Any]) -> dict[str, Any]:
    """With at most _TIMELINE_ROWS. Categories that never have a byte are left out."""
    used = {name: sizes for name, sizes in timeline["categories"].items() if any(sizes)}
    return thinned({**timeline, "categories": used}, max(1, -(-len(timeline["bytes"]) // _TIMELINE_ROWS)))


def _sentence(error: BaseException, course: Course) -> str:
    if isinstance(error, MemprofError):
        return str(error)
    first = str(error).strip().splitlines()[0] if str(error).strip() else "no message"
    return f"{type(error).__name__} while {course.stage}: {first}"


def _environment() -> dict[str, Any]:
    cuda = torch.cuda.is_available() and torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return {
        "device_name": torch.cuda.get_device_name() if cuda else f"CPU ({platform.machine()})",
        "device_bytes": torch.cuda.get_device_properties(0).total_memory if cuda else None,
        "torch": str(torch.__version__),
        "cuda": torch.version.cuda if cuda else None,
        **{name: installed(name) for name in ("opacus", "transformers", "peft")},
        "opacus_memprof": opacus_memprof.__version__,
        "python": platform.python_version(),
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
    }


def _allocator_peak() -> dict[str, int] | None:
    """What torch's allocator itself has counted; None on the CPU."""
    if not torch.cuda.is_available() or not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return None
    return {
        "max_allocated_bytes": torch.cuda.max_memory_allocated(),
        "max_reserved_bytes": torch.cuda.max_memory_reserved(),
    }
