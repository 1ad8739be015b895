# SPDX-License-Identifier: Apache-2.0
"""Phrases for the time of something in a run: its phase, physical step and logical step."""

from collections.abc import Iterable, Sequence

_STEPS = "Steps count from 0."
_LOGICAL_STEPS = (
    "Steps count from 0. Each is a physical batch; a logical step, of one or more of them, updates the parameters."
)
_IDLE = "Idle is the time outside forward, backward, clipping and the optimizer's step."


def describe_time(phase: str, step: int | str, logical_step: int | None = None) -> str:
    """A phrase such as `backward of step 5 (logical step 2)`, without the logical step if it is the same number."""
    logical = "" if logical_step is None or logical_step == step else f" (logical step {logical_step})"
    return f"{'idle time' if phase == 'idle' else phase.replace('_', ' ')} of step {step}{logical}"


def steps_note(phases: Iterable[str], steps: Iterable[Sequence[int | None]]) -> str:
    """The note below a table of phases: how steps are counted, and what idle means.

    Args:
        phases: those in the table.
        steps: (physical, logical) of each row.
    """
    differ = any(logical is not None and logical != step for step, logical in steps)
    return " ".join([_LOGICAL_STEPS if differ else _STEPS, *([_IDLE] if "idle" in phases else [])])
