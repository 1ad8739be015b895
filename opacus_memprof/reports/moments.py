# SPDX-License-Identifier: Apache-2.0
"""How reports say when something was: in a phase, a physical step and a logical one."""

from collections.abc import Iterable, Sequence

_STEPS = "Steps count from 0."
_LOGICAL_STEPS = (
    "Steps count from 0. Each is a physical batch; a logical step, of one or more of them, updates the parameters."
)
_IDLE = "Idle is the time outside forward, backward, clipping and the optimizer's step."


def when(phase: str, step: int | str, logical_step: int | None = None) -> str:
    """`backward of step 5 (logical step 2)`; the logical step only where it is another number."""
    logical = "" if logical_step is None or logical_step == step else f" (logical step {logical_step})"
    return f"{'idle time' if phase == 'idle' else phase.replace('_', ' ')} of step {step}{logical}"


def explanation(phases: Iterable[str], steps: Iterable[Sequence[int | None]]) -> str:
    """What a table of phases does not say by itself.

    Args:
        phases: those in the table.
        steps: (physical, logical) of each row.
    """
    differ = any(logical is not None and logical != step for step, logical in steps)
    return " ".join([_LOGICAL_STEPS if differ else _STEPS, *([_IDLE] if "idle" in phases else [])])
