# SPDX-License-Identifier: Apache-2.0
"""What to change so that the run fits, each with the bytes that it saves and how they were computed."""

from collections.abc import Callable, Iterator

from opacus_memprof.analysis.oom.advice import allocator, batch, defects, modes, training
from opacus_memprof.analysis.oom.advice.base import Suggestion
from opacus_memprof.analysis.oom.predict import Case

__all__ = ["Suggestion", "advise"]

ADVISERS: tuple[Callable[[Case], Iterator[Suggestion]], ...] = (
    defects.let_go,
    allocator.expandable_segments,
    allocator.other_processes,
    defects.discarded_gradients,
    defects.gradients_set_to_none,
    modes.norms_without_squares,
    batch.physical_batch,
    modes.another_mode,
    training.checkpoints,
    training.optimizer_states,
)


def advise(case: Case) -> list[Suggestion]:
    """Those that fit first, the smallest change of the program before larger ones; then those that do not fit alone,
    the one that saves most first. What saves nothing is left out."""
    found = [one for adviser in ADVISERS for one in adviser(case) if one.saved > 0]
    return sorted(found, key=lambda one: (one.fits is False, one.change if one.fits is not False else 0, -one.saved))
