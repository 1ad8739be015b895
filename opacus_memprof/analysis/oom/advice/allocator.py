# SPDX-License-Identifier: Apache-2.0
"""Suggestions about memory that exists but cannot be used: fragments, and what other processes use."""

from collections.abc import Iterator

from opacus_memprof.analysis.oom.advice.base import SETTING, Suggestion, format_sum
from opacus_memprof.analysis.oom.capacity import MARGIN, is_crowded_by_others, is_fragmented
from opacus_memprof.analysis.oom.predict import Case
from opacus_memprof.profiles.oom_report import Action
from opacus_memprof.profiles.units import format_bytes


def expandable_segments(case: Case) -> Iterator[Suggestion]:
    """Suggests expandable segments, which grow and shrink by pages and hardly fragment, if memory is fragmented."""
    memory = case.memory
    if not is_fragmented(memory, case.failure) or memory.may_reserve is None:
        return
    instant = case.peak()
    yield Suggestion(
        actions=(Action(kind="allocator_setting", value="expandable_segments:True"),),
        title="expandable segments",
        code="PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True  # in the environment, before the program starts",
        computed=f"{format_bytes(memory.cached or 0)} are reserved and free, but the largest block is "
        f"{format_bytes(memory.largest_free or 0)}; with {format_bytes(memory.unreserved or 0)} that the device still "
        f"has, they make room for the {format_bytes(case.failure.requested)} asked for: {format_sum(instant)}",
        peak=instant.bytes,
        saved=memory.cached or 0,
        fits=instant.bytes * memory.rounding <= memory.may_reserve * (1 - MARGIN),
        change=SETTING,
    )


def other_processes(case: Case) -> Iterator[Suggestion]:
    """Suggests ending other processes on the device, if this run lacks the memory that they use."""
    memory = case.memory
    if (
        not is_crowded_by_others(memory)
        or memory.others is None
        or memory.may_reserve is None
        or memory.limit is not None
    ):
        return
    instant = case.peak()
    without_others = memory.may_reserve + memory.others - _CONTEXT
    lacking = int(instant.bytes * memory.rounding / (1 - MARGIN)) - memory.may_reserve
    if lacking <= 0:
        return
    yield Suggestion(
        actions=(Action(kind="other_processes", bytes=memory.others, lacking_bytes=lacking),),
        title="ending what else runs on this device",
        code="nvidia-smi  # shows it",
        computed=f"others use {format_bytes(memory.others)} of the device's {format_bytes(memory.device or 0)}; this "
        f"run lacks {format_bytes(lacking)}: {format_sum(instant)}",
        peak=instant.bytes,
        saved=memory.others,
        fits=instant.bytes * memory.rounding <= without_others * (1 - MARGIN),
        change=SETTING,
    )


_CONTEXT = 600 * 2**20  # the approximate size of this process' CUDA context
