# SPDX-License-Identifier: Apache-2.0
"""Suggests changes that make a run fit, with the bytes that each saves and how they were computed."""

from collections.abc import Callable, Iterator

from opacus_memprof.analysis.oom.advice import changes, training, waste
from opacus_memprof.analysis.oom.advice.suggestion import DEFECT, Suggestion
from opacus_memprof.analysis.oom.predict import Case

__all__ = ["Suggestion", "advise"]

ADVISERS: tuple[Callable[[Case], Iterator[Suggestion]], ...] = (
    waste.release_leftovers,
    waste.release_models,
    waste.expandable_segments,
    waste.other_processes,
    waste.drop_unused_gradients,
    waste.set_gradients_to_none,
    changes.norms_without_squares,
    changes.adopted_samples,
    changes.physical_batch,
    changes.another_mode,
    training.change_training,
)


def advise(case: Case) -> list[Suggestion]:
    """Returns all suggestions that save memory: first those that fit, smallest change of the program first; then those
    that fit tightly, in the same order, unless they remove a defect; then the others, largest saving first.
    """
    found = [each for adviser in ADVISERS for each in adviser(case) if each.saved > 0]
    if not any(each.fits is not False for each in found):
        found += training.combine(case)
    return sorted(
        found,
        key=lambda each: (
            each.fits is False,
            each.is_tight and each.change != DEFECT,
            each.change if each.fits is not False else 0,
            -each.saved,
        ),
    )
