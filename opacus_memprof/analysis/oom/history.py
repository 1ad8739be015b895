# SPDX-License-Identifier: Apache-2.0
"""The peaks of a run's steps and phases before an allocation failed, from its events."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from opacus_memprof.analysis.names import Names
from opacus_memprof.analysis.oom.failure import ACTIVATIONS


@dataclass(frozen=True)
class RecordedInstant:
    """An instant of the run: live bytes by category."""

    step: int
    phase: str
    categories: Mapping[str, int]


@dataclass(frozen=True)
class History:
    """The peaks of one device.

    Attributes:
        step_peaks: the peak of each physical step that ended before the failure.
        peaks: the peaks of all phases and of all steps, including that of the failed step so far.
        most_activations: the most bytes of activations that were live at once. That is after the peak if an operation's
            temporaries are larger than its saved tensors.
    """

    step_peaks: tuple[RecordedInstant, ...] = ()
    peaks: tuple[RecordedInstant, ...] = ()
    most_activations: int = 0


def read_history(replayed: Mapping[str, Any] | None, names: Names | None, failed_step: int) -> History:
    """Reads the history up to the step `failed_step` from one of core.replay's devices. Empty without one."""
    if replayed is None or names is None:
        return History()

    def instant(row: Mapping[str, Any]) -> RecordedInstant:
        return RecordedInstant(row["step"], names.phase(row["phase"]), names.categories(row["categories"]))

    steps = [row for row in replayed["steps"] if row["step"] <= failed_step]
    phases = [row for row in replayed["phases"].values() if row["step"] <= failed_step]
    peaks = tuple(instant(row) for row in [*phases, *steps])
    instants = [*peaks, *(instant(row) for row in replayed["timeline"] if row["step"] <= failed_step)]
    return History(
        tuple(instant(row) for row in steps if row["complete"] and row["step"] < failed_step),
        peaks,
        max((sum(each.categories.get(name, 0) for name in ACTIVATIONS) for each in instants), default=0),
    )
