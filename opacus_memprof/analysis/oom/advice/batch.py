# SPDX-License-Identifier: Apache-2.0
"""Fewer samples at a time, with the same logical batch."""

import math
from collections.abc import Callable, Iterator

from opacus_memprof.analysis.oom.advice.base import BATCH, SMALL_BATCH, VARYING, Suggestion, suggestion
from opacus_memprof.analysis.oom.predict import Case
from opacus_memprof.analysis.oom.step import Instant
from opacus_memprof.units import format_bytes


def physical_batch(case: Case) -> Iterator[Suggestion]:
    """BatchMemoryManager with the largest physical batch whose predicted peak fits. Where batches vary, as Poisson
    sampling has it, a larger one may come, which nothing else bounds."""
    found = largest_that_fits(case, case.peak)
    if found is None or case.samples is None or not case.workload.mode:
        return
    n, instant = found
    varies = len({samples for _, samples in case.workload.batches}) > 1
    slope = slope_of(case, case.peak)
    yield suggestion(
        case,
        instant,
        VARYING if varies else BATCH if 2 * n >= case.samples else SMALL_BATCH,
        f"a physical batch of at most {n} samples in the place of {case.samples}, and the same logical batch",
        batch_code(n),
        f"In this run a sample takes {format_bytes(slope)} at the peak, and the rest does not grow with the batch.",
        batch_action(n),
    )


def batch_action(n: int) -> dict[str, object]:
    return {"kind": "max_physical_batch_size", "value": n}


def batch_code(n: int) -> str:
    return (
        "with opacus.utils.batch_memory_manager.BatchMemoryManager("
        f"data_loader=loader, max_physical_batch_size={n}, optimizer=optimizer) as loader:"
    )


def largest_that_fits(case: Case, peak: Callable[[int], Instant]) -> tuple[int, Instant] | None:
    """The largest part of a logical batch whose peak fits, as BatchMemoryManager cuts it: into the fewest parts, of
    equal sizes. Where nobody knows what fits, half of the batch; None where not even one sample does.

    The next physical batch meets the clipped sums of the one before, which may lie in the midst of what it needs: a
    fifth of the peak, or the largest block, is left for that as long as a sample fits.
    """
    if case.samples is None:
        return None
    parts = [math.ceil(case.samples / count) for count in range(2, case.samples + 1)]
    sizes = {n: peak(n) for n in dict.fromkeys(parts)}
    for spares in (case.room.fragments, False):
        for n, instant in sizes.items():
            spare = max(instant.bytes // 5, case.largest_block(n)) if spares else 0
            if case.fits(instant.bytes + spare) is not False:
                return n, instant
    return None


def slope_of(case: Case, peak: Callable[[int], Instant]) -> int:
    """Bytes a sample, from the peaks of the whole batch and of half of it."""
    whole = case.samples or 1
    half = max(whole // 2, 1)
    return (peak(whole).bytes - peak(half).bytes) // max(whole - half, 1) if whole > half else peak(whole).bytes
