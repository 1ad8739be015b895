# SPDX-License-Identifier: Apache-2.0
"""Two identities in the autograd graph: one that sees a layer's output gradient, one that runs backward twice."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from opacus_memprof.clipping.book import Book
from opacus_memprof.clipping.layers import Layer


class Tap(torch.autograd.Function):
    """Identity on a layer's output; its backward books the layer.

    The input is saved through autograd: activation checkpointing, saved-tensor hooks and the check for in-place
    changes apply to it as to any activation, and it is freed when the backward has passed. The output is detached
    rather than a view, so an in-place activation may follow.
    """

    @staticmethod
    def forward(
        ctx: Any, output: torch.Tensor, anchor: torch.Tensor | None, x: torch.Tensor | None, layer: Layer, book: Book
    ) -> torch.Tensor:
        ctx.layer, ctx.book = layer, book
        if x is not None:
            ctx.save_for_backward(x)
        return output.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None]:
        saved = ctx.saved_tensors
        # Backward may be called under autocast; what is kept was cast in forward already.
        with torch.autocast(g.device.type, enabled=False):
            ctx.book.take(ctx.layer, saved[0] if saved else None, g)
        return g, None, None, None, None


class Gate(torch.autograd.Function):
    """Cuts the graph at the model's outputs: the loss's backward ends here and calls ``run`` with the gradients of
    the outputs (None for those that the loss does not use)."""

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


def run_twice(book: Book, outputs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Norms in a first backward that keeps nothing, clipped sums in a second from rescaled gradients.

    Scaling a sample's output gradient by its clip factor scales all its gradients, since samples do not mix.
    """
    if not outputs:
        return
    tensors, gradients = [o for o, _ in outputs], [g for _, g in outputs]
    try:
        book.mode = "norms"
        torch.autograd.backward(tensors, gradients, retain_graph=True)
        factors = book.last_factors()
        scaled = [
            torch.mul(g, factors.to(g.device).view(-1, *[1] * (g.dim() - 1)), out=torch.empty_like(g))
            for g in gradients
        ]
        del gradients, outputs
        book.mode = "sums"
        torch.autograd.backward(tensors, scaled)
    finally:
        book.mode = "keep"
