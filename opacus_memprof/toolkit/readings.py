# SPDX-License-Identifier: Apache-2.0
"""Reads the bytes in use on each device now; all figures of the toolkit come from here.

| source | where | what `allocated` is |
|---|---|---|
| RECORDER | the recording allocator is installed (by a session, or `install`) | live tensors, with categories |
| MEMORY_STATS | CUDA without it | live tensors, as `torch.cuda.memory_stats` counts them |
| RESIDENT | the CPU without it | resident memory of the whole process, tensors or not |

Nothing here initialises CUDA.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import TypedDict

import torch

from opacus_memprof.profiles.live_memory import DeviceCount, LivePeak
from opacus_memprof.toolkit.output import MB

try:
    from opacus_memprof import session
    from opacus_memprof.recording import allocators, live
    from opacus_memprof.recording.live import read_peaks
    from opacus_memprof.recording.native import HAS_CUDA, cpu_reported_bytes
except ImportError:  # the extension is missing or broken: nothing can be installed, but the rest still works
    _HAS_EXTENSION = False
else:
    _HAS_EXTENSION = True

RECORDER = "the recording allocator"
MEMORY_STATS = "torch.cuda.memory_stats (the recording allocator is not installed: no categories)"
RESIDENT = "the process' resident memory (the recording allocator is not installed: more than tensors)"

_STATUS = Path("/proc/self/status")
_MEMINFO = Path("/proc/meminfo")


class Reading(TypedDict):
    """One device at one moment; docs/toolkit.md explains `source`.

    `total_mb` and `utilization_percent` are None as long as CUDA is not initialised.
    """

    device: str
    source: str
    allocated_mb: float
    reserved_mb: float
    max_allocated_mb: float
    max_reserved_mb: float
    total_mb: float | None
    utilization_percent: float | None
    categories_mb: dict[str, float]


class MachineMemory(TypedDict):
    """The memory of the machine, and the part of it that is in use."""

    total_mb: float
    available_mb: float
    used_percent: float


class MemorySnapshot(TypedDict):
    """The memory of all devices at one moment. `timestamp` is in ISO 8601."""

    name: str
    timestamp: str
    devices: list[Reading]
    system: MachineMemory


class DeviceChange(TypedDict):
    """The change of one device between two snapshots; `utilization_change` in percentage points, or None."""

    device: str
    memory_change_mb: float
    reserved_change_mb: float
    peak_change_mb: float
    utilization_change: float | None
    categories_change_mb: dict[str, float]


class _OptionalChanges(TypedDict, total=False):
    system_change_mb: float
    duration_s: float


class SnapshotDifference(_OptionalChanges):
    """The change between the snapshots named `before` and `after`; for a function's call, also its duration."""

    before: str
    after: str
    gpu_changes: list[DeviceChange]


def read_devices(name: str | None = None) -> list[Reading]:
    """Reads all devices.

    With a name, categories are counted as well, and the running session's profile gets a snapshot of that name. Without
    one, only counters are read.
    """
    counts = _snapshot(name) if name is not None else {}
    return [_cpu(counts.get("cpu")) if device == "cpu" else _cuda(device, counts.get(device)) for device in devices()]


def make_reading(
    device: str,
    source: str,
    allocated: int,
    reserved: int,
    max_allocated: int,
    max_reserved: int,
    total: int | None,
    categories: Mapping[str, int] | None = None,
) -> Reading:
    """Returns a reading of one device from sizes in bytes.

    `reserved` equals `allocated` if nothing caches, as on the CPU; `total` is the device's memory, None while CUDA is
    not initialised. `categories` are those of named readings.
    """
    return {
        "device": device,
        "source": source,
        "allocated_mb": allocated / MB,
        "reserved_mb": reserved / MB,
        "max_allocated_mb": max_allocated / MB,
        "max_reserved_mb": max_reserved / MB,
        "total_mb": None if total is None else total / MB,
        "utilization_percent": None if total is None else 100 * allocated / total,
        "categories_mb": {category: size / MB for category, size in (categories or {}).items()},
    }


def devices() -> list[str]:
    """Returns the names of all GPUs, and of the CPU if there is no GPU or its allocations are recorded."""
    gpus = [f"cuda:{index}" for index in range(torch.cuda.device_count())]
    return gpus + ["cpu"] * (not gpus or _recorded("cpu"))


def primary_device() -> str:
    """Returns the device for figures of one device: the recorded one, else the current GPU, else the CPU."""
    if torch.cuda.device_count() == 0 or (_recorded("cpu") and not _recorded("cuda")):
        return "cpu"
    return f"cuda:{torch.cuda.current_device() if torch.cuda.is_initialized() else 0}"  # type: ignore[no-untyped-call]


def system_memory() -> tuple[int, int]:
    """Returns total and available bytes of the machine. Source: /proc/meminfo."""
    lines = _read_sizes(_MEMINFO)
    return lines["MemTotal"], lines["MemAvailable"]


def peak_categories(device: str) -> dict[str, int]:
    """Returns the bytes by category at the device's peak, without zeros; empty if nothing is recorded."""
    if not _recorded(device.partition(":")[0]):
        return {}
    return _categories(read_peaks().get(device))


def _recorded(device: str) -> bool:
    return _HAS_EXTENSION and (device == "cpu" or HAS_CUDA) and allocators.is_installed(device)


def _snapshot(name: str) -> dict[str, DeviceCount]:
    if not _recorded("cpu") and not _recorded("cuda"):
        return {}
    name = name.encode("utf-8", "backslashreplace").decode()  # the event file does not support lone surrogates
    running = session.current()
    return (live.take_snapshot(name) if running is None else running.snapshot(name)).devices


def _cpu(count: DeviceCount | None) -> Reading:
    total, _ = system_memory()
    if not _recorded("cpu"):
        status = _read_sizes(_STATUS)
        resident, highest = status["VmRSS"], max(status["VmHWM"], status["VmRSS"])
        return make_reading("cpu", RESIDENT, resident, resident, highest, highest, total)
    live = count.requested_bytes if count else cpu_reported_bytes()
    peak = read_peaks().get("cpu")
    highest = max(live, peak.requested_bytes) if peak else live
    return make_reading("cpu", RECORDER, live, live, highest, highest, total, _categories(count))


def _cuda(device: str, count: DeviceCount | None) -> Reading:
    # The recording allocator passes memory_stats on: these are the same figures with it and without.
    stats, total = {}, None
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        stats = torch.cuda.memory_stats(device)
        total = torch.cuda.get_device_properties(device).total_memory
    return make_reading(
        device,
        RECORDER if _recorded("cuda") else MEMORY_STATS,
        stats.get("allocated_bytes.all.current", 0),
        stats.get("reserved_bytes.all.current", 0),
        stats.get("allocated_bytes.all.peak", 0),
        stats.get("reserved_bytes.all.peak", 0),
        total,
        _categories(count),
    )


def _categories(count: DeviceCount | LivePeak | None) -> dict[str, int]:
    return {category: size for category, size in count.categories.items() if size} if count else {}


def _read_sizes(file: Path) -> dict[str, int]:
    """Returns the sizes of a file of /proc, in bytes."""
    lines = (line.split() for line in file.read_text().splitlines())
    return {words[0].rstrip(":"): int(words[1]) * 1024 for words in lines if words[-1:] == ["kB"]}
