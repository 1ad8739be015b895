# SPDX-License-Identifier: Apache-2.0
"""The suggestion of a smaller physical batch, with the same logical batch."""

import math
from collections.abc import Callable, Iterator

from opacus_memprof.analysis.oom.advice.base import BATCH, SMALL_BATCH, VARYING, Suggestion, suggest
from opacus_memprof.analysis.oom.predict import Case
from opacus_memprof.analysis.oom.step import Instant
from opacus_memprof.profiles.oom_report import Action
from opacus_memprof.profiles.units import format_bytes, format_count


def physical_batch(case: Case) -> Iterator[Suggestion]:
    """Suggests BatchMemoryManager with the largest physical batch whose predicted peak fits. If batch sizes vary, as in
    Poisson sampling, it also bounds larger batches that may come."""
    found = largest_that_fits(case, case.peak)
    if found is None or case.samples is None or not case.shapes.mode:
        return
    n, instant = found
    varies = len({samples for _, samples in case.shapes.batches}) > 1
    slope = bytes_per_sample(case, case.peak)
    yield suggest(
        case,
        instant,
        VARYING if varies else BATCH if 2 * n >= case.samples else SMALL_BATCH,
        f"a physical batch of at most {format_count(n, 'sample')} in the place of {case.samples}, and the same logical "
        "batch",
        batch_code(n),
        f"In this run a sample takes {format_bytes(slope)} at the peak, and the rest does not grow with the batch.",
        batch_action(n),
    )


def batch_action(n: int) -> Action:
    return Action(kind="max_physical_batch_size", value=n)


def batch_code(n: int) -> str:
    return (
        "with opacus.utils.batch_memory_manager.BatchMemoryManager("
        f"data_loader=loader, max_physical_batch_size={n}, optimizer=optimizer) as loader:"
    )


def largest_that_fits(case: Case, peak: Callable[[int], Instant]) -> tuple[int, Instant] | None:
    """The largest physical batch whose peak fits, and that peak. BatchMemoryManager splits a logical batch into the
    fewest parts of equal sizes. If the capacity is unknown, half of the batch. None if not even one sample fits.

    The clipped sums of the previous physical batch may fragment the memory that the next one needs. A fifth of the
    peak, or the largest block if that is more, is left free for this, as long as at least one sample fits."""
    if case.samples is None:
        return None
    parts = [math.ceil(case.samples / count) for count in range(2, case.samples + 1)]
    sizes = {n: peak(n) for n in dict.fromkeys(parts)}
    for spares in (case.memory.fragments, False):
        for n, instant in sizes.items():
            spare = max(instant.bytes // 5, case.largest_block(n)) if spares else 0
            if case.fits(instant.bytes + spare) is not False:
                return n, instant
    return None


def bytes_per_sample(case: Case, peak: Callable[[int], Instant]) -> int:
    """The bytes per sample, from the peaks of the whole batch and of half of it."""
    whole = case.samples or 1
    half = max(whole // 2, 1)
    return (peak(whole).bytes - peak(half).bytes) // max(whole - half, 1) if whole > half else peak(whole).bytes
