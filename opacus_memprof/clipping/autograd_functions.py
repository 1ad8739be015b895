# SPDX-License-Identifier: Apache-2.0
"""Autograd functions whose forward is the identity: GradientTap and CallTap, on the outputs of layers, and
TwoPassBackward, on the model's outputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from opacus_memprof.clipping.arrangement import Arrangement
from opacus_memprof.clipping.bookkeeping import Bookkeeping
from opacus_memprof.clipping.layers import Layer
from opacus_memprof.clipping.repetition import Call


class GradientTap(torch.autograd.Function):
    """The identity on a layer's output. Its backward passes the output's gradient, and the layer's input, to
    ``bookkeeping.add``.

    The input is saved through autograd, so that activation checkpointing, saved-tensor hooks and the check for in-place
    changes apply to it as to any activation, and it is freed after the backward. ``call`` has the layer, the
    bookkeeping, where both have the samples, unless these are their first dimension, and the number of samples. The
    output is detached instead of a view, so that an in-place activation may follow.
    """

    @staticmethod
    def forward(
        ctx: Any,
        output: torch.Tensor,
        anchor: torch.Tensor | None,
        x: torch.Tensor | None,
        call: tuple[Layer, Bookkeeping, Arrangement | None, int],
    ) -> torch.Tensor:
        ctx.call = call
        if x is not None:
            ctx.save_for_backward(x)
        return output.detach()

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> Any:
        # Only a backward that makes a graph itself needs the error of a second derivative, which takes time to prepare.
        return (_add_once_differentiable if torch.is_grad_enabled() else _add)(ctx, g)


def _add(ctx: Any, g: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
    layer, bookkeeping, where, batch = ctx.call
    saved = ctx.saved_tensors
    x, by_sample = saved[0] if saved else None, g
    if where is not None:
        by_sample = where.by_sample(g, batch)
        x = None if x is None else where.by_sample(x, batch)
    if torch.is_autocast_enabled(g.device.type):
        # Backward may be called under it; the input has been cast in forward already.
        with torch.autocast(g.device.type, enabled=False):
            bookkeeping.add(layer, x, by_sample)
    else:
        bookkeeping.add(layer, x, by_sample)
    return g, None, None, None


_add_once_differentiable = once_differentiable(_add)


class CallTap(torch.autograd.Function):
    """The identity on a module's outputs. Its backward passes the module's call, and the outputs' gradients, to
    ``bookkeeping.add``. As in GradientTap, the inputs are saved through autograd."""

    @staticmethod
    def forward(
        ctx: Any,
        layer: Layer,
        bookkeeping: Bookkeeping,
        call: Call,
        count: int,
        anchor: torch.Tensor | None,
        *tensors: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        ctx.layer, ctx.bookkeeping, ctx.call, ctx.inputs = layer, bookkeeping, call, len(tensors) - count
        ctx.save_for_backward(*tensors[count:])
        return tuple(output.detach() for output in tensors[:count])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        with torch.autocast(gradients[0].device.type, enabled=False):
            ctx.bookkeeping.add(ctx.layer, ctx.call.with_tensors(ctx.saved_tensors), list(gradients))
        return (None, None, None, None, None, *gradients, *[None] * ctx.inputs)


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
    bookkeeping.begin_two_passes()
    tensors, gradients = [o for o, _ in outputs], [g for _, g in outputs]
    try:
        bookkeeping.mode = "norms"
        torch.autograd.backward(tensors, gradients, retain_graph=True)
        while bookkeeping.must_repeat_norms():
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
