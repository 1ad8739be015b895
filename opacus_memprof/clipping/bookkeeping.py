# SPDX-License-Identifier: Apache-2.0
"""Bookkeeping: what the backward passes since the last step have kept, and the clip factors that follow from it.

Book-keeping as in Bu et al. 2023 (arXiv 2210.00038): norms are complete only when backward has reached the first
layer, so each layer keeps what its clipped sum needs, and the sums are formed afterwards.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import nn

from opacus_memprof.clipping.layers import KeptTensors, Layer
from opacus_memprof.clipping.norm_check import NormCheck
from opacus_memprof.clipping.workspace import Workspace
from opacus_memprof.errors import MemprofError


@dataclass
class BackwardPass:
    """What the backward of one physical batch has kept.

    Attributes:
        batch_size: of the physical batch.
        kept: by layer.
        sums: clipped sums, by parameter, that a second backward has formed already.
        clipped: whether ``sums`` is used instead of ``kept``.
    """

    batch_size: int
    kept: dict[Layer, KeptTensors] = field(default_factory=dict)
    sums: dict[nn.Parameter, torch.Tensor] = field(default_factory=dict)
    clipped: bool = False


class Bookkeeping:
    """What each layer's backward keeps until the optimizer's step. The module adds to it, the optimizer empties it.

    Attributes:
        max_grad_norm: clipping bound C; the optimizer's ``max_grad_norm`` refers to it.
        norms: per-sample gradient norms of the last clipped batch, [B]. Not private.
        mode: what the next backward does: "keep" what clipped sums need; "norms" only, as the first of two passes; or
            form the "sums", as the second.
        passes_in_last_step: number of backward passes that the last ``pop_clipped_sums`` has summed up.
    """

    def __init__(self, max_grad_norm: float, loss_reduction: str, workspace: Workspace) -> None:
        self.max_grad_norm = max_grad_norm
        self.loss_reduction = loss_reduction
        self.workspace = workspace
        self.accumulation_allowed = True
        self.norms: torch.Tensor | None = None
        self.passes_in_last_step = 1
        self.mode: Literal["keep", "norms", "sums"] = "keep"
        self._passes: list[BackwardPass] = []
        self._new_pass = True
        self._norm_checks: list[NormCheck] = []

    def begin_pass(self) -> None:
        """Called before each forward: the next backward belongs to a new pass."""
        self._new_pass = True

    def clear(self) -> None:
        """Drops everything that is kept."""
        self._passes.clear()
        self._norm_checks.clear()
        self._new_pass = True

    def kept_tensors(self) -> Iterator[tuple[str, str, torch.Tensor]]:
        """All tensors that are kept: (the profiler's category, name of the layer, tensor)."""
        for each in self._passes:
            for layer, kept in each.kept.items():
                yield from ((category, layer.name, tensor) for category, tensor in kept.tensors())

    def kept_tensors_of(self, layer: Layer) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors that the newest pass keeps for a layer: (the profiler's category, tensor)."""
        newest = self._passes[-1]
        if layer in newest.kept:
            yield from newest.kept[layer].tensors()
        for parameter in layer.trainable():
            if parameter in newest.sums:
                yield "summed_gradients", newest.sums[parameter]

    def add(self, layer: Layer, x: torch.Tensor | None, g: torch.Tensor) -> None:
        """Adds one layer's backward.

        Args:
            layer: the layer.
            x: its input, [B, ...]; None where it is not needed.
            g: the gradient of its output, [B, ...].

        Raises:
            MemprofError: the layer saw another batch size than the layers before, or is used twice in a forward.
            ValueError: a second backward without a step, where gradients must not accumulate (as Opacus does).
        """
        current = self._current_pass(len(g))
        if len(g) != current.batch_size:
            raise MemprofError(
                f"{layer.describe()} saw a batch of {len(g)}, but other layers saw {current.batch_size}. Every "
                "trainable layer must see the batch as its first dimension: expand inputs that are broadcast over the "
                "batch (position indices of shape [1, T]) to [B, T], and do not fold other dimensions into the batch."
            )
        if self.mode == "sums":
            for parameter, total in layer.sums_of_scaled_gradients(x, g, self.workspace).items():
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
            current.kept[layer] = KeptTensors(torch.stack(list(norms)).sum(0))
        else:
            current.kept[layer] = layer.keep(x, g, self.workspace)

    def _current_pass(self, batch_size: int) -> BackwardPass:
        if self._new_pass or not self._passes:
            if self._passes and not self.accumulation_allowed:
                raise ValueError(
                    "Poisson sampling is not compatible with grad accumulation. You need to call optimizer.step() "
                    "after every forward/backward pass or consider using BatchMemoryManager"
                )
            self._passes.append(BackwardPass(batch_size))
            self._new_pass = False
        return self._passes[-1]

    def factors_of_last_pass(self) -> torch.Tensor:
        """The clip factors, [B], of the newest pass, whose sums a second backward is about to form."""
        self._passes[-1].clipped = True
        return self._factors(self._passes[-1])

    def _factors(self, each: BackwardPass) -> torch.Tensor:
        """The clip factors of a pass, [B]: min(1, C / (norm + 1e-6)) as in Opacus and, for a mean loss, times the batch
        size, since the gradients are those of loss / B."""
        squares = [kept.squared_norms for kept in each.kept.values()]
        by_layer = torch.stack([s.to(squares[0].device, squares[0].dtype) for s in squares])
        scale = each.batch_size if self.loss_reduction == "mean" else 1
        self.norms = by_layer.sum(0).sqrt_().mul_(scale)
        self._norm_checks.append(NormCheck(self.norms, by_layer, [layer.describe() for layer in each.kept]))
        return (self.max_grad_norm / (self.norms + 1e-6)).clamp(max=1.0).mul_(scale)

    def check_norms(self) -> None:
        """Waits until the norms behind all clip factors are known. Raises MemprofError unless they are finite."""
        checks, self._norm_checks = self._norm_checks, []
        for check in checks:
            check.raise_unless_finite()

    def check_complete(self, parameters: dict[nn.Parameter, str]) -> None:
        """Checks that every pass has a gradient for each parameter.

        Args:
            parameters: their names.

        Raises:
            MemprofError: a parameter has no gradient, or there was no backward pass.
        """
        if not self._passes:
            raise MemprofError(
                "optimizer.step() was called without a backward pass since the last step or zero_grad()."
            )
        for each in self._passes:
            present = {parameter for layer in each.kept for parameter in layer.trainable()}
            missing = [name for parameter, name in parameters.items() if parameter not in present]
            if missing:
                raise MemprofError(
                    f"no gradient reached {', '.join(missing)}: not used in the forward, or in eval mode. Freeze what "
                    "is not trained with requires_grad_(False)."
                )

    def pop_clipped_sums(self) -> Iterator[tuple[nn.Parameter, torch.Tensor]]:
        """Removes what is kept, and yields each parameter with its clipped sum, once for every pass. Call
        ``check_norms`` before the sums are used."""
        factors = [None if each.clipped else self._factors(each) for each in self._passes]
        passes, self._passes = self._passes, []
        self._new_pass = True
        self.passes_in_last_step = len(passes)
        for each, factor in zip(passes, factors, strict=True):
            yield from each.sums.items()
            each.sums.clear()
            while factor is not None and each.kept:
                layer, kept = each.kept.popitem()
                yield from layer.clipped_sums(kept, factor.to(kept.squared_norms), self.workspace)
