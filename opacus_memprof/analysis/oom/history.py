# SPDX-License-Identifier: Apache-2.0
"""What the run reached before an allocation failed: the highest instants of its steps and phases, from its events."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from opacus_memprof.analysis.names import Names
from opacus_memprof.analysis.oom.failure import ACTIVATIONS
from opacus_memprof.profiles.categories import PER_SAMPLE


@dataclass(frozen=True)
class Moment:
    """An instant of the run: bytes by category."""

    step: int
    phase: str
    categories: Mapping[str, int]

    @property
    def bytes(self) -> int:
        return sum(self.categories.values())

    @property
    def scaled(self) -> int:
        """What grows with the number of samples."""
        return sum(size for category, size in self.categories.items() if category in PER_SAMPLE)


@dataclass(frozen=True)
class History:
    """Of one device.

    Attributes:
        steps: the highest instant of each physical step that ended before the failure.
        moments: the highest of each phase, and of the step that failed so far.
        activations: the most bytes of them at once, which is after the highest instant where an operation's temporaries
            are larger than what it saves.
    """

    steps: tuple[Moment, ...] = ()
    moments: tuple[Moment, ...] = ()
    activations: int = 0


def read(replayed: Mapping[str, Any] | None, names: Names | None, failed_in: int) -> History:
    """History before the step `failed_in` ended, from one of core.replay's devices; empty without."""
    if replayed is None or names is None:
        return History()

    def moment(one: Mapping[str, Any]) -> Moment:
        return Moment(one["step"], names.phase(one["phase"]), names.categories(one["categories"]))

    steps = [one for one in replayed["steps"] if one["step"] <= failed_in]
    phases = [one for one in replayed["phases"].values() if one["step"] <= failed_in]
    moments = tuple(moment(one) for one in [*phases, *steps])
    rows = [*moments, *(moment(one) for one in replayed["timeline"] if one["step"] <= failed_in)]
    return History(
        tuple(moment(one) for one in steps if one["complete"] and one["step"] < failed_in),
        moments,
        max((sum(row.categories.get(name, 0) for name in ACTIVATIONS) for row in rows), default=0),
    )
