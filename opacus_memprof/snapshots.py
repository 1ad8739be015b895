# SPDX-License-Identifier: Apache-2.0
"""A snapshot: the live bytes by category, held against what the allocator itself counts.

For every device, in bytes: the sum over `categories` is `requested_bytes`; with `rounding` it is what the allocator
has handed out, with `cached` what it has reserved, with `outside_pytorch` what is used on the device. `remainder` is
the independent count less the categories' sum; anything but 0 is a bug or has its reason in the session's warnings.
What nobody counts is None.
"""

import gc
from typing import Any

import torch

from opacus_memprof import _native


def take(name: str) -> dict[str, Any]:
    """The snapshot of every device that has had a block. A garbage collection between two counts would part them."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        pending = _pending_free()
        snapshot = _native.snapshot(name)
        for device, counts in snapshot["devices"].items():
            _add_pending(counts, pending.get(device, 0))
            counts.update(_reconcile(device, counts["requested_bytes"]))
        return snapshot
    finally:
        if collecting:
            gc.enable()


def breakdown() -> dict[str, dict[str, int]]:
    """The live bytes of every device by category, without a snapshot's event. Categories without bytes are left out."""
    devices = _native.counters()["devices"].items()
    live = {name: {key: size for key, size in found["categories"].items() if size} for name, found in devices}
    return {name: categories for name, categories in live.items() if categories}


def _pending_free() -> dict[str, int]:
    """By device, and with it the ledger forgets blocks that were freed while it could not see it."""
    if not _native.HAS_CUDA or not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return {}
    try:
        return {f"cuda:{index}": _native.cuda_refresh(index) for index in range(torch.cuda.device_count())}
    except RuntimeError:  # the allocator below ours keeps no snapshot (cudaMallocAsync)
        return {}


def _add_pending(counts: dict[str, Any], pending: int) -> None:
    """Blocks that the program has freed and a side stream still uses: the ledger has let go, the allocator has not."""
    counts["requested_bytes"] += pending
    if pending:
        counts["categories"]["pending_free"] = pending


def _reconcile(device: str, requested: int) -> dict[str, int | None]:
    if device == "cpu":
        counted = reserved = active = allocated = _native.cpu_reported_bytes()
        used = None
    else:
        stats = _memory_stats(device)
        counted = stats.get("requested_bytes.all.current", 0)
        # "active" is "allocated" and what waits for a side stream; the two are equal when nothing waits.
        active = stats.get("active_bytes.all.current", 0)
        allocated = stats.get("allocated_bytes.all.current", 0)
        reserved = stats.get("reserved_bytes.all.current", 0)
        if counted == active == 0 < allocated:  # cudaMallocAsync counts only these two, without rounding
            counted = active = allocated
        used = _used_bytes(device)
    if requested > 0 == counted:  # nobody else counts: PYTORCH_NO_CUDA_MEMORY_CACHING, a pluggable allocator
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
    except RuntimeError:  # somebody else's pluggable allocator is in place, and counts nothing
        return {}


def _used_bytes(device: str) -> int | None:
    try:
        free, total = torch.cuda.mem_get_info(device)
    except RuntimeError:  # the device is in a state of error; the program learns of it by its own calls
        return None
    return total - free
