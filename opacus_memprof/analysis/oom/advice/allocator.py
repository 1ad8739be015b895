# SPDX-License-Identifier: Apache-2.0
"""Memory that is there and cannot be had: fragments, and what other processes use."""

from collections.abc import Iterator

from opacus_memprof.analysis.oom.advice.base import SETTING, Suggestion, sum_of
from opacus_memprof.analysis.oom.predict import Case
from opacus_memprof.analysis.oom.room import MARGIN, crowded, fragmented
from opacus_memprof.units import format_bytes


def expandable_segments(case: Case) -> Iterator[Suggestion]:
    """Segments that grow and shrink by pages leave next to no fragments."""
    room = case.room
    if not fragmented(room, case.failure) or room.may_reserve is None:
        return
    instant = case.peak()
    yield Suggestion(
        actions=({"kind": "allocator_setting", "value": "expandable_segments:True"},),
        title="expandable segments",
        code="PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True  # in the environment, before the program starts",
        computed=f"{format_bytes(room.cached or 0)} are reserved and free, but the largest block is "
        f"{format_bytes(room.largest_free or 0)}; with {format_bytes(room.unreserved or 0)} that the device still has, "
        f"they make room for the {format_bytes(case.failure.requested)} asked for: {sum_of(instant)}",
        peak=instant.bytes,
        saved=room.cached or 0,
        fits=instant.bytes * room.rounding <= room.may_reserve * (1 - MARGIN),
        change=SETTING,
    )


def other_processes(case: Case) -> Iterator[Suggestion]:
    """Others on the same device hold what this run lacks."""
    room = case.room
    if not crowded(room) or room.others is None or room.may_reserve is None or room.limit is not None:
        return
    instant = case.peak()
    would = room.may_reserve + room.others - _CONTEXT
    lacking = int(instant.bytes * room.rounding / (1 - MARGIN)) - room.may_reserve
    if lacking <= 0:
        return
    yield Suggestion(
        actions=({"kind": "other_processes", "bytes": room.others, "lacking_bytes": lacking},),
        title="ending what else runs on this device",
        code="nvidia-smi  # shows it",
        computed=f"others use {format_bytes(room.others)} of the device's {format_bytes(room.device or 0)}; this run "
        f"lacks {format_bytes(lacking)}: {sum_of(instant)}",
        peak=instant.bytes,
        saved=room.others,
        fits=instant.bytes * room.rounding <= would * (1 - MARGIN),
        change=SETTING,
    )


_CONTEXT = 600 * 2**20  # what CUDA itself keeps for this process, about
