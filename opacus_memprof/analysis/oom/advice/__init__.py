# SPDX-License-Identifier: Apache-2.0
"""Suggestions of what to change so that the run fits, with the bytes that each saves and how they were computed."""

from collections.abc import Callable, Iterator

from opacus_memprof.analysis.oom.advice import allocator, batch, defects, modes, training
from opacus_memprof.analysis.oom.advice.base import Suggestion
from opacus_memprof.analysis.oom.predict import Case

__all__ = ["Suggestion", "advise"]

ADVISERS: tuple[Callable[[Case], Iterator[Suggestion]], ...] = (
    defects.release_leftovers,
    allocator.expandable_segments,
    allocator.other_processes,
    defects.drop_unused_gradients,
    defects.set_gradients_to_none,
    modes.norms_without_squares,
    modes.adopted_samples,
    batch.physical_batch,
    modes.another_mode,
    training.checkpoints,
    training.optimizer_states,
)


def advise(case: Case) -> list[Suggestion]:
    """All suggestions that save memory. First those that fit, the smallest change of the program first; then those that
    do not fit alone, the one that saves the most first."""
    found = [each for adviser in ADVISERS for each in adviser(case) if each.saved > 0]
    return sorted(
        found, key=lambda each: (each.fits is False, each.change if each.fits is not False else 0, -each.saved)
    )
