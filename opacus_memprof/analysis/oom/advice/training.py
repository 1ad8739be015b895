# SPDX-License-Identifier: Apache-2.0
"""Changes of the training itself: the last resort, for results change with the optimizer, and time with checkpoints."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import accumulate

from opacus_memprof.analysis.oom.advice.base import TRAINING, Suggestion, suggestion
from opacus_memprof.analysis.oom.places import repeated_units
from opacus_memprof.analysis.oom.predict import Case
from opacus_memprof.units import format_bytes


def checkpoints(case: Case) -> Iterator[Suggestion]:
    """Activations of repeated blocks made again in backward, one block at a time: each keeps its input alone. Not in
    ghost clipping, which runs backward twice."""
    step = case.step
    if step is None or step.mode not in ("", "hooks", "functorch"):
        return
    units = repeated_units(case.workload.modules)
    inside = {prefix: [layer for layer in step.layers if layer.name.startswith(f"{prefix}.")] for prefix in units}
    held = {prefix: sum(layer.activations for layer in layers) for prefix, layers in inside.items() if layers}
    if not held:
        return
    first = {layers[0].name: layers[0].forward.input_bytes for layers in inside.values() if layers}
    again: dict[str, int] = {}  # by layer: what its block has made again and not used yet
    for layers in inside.values():
        for layer, size in zip(layers, accumulate(layer.activations for layer in layers), strict=True):
            again[layer.name] = size
    kept = [
        replace(layer, activations=first.get(layer.name, 0)) if layer.name in again else layer for layer in step.layers
    ]
    left = {"left_behind": case.left.bytes} if case.left.bytes else {}
    instants = [
        replace(one, parts={**one.parts, **left, "activations_made_again": again.get(one.module, 0)})
        for one in step.changed(layers=tuple(kept)).instants(step.samples)
    ]
    yield suggestion(
        case,
        max(instants, key=lambda one: one.bytes),
        TRAINING,
        f"checkpoints around {len(held)} repeated blocks",
        "torch.utils.checkpoint.checkpoint(block, x, use_reentrant=True)  # Opacus follows this kind alone",
        f"Blocks hold {format_bytes(sum(held.values()))} of activations; with checkpoints each keeps its input, and "
        f"one at a time makes the rest again, up to {format_bytes(max(held.values()))}.",
        {"kind": "checkpoint", "modules": list(held)},
    )


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
