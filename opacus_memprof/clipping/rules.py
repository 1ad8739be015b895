# SPDX-License-Identifier: Apache-2.0
"""Rules for the clip factors: from per-sample gradient norms to the numbers that the gradients are multiplied by."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import torch

from opacus_memprof.errors import MemprofError

Clipping = Literal["flat", "per_layer", "adaptive", "automatic"]
CLIPPINGS: tuple[Clipping, ...] = ("flat", "per_layer", "adaptive", "automatic")
_STABILITY = 1e-6  # as in Opacus
_AUTOMATIC_STABILITY = 0.01  # gamma in Bu et al. 2023, arXiv 2206.07136


class ClipRule:
    """How gradients are clipped.

    Args:
        clipping: "flat" and "adaptive" clip the gradient of all parameters to one bound, "per_layer" that of each
            parameter to its own, and "automatic" normalizes all gradients to the bound (Bu et al. 2023, arXiv
            2206.07136).
        bound: the bound C; for "per_layer" one for each trainable parameter, in the optimizer's order.

    Raises:
        MemprofError: the bound is not positive, or not of the right kind.
    """

    def __init__(self, clipping: Clipping, bound: float | Sequence[float]) -> None:
        if clipping not in CLIPPINGS:
            raise MemprofError(f"clipping is {clipping!r}; flash_clip knows {', '.join(map(repr, CLIPPINGS))}.")
        self.clipping = clipping
        self.bounds: list[float] = []
        if clipping == "per_layer":
            if not isinstance(bound, (list, tuple)) or not bound or not all(each > 0 for each in bound):
                raise MemprofError(
                    f"max_grad_norm is {bound!r}; clipping='per_layer' needs a list with one positive number for each "
                    "trainable parameter."
                )
            self.bounds = list(bound)
            self.bound = math.sqrt(sum(each * each for each in bound))
        elif isinstance(bound, (list, tuple)) or not bound > 0:  # type: ignore[operator]
            raise MemprofError(f"max_grad_norm is {bound!r}; clipping={clipping!r} needs one positive number.")
        else:
            self.bound = bound  # type: ignore[assignment]

    @property
    def by_parameter(self) -> bool:
        """Whether parameters have factors of their own."""
        return self.clipping == "per_layer"

    def factors(self, norms: torch.Tensor) -> torch.Tensor:
        """The factors of gradients whose norms are ``norms``, [B]."""
        if self.clipping == "automatic":
            return self.bound / (norms + _AUTOMATIC_STABILITY)
        return (self.bound / (norms + _STABILITY)).clamp(max=1.0)

    def factors_of(self, index: int, norms: torch.Tensor) -> torch.Tensor:
        """The factors of a parameter's gradients. ``index`` is its place in the optimizer."""
        return (self.bounds[index] / (norms + _STABILITY)).clamp(max=1.0)
