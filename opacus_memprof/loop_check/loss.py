# SPDX-License-Identifier: Apache-2.0
"""Checks the loss: by which constants it is multiplied, how it is reduced, and whether it mixes samples."""

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch

from opacus_memprof.loop_check.by_hand import is_close, only, run_again, size_of
from opacus_memprof.loop_check.records import Call, Findings, LogicalStep


class LossScale:
    """Finds the constants that a loss was multiplied by right before backward."""

    def __init__(self) -> None:
        self._scaled: set[int] = set()  # ids of the last nodes of scaled losses' graphs

    def on_scaler(self, original: Any, scaler: Any, /, outputs: Any) -> Any:
        """Wraps GradScaler.scale."""
        scaled = original(scaler, outputs)
        if isinstance(scaled, torch.Tensor) and scaled is not outputs:
            self._scaled.add(id(scaled))
        return scaled

    def factor_of(self, tensors: Any) -> tuple[float, bool]:
        """Returns the product of the factors of a loss.

        Args:
            tensors: the tensors from which backward starts.

        Returns:
            The factor, and whether it is that of a GradScaler.
        """
        loss = tensors[0] if isinstance(tensors, (list, tuple)) and tensors else tensors
        if not isinstance(loss, torch.Tensor):
            return 1.0, False
        scaled = id(loss) in self._scaled
        self._scaled.clear()
        factor, node = 1.0, loss.grad_fn
        while node is not None and node.name() in ("MulBackward0", "DivBackward0"):
            constant = _constant(node)
            if not constant:
                break
            factor = factor * constant if node.name() == "MulBackward0" else factor / constant
            node = node.next_functions[0][0] or node.next_functions[-1][0]
        return factor, scaled


def _constant(node: Any) -> float | None:
    """Returns the operand of a product or quotient that has no gradient."""
    inputs = [each for each, _ in node.next_functions]
    if sum(each is not None for each in inputs) != 1:
        return None
    try:
        other = node._saved_other if inputs[0] is not None else node._saved_self
    except (AttributeError, RuntimeError):  # none, or freed
        return None
    if isinstance(other, torch.Tensor):
        return float(other) if other.numel() == 1 else None
    return float(other) if isinstance(other, (int, float)) else None


def check_scale(step: LogicalStep, norms: Sequence[float], is_automatic: bool, findings: Findings) -> None:
    """Finds a constant that multiplies the loss, and with it the norms that are compared with the bound.

    Args:
        step: the recorded data.
        norms: the samples' gradient norms, computed by hand; empty if they are unknown.
        is_automatic: whether gradients are normalized instead of clipped, so that a constant has no effect.
        findings: receives the defect or the note.
    """
    factors = {batch.factor for batch in step.batches}
    factor = max(factors, key=lambda f: abs(math.log(abs(f) or 1.0)), default=1.0)
    if factor == 1.0 or factor == 0.0:
        return
    scaled = any(batch.scaled for batch in step.batches)
    who = "GradScaler multiplies" if scaled else "The script multiplies"
    bounds = [batch.bound for batch in step.batches if isinstance(batch.bound, float)]
    if not norms or not bounds:
        sentence = f"{who} the loss by {factor:.6g} before backward, and the norms with it."
    else:
        with_scale = sum(norm > bounds[0] for norm in norms) / len(norms)
        without = sum(norm / abs(factor) > bounds[0] for norm in norms) / len(norms)
        sentence = (
            f"{who} the loss by {factor:.6g} before backward, so that the samples' gradient norms are that many "
            f"times as large: {with_scale:.0%} of the samples are clipped to {bounds[0]:.4g}, and {without:.0%} "
            "would be without the factor."
        )
    if scaled and not is_automatic:
        findings.defect(f"{sentence} Train without GradScaler (bfloat16 needs none).", "scale")
    else:
        findings.note(sentence, "scale")


def check_reduction(step: LogicalStep, declared: str, findings: Findings) -> None:
    """Finds losses that are reduced otherwise than the `loss_reduction` that was declared."""
    for other in sorted({kind for batch in step.batches for kind in batch.reductions} - {declared}):
        findings.defect(
            f"The loss is a {other} over the samples, but loss_reduction={declared!r} was declared: a sample's "
            "norm, and with it what is clipped, depends on how many samples are in the batch. Pass "
            f"loss_reduction={other!r}, or reduce the loss as declared.",
            "reduction",
        )


def check_inner_loss(call: Call, findings: Findings) -> None:
    """Finds a loss that the model computes, and that is not the mean or sum of its samples' losses.

    Raises:
        NotCheckedError: the model cannot be run on single samples.
    """
    losses = _mixing_loss(call)
    if losses is not None:
        of_batch, of_samples = losses
        findings.defect(
            f"The loss that the model computes is {of_batch:.4g} for the batch, but the "
            f"{call.root.hooks.loss_reduction} of its samples' losses is {of_samples:.4g}: a sample's share "
            "depends on the other samples, as in a mean over all valid labels. Return a loss for each sample.",
            "inner loss",
        )


def _mixing_loss(call: Call) -> tuple[float, float] | None:
    """Returns the loss that a model computes, and that of its samples, if they differ.

    Raises:
        NotCheckedError: the model cannot be run on single samples.
    """
    scalars = [i for i, x in call.outputs.items() if x.dim() == 0 and i in call.cotangents]
    size = size_of(call)
    if size < 2 or not scalars:
        return None
    alone = [run_again(call, functools.partial(only, n, size)) for n in range(size)]
    for i in scalars:
        total = torch.stack([found[i].detach().double() for found in alone]).sum()
        of_samples = total / size if call.root.hooks.loss_reduction == "mean" else total
        if not is_close(of_samples.to(call.outputs[i].dtype), call.outputs[i]):
            return float(call.outputs[i]), float(of_samples)
    return None
