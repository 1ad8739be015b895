# SPDX-License-Identifier: Apache-2.0
"""Rules that compute clip factors from per-sample gradient norms."""

import math
from collections.abc import Sequence
from typing import Literal

import torch

from opacus_memprof.clipping.arguments import check_bound, is_bound
from opacus_memprof.errors import MemprofError

Clipping = Literal["flat", "per_layer", "adaptive", "automatic"]
CLIPPINGS: tuple[Clipping, ...] = ("flat", "per_layer", "adaptive", "automatic")
_STABILITY = 1e-6  # as in Opacus
_AUTOMATIC_STABILITY = 0.01  # gamma in Bu et al. 2023, arXiv 2206.07136


class ClipRule:
    """How gradients are clipped.

    Args:
        clipping: "flat" and "adaptive" clip the gradient of all parameters to one bound, "per_layer" clips that of each
            parameter to its own bound, and "automatic" normalizes all gradients to the bound (Bu et al. 2023, arXiv
            2206.07136).
        bound: the bound C; for "per_layer" one for each trainable parameter, in the optimizer's order.

    Attributes:
        bound: the bound of a sample's gradient; for "per_layer" the root of the sum of the squared bounds.
        bounds: for "per_layer" the bounds of the parameters; otherwise empty.

    Raises:
        MemprofError: the bound is not positive and finite, or not of the right kind.
    """

    def __init__(self, clipping: Clipping, bound: float | Sequence[float]) -> None:
        if clipping not in CLIPPINGS:
            raise MemprofError(f"clipping is {clipping!r}; flash_clip knows {', '.join(map(repr, CLIPPINGS))}.")
        check_bound(bound, clipping)
        self.clipping = clipping
        self.bounds: list[float] = []
        if clipping == "per_layer":
            assert isinstance(bound, Sequence)
            self.bounds = [float(each) for each in bound]
            self.bound = math.hypot(*self.bounds)
        else:
            self.bound = float(bound)  # type: ignore[arg-type]
        self._given = self.bounds, self.bound

    @property
    def by_parameter(self) -> bool:
        """Whether parameters have factors of their own."""
        return self.clipping == "per_layer"

    def set_bound(self, bound: float) -> None:
        """Changes the bound of a sample's gradient, and the bounds of parameters in the same ratio.

        Noise is proportional to `bound`: with unchanged bounds of parameters it would be too small after `bound` falls.

        Raises:
            MemprofError: the bound is not positive and finite.
        """
        if not is_bound(bound):
            raise MemprofError(f"max_grad_norm would become {bound!r}; give a positive and finite number.")
        bounds, given = self._given  # the given bounds, not the last ones, whose rounding errors would accumulate
        self.bound = float(bound)
        self.bounds = bounds.copy() if self.bound == given else [each * (self.bound / given) for each in bounds]

    def factors(self, norms: torch.Tensor) -> torch.Tensor:
        """Returns the clip factors, [B], of gradients whose norms are `norms`, [B].

        They are min(1, C / norm), or C / (norm + 0.01) for "automatic". A gradient times its factor has a norm of at
        most C, which is the sensitivity of a sum of such gradients to one sample.
        """
        if self.clipping == "automatic":
            return self.bound / (norms + _AUTOMATIC_STABILITY)
        return (self.bound / (norms + _STABILITY)).clamp(max=1.0)

    def factors_of(self, index: int, norms: torch.Tensor) -> torch.Tensor:
        """Returns the clip factors, [B], for the gradients of the parameter at `index` in the optimizer."""
        return (self.bounds[index] / (norms + _STABILITY)).clamp(max=1.0)
