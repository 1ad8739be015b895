# SPDX-License-Identifier: Apache-2.0
"""Changes of the training itself: the last resort, for results change with the optimizer, and time with checkpoints."""

from collections.abc import Iterator

from opacus_memprof.analysis.oom.advice.base import TRAINING, Suggestion, suggestion
from opacus_memprof.analysis.oom.predict import Case
from opacus_memprof.units import format_bytes


def optimizer_states(case: Case) -> Iterator[Suggestion]:
    """An optimizer that keeps no tensors of its own."""
    step = case.step
    if step is None or not step.states or case.history.steps:
        return
    instant = case.changed(step.changed(states=0, update=0))
    yield suggestion(
        case,
        instant,
        TRAINING,
        "SGD without momentum in the place of " + case.workload.optimizer,
        "torch.optim.SGD(model.parameters(), lr=...)",
        f"{case.workload.optimizer} keeps {format_bytes(step.states)}, and its step makes {format_bytes(step.update)} "
        "more for a time.",
        {"kind": "optimizer", "value": "SGD"},
    )
