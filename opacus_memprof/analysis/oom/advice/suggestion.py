# SPDX-License-Identifier: Apache-2.0
"""Suggestion, and its construction from a predicted peak."""

from collections.abc import Callable
from dataclasses import dataclass

from opacus_memprof.analysis.oom.predict import Case
from opacus_memprof.analysis.oom.step import Instant, Step
from opacus_memprof.profiles.oom_report import Action, SuggestedChange
from opacus_memprof.profiles.units import format_bytes

# How much of the program a suggestion changes, smallest first. Suggestions that fit are sorted by it.
DEFECT, VARYING, SETTING, LINE, BATCH, MODE, SMALL_BATCH, OTHER_MODE, MODE_AND_BATCH = range(9)
CHECKPOINTS, OPTIMIZER, DTYPE, COMBINED, ADAPTERS, SEQUENCE = range(9, 15)


@dataclass(frozen=True)
class Change:
    """A change of the training that can be combined with others.

    Attributes:
        change: how much of the program changes (DEFECT … SEQUENCE).
        title, code, computed, actions: see Suggestion.
        apply: returns the step with the change.
        same_forward: whether the forward pass takes as much as before.
    """

    change: int
    title: str
    code: str
    computed: str
    actions: tuple[Action, ...]
    apply: Callable[[Step], Step]
    same_forward: bool = False


@dataclass(frozen=True)
class Suggestion:
    """A change of the program, and its effect on the peak. Sizes are in bytes.

    Attributes:
        actions: the change, for programs.
        title: the change, for people.
        code: the change, as code.
        computed: how the prediction was computed.
        peak: the predicted peak with the change.
        saved: the predicted peak without the change, less `peak`.
        fits: whether `peak` fits; None if the capacity is unknown.
        is_tight: whether it fits, but would not fit if a hole as large as the largest block could not be used.
        change: how much of the program changes (DEFECT … SEQUENCE).
    """

    actions: tuple[Action, ...]
    title: str
    code: str
    computed: str
    peak: int
    saved: int
    fits: bool | None
    change: int
    is_tight: bool = False

    def for_report(self) -> SuggestedChange:
        return SuggestedChange(
            title=self.title,
            actions=list(self.actions),
            code=self.code,
            computed=self.computed,
            predicted_peak_bytes=self.peak,
            saved_bytes=self.saved,
            fits=self.fits,
            is_tight=self.is_tight,
        )


def suggest(
    case: Case,
    instant: Instant,
    change: int,
    title: str,
    code: str,
    computed: str,
    *actions: Action,
    largest: int | None = None,
) -> Suggestion:
    """Builds a suggestion after which the step's peak is `instant`.

    Args:
        case: the failure.
        instant: the predicted peak.
        change: how much of the program changes.
        title: see Suggestion.
        code: see Suggestion.
        computed: see Suggestion.
        *actions: see Suggestion.
        largest: the largest block of the changed step. Default: that of the run.
    """
    peak, most = instant.bytes, case.most_samples
    hole = case.largest_block(most or 1) if largest is None else largest
    if most != case.samples and not any(action.kind == "max_physical_batch_size" for action in actions):
        computed += f" Of batches of {most} samples: this one had {case.samples}, and later ones can have more."
    if case.step is not None and case.step.is_guessed:
        computed += (
            " The run ended in the first of the repeated layers: what the others keep is a guess, and may be more."
        )
    return Suggestion(
        actions=actions,
        title=title,
        code=code,
        computed=f"{computed} The peak is then in {phase_and_module(instant)}: {format_sum(instant)}",
        peak=peak,
        saved=case.peak().bytes - peak,
        fits=case.fits(peak),
        change=change,
        is_tight=case.memory.fragments and bool(case.fits(peak)) and case.fits(peak + hole) is False,
    )


def phase_and_module(instant: Instant) -> str:
    return (
        f"{instant.phase.replace('_', ' ')} of {instant.module}" if instant.module else instant.phase.replace("_", " ")
    )


def format_sum(instant: Instant) -> str:
    """Formats the parts of an instant as a sum, the largest first: `gradients 2.00 GiB + … = 5.00 GiB`."""
    parts = sorted(((size, name) for name, size in instant.parts.items() if size > 0), reverse=True)
    shown = [f"{name.replace('_', ' ')} {format_bytes(size)}" for size, name in parts[:6]]
    if rest := sum(size for size, _ in parts[6:]):
        shown.append(f"other {format_bytes(rest)}")
    return " + ".join(shown) + f" = {format_bytes(instant.bytes)}"
