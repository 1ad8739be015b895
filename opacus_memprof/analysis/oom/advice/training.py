# SPDX-License-Identifier: Apache-2.0
"""Suggestions that change the training itself: the last resort, because another optimizer changes results, and
checkpointing takes time."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import accumulate

from opacus_memprof.analysis.oom.advice.base import TRAINING, Suggestion, suggest
from opacus_memprof.analysis.oom.model_structure import repeated_units
from opacus_memprof.analysis.oom.predict import Case
from opacus_memprof.profiles.oom_report import Action
from opacus_memprof.profiles.units import format_bytes


def checkpoints(case: Case) -> Iterator[Suggestion]:
    """Suggests activation checkpointing of repeated units: each keeps only its input, and backward recomputes its
    activations, one unit at a time. Not for ghost clipping, which runs backward twice."""
    step = case.step
    if step is None or step.mode not in ("", "hooks", "functorch"):
        return
    units = repeated_units(case.shapes.modules)
    inside = {prefix: [layer for layer in step.layers if layer.name.startswith(f"{prefix}.")] for prefix in units}
    activations = {prefix: sum(layer.activations for layer in layers) for prefix, layers in inside.items() if layers}
    if not activations:
        return
    inputs = {layers[0].name: layers[0].forward.input_bytes for layers in inside.values() if layers}
    recomputed: dict[str, int] = {}  # by layer: activations of its unit that are recomputed and not used yet
    for layers in inside.values():
        for layer, size in zip(layers, accumulate(layer.activations for layer in layers), strict=True):
            recomputed[layer.name] = size
    kept = [
        replace(layer, activations=inputs.get(layer.name, 0)) if layer.name in recomputed else layer
        for layer in step.layers
    ]
    left = {"left_behind": case.leftovers.bytes} if case.leftovers.bytes else {}
    instants = [
        replace(each, parts={**each.parts, **left, "recomputed_activations": recomputed.get(each.module, 0)})
        for each in step.with_changes(layers=tuple(kept)).instants(step.samples)
    ]
    yield suggest(
        case,
        max(instants, key=lambda each: each.bytes),
        TRAINING,
        f"checkpoints around {len(activations)} repeated blocks",
        "torch.utils.checkpoint.checkpoint(block, x, use_reentrant=True)  # Opacus supports no other kind",
        f"Blocks hold {format_bytes(sum(activations.values()))} of activations; with checkpoints each keeps its input, "
        f"and one at a time recomputes the rest, up to {format_bytes(max(activations.values()))}.",
        Action(kind="checkpoint", modules=list(activations)),
    )


def optimizer_states(case: Case) -> Iterator[Suggestion]:
    """Suggests an optimizer without states."""
    step = case.step
    if step is None or not step.states or case.history.step_peaks:
        return
    instant = case.peak_of(step.with_changes(states=0, update=0))
    yield suggest(
        case,
        instant,
        TRAINING,
        "SGD without momentum in the place of " + case.shapes.optimizer,
        "torch.optim.SGD(model.parameters(), lr=...)",
        f"{case.shapes.optimizer} keeps {format_bytes(step.states)}, and its step makes {format_bytes(step.update)} "
        "more for a time.",
        Action(kind="optimizer", value="SGD"),
    )
