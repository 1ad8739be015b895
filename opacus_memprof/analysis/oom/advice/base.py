# SPDX-License-Identifier: Apache-2.0
"""What a suggestion is."""

from dataclasses import dataclass
from typing import Any

from opacus_memprof.analysis.oom.predict import Case
from opacus_memprof.analysis.oom.step import Instant
from opacus_memprof.units import format_bytes

# How much of the program changes: suggestions that fit are ordered by it.
DEFECT, VARYING, SETTING, LINE, BATCH, MODE, SMALL_BATCH, OTHER_MODE, MODE_AND_BATCH, TRAINING = range(10)


@dataclass(frozen=True)
class Suggestion:
    """Bytes throughout.

    Attributes:
        actions: what to change, for programs: [{"kind", ...}].
        title: the same for people, and `code` as they would write it.
        computed: how the prediction was made.
        peak: predicted with the change. `saved`: the same without the change less this.
        fits: whether that fits; None where nobody knows how much does.
        change: how much of the program changes (DEFECT … TRAINING).
    """

    actions: tuple[dict[str, Any], ...]
    title: str
    code: str
    computed: str
    peak: int
    saved: int
    fits: bool | None
    change: int

    def as_dict(self) -> dict[str, Any]:
        return {
            "title": self.title,
            "actions": list(self.actions),
            "code": self.code,
            "computed": self.computed,
            "predicted_peak_bytes": self.peak,
            "saved_bytes": self.saved,
            "fits": self.fits,
        }


def suggestion(
    case: Case, instant: Instant, change: int, title: str, code: str, computed: str, *actions: dict[str, Any]
) -> Suggestion:
    """One whose step peaks at `instant`."""
    peak = instant.bytes
    return Suggestion(
        actions=actions,
        title=title,
        code=code,
        computed=f"{computed} The peak is then in {where(instant)}: {sum_of(instant)}",
        peak=peak,
        saved=case.peak().bytes - peak,
        fits=case.fits(peak),
        change=change,
    )


def where(instant: Instant) -> str:
    return (
        f"{instant.phase.replace('_', ' ')} of {instant.module}" if instant.module else instant.phase.replace("_", " ")
    )


def sum_of(instant: Instant) -> str:
    """The parts of an instant as a sum, the largest first."""
    parts = sorted(((size, name) for name, size in instant.parts.items() if size > 0), reverse=True)
    shown = [f"{name.replace('_', ' ')} {format_bytes(size)}" for size, name in parts[:6]]
    if rest := sum(size for size, _ in parts[6:]):
        shown.append(f"other {format_bytes(rest)}")
    return " + ".join(shown) + f" = {format_bytes(instant.bytes)}"
