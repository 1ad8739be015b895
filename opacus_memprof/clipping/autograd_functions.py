# SPDX-License-Identifier: Apache-2.0
"""Two autograd functions whose forward is the identity: GradientTap, on each layer's output, and TwoPassBackward, on
the model's outputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from opacus_memprof.clipping.bookkeeping import Bookkeeping
from opacus_memprof.clipping.layers import Layer


class GradientTap(torch.autograd.Function):
    """The identity on a layer's output. Its backward passes the output's gradient, and the layer's input, to
    ``bookkeeping.add``.

    The input is saved through autograd, so that activation checkpointing, saved-tensor hooks and the check for in-place
    changes apply to it as to any activation, and it is freed after the backward. The output is detached instead of a
    view, so that an in-place activation may follow.
    """

    @staticmethod
    def forward(
        ctx: Any,
        output: torch.Tensor,
        anchor: torch.Tensor | None,
        x: torch.Tensor | None,
        layer: Layer,
        bookkeeping: Bookkeeping,
    ) -> torch.Tensor:
        ctx.layer, ctx.bookkeeping = layer, bookkeeping
        if x is not None:
            ctx.save_for_backward(x)
        return output.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None]:
        saved = ctx.saved_tensors
        # Backward may be called under autocast; the input has been cast in forward already.
        with torch.autocast(g.device.type, enabled=False):
            ctx.bookkeeping.add(ctx.layer, saved[0] if saved else None, g)
        return g, None, None, None, None


class TwoPassBackward(torch.autograd.Function):
    """The identity on the model's outputs, detached from the model's graph. Its backward calls ``run`` with the outputs
    that the loss uses and their gradients."""

    @staticmethod
    def forward(
        ctx: Any, anchor: torch.Tensor, outputs: list[torch.Tensor], run: Callable[..., None]
    ) -> tuple[torch.Tensor, ...]:
        ctx.outputs, ctx.run = outputs, run
        ctx.set_materialize_grads(False)
        return tuple(output.detach() for output in outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[None, None, None]:
        outputs, ctx.outputs = ctx.outputs, []
        ctx.run([(output, g) for output, g in zip(outputs, gradients, strict=True) if g is not None])
        return None, None, None


def run_two_passes(bookkeeping: Bookkeeping, outputs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Runs backward through the model twice: first for the norms, keeping nothing, then for the clipped sums.

    The second pass starts from output gradients that are multiplied by the clip factors. Scaling a sample's output
    gradient scales all of its gradients, since samples do not mix.

    Args:
        bookkeeping: of the model.
        outputs: the model's outputs with their gradients.
    """
    if not outputs:
        return
    tensors, gradients = [o for o, _ in outputs], [g for _, g in outputs]
    try:
        bookkeeping.mode = "norms"
        torch.autograd.backward(tensors, gradients, retain_graph=True)
        factors = bookkeeping.factors_of_last_pass()
        scaled = [
            torch.mul(g, factors.to(g.device).view(-1, *[1] * (g.dim() - 1)), out=torch.empty_like(g))
            for g in gradients
        ]
        del gradients, outputs
        bookkeeping.mode = "sums"
        torch.autograd.backward(tensors, scaled)
    finally:
        bookkeeping.mode = "keep"
