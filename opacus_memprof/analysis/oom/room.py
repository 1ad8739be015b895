# SPDX-License-Identifier: Apache-2.0
"""What would have fitted: free memory at the moment of the failure, and what of it could be had."""

from dataclasses import dataclass
from typing import Any

from opacus_memprof.analysis.oom.failure import Failure

MARGIN = 0.03  # of what may be reserved: what predictions leave free
_BLOCK = 2 * 2**20  # a caching allocator takes whole blocks of this size from the device
_SMALLEST = 64 * 2**20  # below it, neither fragments nor another process are worth a word


@dataclass(frozen=True)
class Room:
    """Bytes; None where nobody counts.

    Attributes:
        capacity: requested bytes that fit at once, as this run's blocks round and fragment; a margin is left.
        may_reserve: what the allocator could reserve in all, with other processes as they are.
        cached: reserved, and used by nobody. `largest_free`: of it in one block.
        unreserved: what it could still take from the device.
        free_segments: what empty_cache would give back. `free_expandable`: free in expandable segments.
        others: used on the device by others: processes, and what CUDA itself keeps.
        device: the device's memory. `limit`: what this process was allowed of it, if less.
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
        """A caching allocator hands out parts of segments that do not grow."""
        return self.cached is not None and not self.free_expandable

    def as_dict(self) -> dict[str, Any]:
        return {f"{key}_bytes" if key != "rounding" else key: value for key, value in vars(self).items()}


def room_of(failure: Failure) -> Room:
    said = failure.upstream
    reserved, allocated = said.get("reserved"), said.get("allocated")
    free, total, limit = said.get("device_free"), said.get("device_total"), said.get("limit")
    if reserved is None or allocated is None or free is None or total is None:
        return Room(capacity=failure.live if limit is None else limit, limit=limit)
    used = allocated + (said.get("pending") or 0)
    may_reserve = reserved + free if limit is None else min(limit, reserved + free)
    rounding = max(used / max(failure.live, 1), 1.0)
    wasted = (reserved - used) / max(reserved, 1)
    return Room(
        capacity=int(may_reserve * (1 - MARGIN) * (1 - wasted) / rounding),
        may_reserve=may_reserve,
        reserved=reserved,
        allocated=allocated,
        cached=reserved - used,
        largest_free=said.get("largest_free"),
        unreserved=max(may_reserve - reserved, 0) // _BLOCK * _BLOCK,
        free_segments=said.get("free_segments"),
        free_expandable=said.get("free_expandable"),
        others=max(total - free - reserved, 0),
        device=total,
        limit=limit if limit is not None and limit < total else None,
        rounding=rounding,
    )


def fragmented(room: Room, failure: Failure) -> bool:
    """What is free and what could still be reserved would do together, but in no single block."""
    if room.cached is None or room.unreserved is None or room.cached < _SMALLEST:
        return False
    return room.cached + room.unreserved >= failure.requested * room.rounding and not room.free_expandable


def crowded(room: Room) -> bool:
    """Others use much of the device, and it is they who bound what can be reserved."""
    return (
        room.others is not None
        and room.device is not None
        and room.others >= max(_SMALLEST, room.device // 50)
        and room.may_reserve is not None
        and (room.limit is None or room.may_reserve < room.limit)
    )
