# SPDX-License-Identifier: Apache-2.0
"""What the backward passes since the last step left behind, and the clip factors that follow from it.

Book-keeping as in Bu et al. 2023 (arXiv 2210.00038): norms are complete only when backward has reached the first
layer, so each layer keeps what its clipped sum needs, and the sums are formed afterwards.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import nn

from opacus_memprof.clipping.layers import Kept, Layer
from opacus_memprof.clipping.verdict import Verdict
from opacus_memprof.clipping.workspace import Workspace
from opacus_memprof.errors import MemprofError


@dataclass
class Pass:
    """One forward and backward of one physical batch."""

    batch: int
    kept: dict[Layer, Kept] = field(default_factory=dict)
    sums: dict[nn.Parameter, torch.Tensor] = field(default_factory=dict)  # of a second backward, clipped already
    clipped: bool = False


class Book:
    """Shared by the module that fills it and the optimizer that empties it.

    Attributes:
        max_grad_norm: clipping bound C; the optimizer's ``max_grad_norm`` is this one.
        norms: per-sample gradient norms of the last clipped batch, [B]. Not private.
        consumed: backward passes in the last ``clipped_sums``.
    """

    def __init__(self, max_grad_norm: float, loss_reduction: str, workspace: Workspace) -> None:
        self.max_grad_norm = max_grad_norm
        self.loss_reduction = loss_reduction
        self.workspace = workspace
        self.accumulation_allowed = True
        self.norms: torch.Tensor | None = None
        self.consumed = 1
        self.mode: Literal["keep", "norms", "sums"] = "keep"
        self._passes: list[Pass] = []
        self._new_pass = True
        self._unverified: list[Verdict] = []

    def begin(self) -> None:
        """The next backward belongs to a new forward."""
        self._new_pass = True

    def clear(self) -> None:
        self._passes.clear()
        self._unverified.clear()
        self._new_pass = True

    def holdings(self) -> Iterator[tuple[str, str, torch.Tensor]]:
        """What is kept now: (the profiler's category, name of the layer, tensor)."""
        for done in self._passes:
            for layer, kept in done.kept.items():
                yield from ((category, layer.name, tensor) for category, tensor in kept.holdings())

    def taken(self, layer: Layer) -> Iterator[tuple[str, torch.Tensor]]:
        """What the newest pass holds of this layer: (the profiler's category, tensor)."""
        newest = self._passes[-1]
        if layer in newest.kept:
            yield from newest.kept[layer].holdings()
        for parameter in layer.trainable():
            if parameter in newest.sums:
                yield "summed_gradients", newest.sums[parameter]

    def take(self, layer: Layer, x: torch.Tensor | None, g: torch.Tensor) -> None:
        """Books one layer's backward. ``x`` is its input (None where not needed), ``g`` the output's gradient.

        Raises:
            MemprofError: the layer saw another batch size than the layers before, or is used twice in a forward.
            ValueError: a second backward without a step, where gradients must not accumulate (as Opacus does).
        """
        current = self._current(len(g))
        if len(g) != current.batch:
            raise MemprofError(
                f"{layer.describe()} saw a batch of {len(g)}, but other layers saw {current.batch}. Every trainable "
                "layer must see the batch as its first dimension: expand inputs that are broadcast over the batch "
                "(position indices of shape [1, T]) to [B, T], and do not fold other dimensions into the batch."
            )
        if self.mode == "sums":
            for parameter, total in layer.sums_of_scaled(x, g, self.workspace).items():
                current.sums[parameter] = total.to(parameter.dtype)
            return
        if layer in current.kept:
            raise MemprofError(
                f"{layer.describe()} was used twice before a step: shared layers, or several forwards for one "
                "backward, cannot be clipped exactly. Call the model once for each backward, or use "
                "grad_sample_mode='hooks'."
            )
        if self.mode == "norms":
            norms = layer.parameter_squared_norms(x, g, self.workspace).values()
            current.kept[layer] = Kept(torch.stack(list(norms)).sum(0))
        else:
            current.kept[layer] = layer.keep(x, g, self.workspace)

    def _current(self, batch: int) -> Pass:
        if self._new_pass or not self._passes:
            if self._passes and not self.accumulation_allowed:
                raise ValueError(
                    "Poisson sampling is not compatible with grad accumulation. You need to call optimizer.step() "
                    "after every forward/backward pass or consider using BatchMemoryManager"
                )
            self._passes.append(Pass(batch))
            self._new_pass = False
        return self._passes[-1]

    def last_factors(self) -> torch.Tensor:
        """Clip factors of the newest pass, whose sums a second backward is about to form."""
        self._passes[-1].clipped = True
        return self._factors(self._passes[-1])

    def _factors(self, done: Pass) -> torch.Tensor:
        """What each sample's booked gradient is multiplied with: min(1, C / (norm + 1e-6)) as in Opacus and, for a
        mean loss, the batch size, since the booked gradients are those of loss / B. Shape [B]."""
        squares = [kept.squared_norms for kept in done.kept.values()]
        total = torch.stack([s.to(squares[0].device, squares[0].dtype) for s in squares])
        scale = done.batch if self.loss_reduction == "mean" else 1
        self.norms = total.sum(0).sqrt_().mul_(scale)
        self._unverified.append(Verdict(self.norms, total, [layer.describe() for layer in done.kept]))
        return (self.max_grad_norm / (self.norms + 1e-6)).clamp(max=1.0).mul_(scale)

    def verify(self) -> None:
        """Waits until the norms behind all factors are known. Raises MemprofError unless they are finite."""
        verdicts, self._unverified = self._unverified, []
        for verdict in verdicts:
            verdict.require_finite()

    def require(self, parameters: dict[nn.Parameter, str]) -> None:
        """Raises MemprofError unless every pass has booked every one of ``parameters`` (to name)."""
        if not self._passes:
            raise MemprofError(
                "optimizer.step() was called without a backward pass since the last step or zero_grad()."
            )
        for done in self._passes:
            booked = {parameter for layer in done.kept for parameter in layer.trainable()}
            missing = [name for parameter, name in parameters.items() if parameter not in booked]
            if missing:
                raise MemprofError(
                    f"no gradient reached {', '.join(missing)}: not used in the forward, or in eval mode. Freeze what "
                    "is not trained with requires_grad_(False)."
                )

    def clipped_sums(self) -> Iterator[tuple[nn.Parameter, torch.Tensor]]:
        """Empties the book: each parameter with its clipped sum, once for every pass. Call ``verify`` before use."""
        factors = [None if done.clipped else self._factors(done) for done in self._passes]
        passes, self._passes = self._passes, []
        self._new_pass = True
        self.consumed = len(passes)
        for done, factor in zip(passes, factors, strict=True):
            yield from done.sums.items()
            done.sums.clear()
            while factor is not None and done.kept:
                layer, kept = done.kept.popitem()
                yield from layer.clipped_sums(kept, factor.to(kept.squared_norms), self.workspace)
