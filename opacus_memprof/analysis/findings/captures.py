# SPDX-License-Identifier: Apache-2.0
"""Finds activations that Opacus captured in a forward pass and that no backward pass has used."""

from collections.abc import Iterator

from opacus_memprof.analysis.findings.run import Run, common_module, largest
from opacus_memprof.profiles.profile import Finding
from opacus_memprof.profiles.units import format_bytes, format_count

_EVALUATE = (
    "run forwards that no backward follows under torch.no_grad() or in model.eval(); to go on after one, delete "
    "`module.activations` and set `parameter._forward_counter` to 0, for zero_grad does neither"
)
_CHECKPOINT = (
    "checkpoint with use_reentrant=True, which Opacus can follow, or train without checkpointing: Opacus captures in "
    "the forward and again in its repetition, and the backward releases one of the two"
)


def captures_without_backward(run: Run) -> Iterator[Finding]:
    """Finds captures that were outstanding through several forwards, or when an optimizer step failed."""
    facts = run.facts_of("captures")
    if not facts:
        return
    captured = {module: fact for module, fact in facts if fact["captures"]}
    sizes = {module: fact["bytes"] for module, fact in facts if fact["bytes"]}
    total = sum(sizes.values())
    count = sum(fact["captures"] for fact in captured.values())
    checkpointing = any(fact["recomputed"] for fact in captured.values())
    failed = any(fact["failed"] for fact in captured.values())
    if any(fact["refused"] for fact in captured.values()):
        consequence = "ghost clipping refuses to capture once more, in words that speak of tied parameters"
    elif failed:
        consequence = "the step failed, because grad_sample stays None until every capture has met its backward"
    else:
        consequence = "the next optimizer step will fail, because grad_sample stays None"
    places = format_count(len(captured), "module")
    yield Finding(
        "checkpoint_captures" if checkpointing else "captures_without_backward",
        common_module(captured),
        total,
        f"{count} captures in {places} await a backward pass that does not come, and keep {format_bytes(total)} of "
        f"activations alive ({largest(sizes)}); {consequence}",
        _CHECKPOINT if checkpointing else _EVALUATE,
        captures={module: fact["captures"] for module, fact in captured.items()},
        modules=sizes,
    )
