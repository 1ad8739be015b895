# SPDX-License-Identifier: Apache-2.0
"""Reads live memory: the counters, which takes microseconds and writes no event, and reconciled snapshots.

A snapshot has, for every device and in bytes: the sum of `categories` is `requested_bytes`; adding `rounding` gives the
bytes that the allocator has handed out, adding `cached` the bytes it has reserved, and adding `outside_pytorch` the
bytes used on the device. `remainder` is torch's count of requested bytes minus the sum of `categories`. If it is not 0,
there is a bug, or one of the session's warnings explains it. Sizes that cannot be measured are None.
"""

import gc
import os
from collections.abc import Mapping
from typing import Any

import torch

from opacus_memprof.profiles.categories import PARTS, add_parts
from opacus_memprof.profiles.launch import Launch
from opacus_memprof.profiles.live_memory import DeviceCount, LiveDevice, LiveMemory, LivePeak, Snapshot
from opacus_memprof.profiles.profile import HookedActivations, ReservedPeak, Sizes
from opacus_memprof.recording import native


def read_live() -> LiveMemory:
    """Returns the live memory of every device that has had a block."""
    launch = Launch.from_environment()
    counters = native.counters()
    return LiveMemory(
        unix_ns=counters["unix_ns"],
        pid=os.getpid(),
        rank=None if launch is None else launch.rank,
        step=counters["step"],
        logical_step=counters["logical_step"],
        devices={
            name: LiveDevice(
                requested_bytes=counts["requested_bytes"],
                peak_bytes=counts["peak_bytes"],
                phase=counts["phase"],
                categories=add_parts(counts["categories"]),
                activation_hooks=hooked_activations(counts["categories"]),
                reserved_peak=_reserved_peak(counts),
            )
            for name, counts in counters["devices"].items()
        },
    )


def read_breakdown() -> dict[str, Sizes]:
    """Returns the live bytes by device and category, without empty categories."""
    devices = read_live().devices.items()
    live = {name: {key: size for key, size in device.categories.items() if size} for name, device in devices}
    return {name: categories for name, categories in live.items() if categories}


def read_peaks() -> dict[str, LivePeak]:
    """Returns the peak of each device since recording began."""
    return {
        name: LivePeak(
            requested_bytes=counts["requested_bytes"],
            counted_bytes=_known(counts["upstream_requested_bytes"]),
            allocated_bytes=_known(counts["allocated_bytes"]),
            reserved_bytes=_known(counts["reserved_bytes"]),
            unix_ns=counts["unix_ns"],
            step=counts["step"],
            phase=counts["phase"],
            categories=add_parts(counts["categories"]),
            activation_hooks=hooked_activations(counts["categories"]),
            reserved_peak=_reserved_peak(counts),
        )
        for name, counts in native.peaks().items()
    }


def hooked_activations(counted: Mapping[str, int]) -> HookedActivations:
    """Returns the parts of activation_hooks, from bytes by the counters' categories."""
    return HookedActivations(**{part: counted.get(category, 0) for category, part in PARTS.items()})


def _reserved_peak(counts: Mapping[str, Any]) -> ReservedPeak | None:
    peak = counts.get("reserved_peak")
    return None if peak is None or peak["bytes"] is None else ReservedPeak(**peak)


def _known(size: int) -> int | None:
    """Returns None for -1, which the counters use for unknown sizes."""
    return None if size < 0 else size


def take_snapshot(name: str) -> Snapshot:
    """Takes a snapshot of every device that has had a block, and writes a snapshot event."""
    gc_was_enabled = gc.isenabled()
    gc.disable()  # a garbage collection between our count and torch's would make them differ
    try:
        pending = _pending_free()
        before = {device: _memory_stats(device) for device in pending}
        counted = native.snapshot(name)
        devices = {
            device: _count(device, counts, pending.get(device, 0), before.get(device))
            for device, counts in counted["devices"].items()
        }
        return Snapshot(**{**counted, "devices": devices})
    finally:
        if gc_was_enabled:
            gc.enable()


def _count(device: str, counts: Mapping[str, Any], pending: int, before: dict[str, int] | None) -> DeviceCount:
    """Counts one device.

    `pending` is the number of bytes in blocks that the program has freed while a side stream uses them. The ledger has
    dropped these blocks; torch's allocator has not. `before` has torch's counts of a CUDA device just before ours:
    autograd's thread may free blocks between ours and those after it.
    """
    categories = add_parts(counts["categories"])
    if pending:
        categories["pending_free"] = pending
    requested = counts["requested_bytes"] + pending
    return DeviceCount(
        requested_bytes=requested,
        categories=categories,
        activation_hooks=hooked_activations(counts["categories"]),
        **_reconcile(device, requested, before),
    )


def _pending_free() -> dict[str, int]:
    """Returns the pending-free bytes of each device. The ledger also drops blocks that were freed unrecorded."""
    if not native.HAS_CUDA or not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return {}
    try:
        return {f"cuda:{index}": native.cuda_refresh(index) for index in range(torch.cuda.device_count())}
    except RuntimeError:  # torch's allocator has no memory snapshot (cudaMallocAsync)
        return {}


def _reconcile(device: str, requested: int, before: dict[str, int] | None) -> dict[str, int | None]:
    if device == "cpu":
        counted = reserved = active = allocated = native.cpu_reported_bytes()
        used = None
    else:
        stats = _memory_stats(device)
        if before and before.get("requested_bytes.all.current") == requested:
            stats = before
        counted = stats.get("requested_bytes.all.current", 0)
        # "active" is "allocated" plus the pending-free blocks.
        active = stats.get("active_bytes.all.current", 0)
        allocated = stats.get("allocated_bytes.all.current", 0)
        reserved = stats.get("reserved_bytes.all.current", 0)
        if counted == active == 0 < allocated:  # cudaMallocAsync counts only these two, without rounding
            counted = active = allocated
        used = _used_bytes(device)
    if requested > 0 == counted:  # torch counts nothing: PYTORCH_NO_CUDA_MEMORY_CACHING, or a pluggable allocator
        return dict.fromkeys(
            ("allocated_bytes", "reserved_bytes", "rounding", "cached", "outside_pytorch", "remainder")
        )
    return {
        "allocated_bytes": allocated,
        "reserved_bytes": reserved,
        "rounding": active - counted,
        "cached": reserved - active,
        "outside_pytorch": None if used is None else used - reserved,
        "remainder": counted - requested,
    }


def _memory_stats(device: str) -> dict[str, int]:
    try:
        return torch.cuda.memory_stats(device)
    except RuntimeError:  # the program has its own pluggable allocator, which counts nothing
        return {}


def _used_bytes(device: str) -> int | None:
    try:
        free, total = torch.cuda.mem_get_info(device)
    except RuntimeError:  # the device is in an error state, which the program's own calls will report
        return None
    return total - free
