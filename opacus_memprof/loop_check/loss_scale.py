# SPDX-License-Identifier: Apache-2.0
"""Constant factors of a loss, from a GradScaler or from the program."""

from typing import Any

import torch


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
