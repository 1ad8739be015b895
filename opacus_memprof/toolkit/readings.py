# SPDX-License-Identifier: Apache-2.0
"""The one place where the toolkit's figures come from: each device's bytes now, and who counted them.

| source | where | what `allocated` is |
|---|---|---|
| RECORDER | the recording allocator is installed (by a session, or `install`) | live tensors, with categories |
| MEMORY_STATS | CUDA without it | live tensors, as `torch.cuda.memory_stats` counts them |
| RESIDENT | the CPU without it | resident memory of the whole process, tensors or not |

Nothing here initialises CUDA.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

try:
    from opacus_memprof import adaptors, session, snapshots
    from opacus_memprof._native import HAS_CUDA, cpu_reported_bytes, peaks
except ImportError:  # the extension is missing or broken: nothing can be installed, and the rest still works
    _HAS_EXTENSION = False
else:
    _HAS_EXTENSION = True

RECORDER = "the recording allocator"
MEMORY_STATS = "torch.cuda.memory_stats (the recording allocator is not installed: no categories)"
RESIDENT = "the process' resident memory (the recording allocator is not installed: more than tensors)"

_STATUS = Path("/proc/self/status")
_MEMINFO = Path("/proc/meminfo")


@dataclass(frozen=True)
class Reading:
    """One device at one moment, in bytes. `reserved` equals `allocated` where nothing caches, as on the CPU; `total`
    is the device's memory, None while CUDA is not initialised. `categories` are for named readings of RECORDER."""

    device: str
    source: str
    allocated: int
    reserved: int
    max_allocated: int
    max_reserved: int
    total: int | None
    categories: dict[str, int] = field(default_factory=dict)


def read(name: str | None = None) -> dict[str, Reading]:
    """Every device's reading. One with a name counts categories as well and stays in the running session's profile as
    a snapshot of that name; one without costs no more than a look at counters."""
    taken = _snapshot(name) if name is not None else {}
    readings = [
        _cpu(taken.get("cpu", {})) if device == "cpu" else _cuda(device, taken.get(device, {})) for device in devices()
    ]
    return {reading.device: reading for reading in readings}


def devices() -> list[str]:
    """The GPUs; the CPU where there are none, or where its allocations are recorded."""
    gpus = [f"cuda:{index}" for index in range(torch.cuda.device_count())]
    return gpus + ["cpu"] * (not gpus or _recorded("cpu"))


def primary_device() -> str:
    """The device of the figures that have room for one: the recorded one, else the GPU in use, else the CPU."""
    if torch.cuda.device_count() == 0 or (_recorded("cpu") and not _recorded("cuda")):
        return "cpu"
    return f"cuda:{torch.cuda.current_device() if torch.cuda.is_initialized() else 0}"  # type: ignore[no-untyped-call]


def system_memory() -> tuple[int, int]:
    """Total and available bytes of the machine. Source: /proc/meminfo."""
    lines = _kilobytes(_MEMINFO)
    return lines["MemTotal"], lines["MemAvailable"]


def peak_categories(device: str) -> dict[str, int]:
    """The bytes by category at the device's peak, without those that have none; empty where nobody records."""
    if not _recorded(device.partition(":")[0]):
        return {}
    peak = peaks().get(device, {"categories": {}})
    return {category: size for category, size in peak["categories"].items() if size}


def _recorded(device: str) -> bool:
    return _HAS_EXTENSION and (device == "cpu" or HAS_CUDA) and adaptors.installed(device)


def _snapshot(name: str) -> dict[str, dict[str, Any]]:
    if not _recorded("cpu") and not _recorded("cuda"):
        return {}
    name = name.encode("utf-8", "backslashreplace").decode()  # the event file takes no lone surrogates
    running = session.current()
    taken = snapshots.take(name) if running is None else running.snapshot(name)
    devices: dict[str, dict[str, Any]] = taken["devices"]
    return devices


def _cpu(taken: dict[str, Any]) -> Reading:
    total, _ = system_memory()
    if not _recorded("cpu"):
        status = _kilobytes(_STATUS)
        resident, most = status["VmRSS"], max(status["VmHWM"], status["VmRSS"])
        return Reading("cpu", RESIDENT, resident, resident, most, most, total)
    live = taken["requested_bytes"] if taken else cpu_reported_bytes()
    most = max(live, peaks().get("cpu", {}).get("requested_bytes", 0))
    return Reading("cpu", RECORDER, live, live, most, most, total, _categories(taken))


def _cuda(device: str, taken: dict[str, Any]) -> Reading:
    # The recording allocator passes memory_stats on: these are the same figures with it and without.
    stats, total = {}, None
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        stats = torch.cuda.memory_stats(device)
        total = torch.cuda.get_device_properties(device).total_memory
    return Reading(
        device,
        RECORDER if _recorded("cuda") else MEMORY_STATS,
        stats.get("allocated_bytes.all.current", 0),
        stats.get("reserved_bytes.all.current", 0),
        stats.get("allocated_bytes.all.peak", 0),
        stats.get("reserved_bytes.all.peak", 0),
        total,
        _categories(taken),
    )


def _categories(taken: dict[str, Any]) -> dict[str, int]:
    return {category: size for category, size in taken.get("categories", {}).items() if size}


def _kilobytes(file: Path) -> dict[str, int]:
    """The sizes of a file of /proc, in bytes."""
    lines = (line.split() for line in file.read_text().splitlines())
    return {words[0].rstrip(":"): int(words[1]) * 1024 for words in lines if words[-1:] == ["kB"]}
