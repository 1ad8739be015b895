# SPDX-License-Identifier: Apache-2.0
"""The memory of the device when an allocation failed: free, usable, and lost to fragments or other processes."""

from dataclasses import dataclass

from opacus_memprof.analysis.oom.failure import Failure
from opacus_memprof.profiles.oom_report import RoomBytes

MARGIN = 0.03  # the part of the reservable memory that predictions leave free
_BLOCK = 2 * 2**20  # the caching allocator takes whole blocks of this size from the device
_WORTH_A_SUGGESTION = 64 * 2**20
CONTEXT = 600 * 2**20  # the most that this process' own CUDA context takes of `others`


@dataclass(frozen=True)
class DeviceMemory:
    """The memory of the device when an allocation failed, in bytes. None: unknown.

    Attributes:
        capacity: requested bytes that fit, with the rounding and fragments of this run, less a margin.
        may_reserve: bytes that the allocator could reserve in total, if other processes stay as they are.
        reserved: bytes that it had reserved.
        allocated: bytes that it had handed out.
        cached: reserved bytes that were not handed out.
        largest_free: the largest free block of `cached`.
        unreserved: bytes that it could still reserve.
        free_segments: bytes that empty_cache would free.
        free_expandable: free bytes in expandable segments.
        others: bytes used by other processes and CUDA itself.
        device: the device's total memory.
        limit: the limit of this process, if lower.
        rounding: allocated bytes divided by requested bytes.
    """

    capacity: int | None
    may_reserve: int | None = None
    reserved: int | None = None
    allocated: int | None = None
    cached: int | None = None
    largest_free: int | None = None
    unreserved: int | None = None
    free_segments: int | None = None
    free_expandable: int | None = None
    others: int | None = None
    device: int | None = None
    limit: int | None = None
    rounding: float = 1.0

    @property
    def fragments(self) -> bool:
        """Whether memory can fragment: the caching allocator splits segments, which do not grow."""
        return self.cached is not None and not self.free_expandable

    def for_report(self) -> RoomBytes:
        return RoomBytes(**{f"{key}_bytes" if key != "rounding" else key: value for key, value in vars(self).items()})


def device_memory_at(failure: Failure) -> DeviceMemory:
    """Returns the device's memory at a failure, from the counts of allocator and device."""
    upstream = failure.upstream
    reserved, allocated = upstream.get("reserved"), upstream.get("allocated")
    free, total, limit = upstream.get("device_free"), upstream.get("device_total"), upstream.get("limit")
    if reserved is None or allocated is None or free is None or total is None:
        return DeviceMemory(capacity=failure.live_bytes if limit is None else limit, limit=limit)
    used = allocated + (upstream.get("pending") or 0)
    may_reserve = reserved + free if limit is None else min(limit, reserved + free)
    rounding = max(used / max(failure.live_bytes, 1), 1.0)
    wasted = (reserved - used) / max(reserved, 1)
    return DeviceMemory(
        capacity=int(may_reserve * (1 - MARGIN) * (1 - wasted) / rounding),
        may_reserve=may_reserve,
        reserved=reserved,
        allocated=allocated,
        cached=reserved - used,
        largest_free=upstream.get("largest_free"),
        unreserved=max(may_reserve - reserved, 0) // _BLOCK * _BLOCK,
        free_segments=upstream.get("free_segments"),
        free_expandable=upstream.get("free_expandable"),
        others=max(total - free - reserved, 0),
        device=total,
        limit=limit if limit is not None and limit < total else None,
        rounding=rounding,
    )


def is_fragmented(memory: DeviceMemory, failure: Failure) -> bool:
    """Returns whether cached and unreserved memory would have been enough together, but no single block was."""
    if memory.cached is None or memory.unreserved is None or memory.cached < _WORTH_A_SUGGESTION:
        return False
    return memory.cached + memory.unreserved >= failure.requested * memory.rounding and not memory.free_expandable


def is_crowded_by_others(memory: DeviceMemory) -> bool:
    """Returns whether other processes use much of the device, and no lower limit applies to this one."""
    return (
        memory.others is not None
        and memory.device is not None
        and memory.others - CONTEXT >= max(_WORTH_A_SUGGESTION, memory.device // 50)
        and memory.may_reserve is not None
        and (memory.limit is None or memory.may_reserve < memory.limit)
    )
