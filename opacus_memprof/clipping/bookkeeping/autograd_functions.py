# SPDX-License-Identifier: Apache-2.0
"""Functions that backward calls at the outputs of layers and of the model.

Outputs of layers have `receive_gradient` (called by a C++ node or by GradientTap) or CallTap. Outputs of the model have
TwoPassBackward. The forward of each autograd function is the identity.
"""

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from opacus_memprof.clipping.bookkeeping import Bookkeeping
from opacus_memprof.clipping.forwards.repetition import Call
from opacus_memprof.clipping.forwards.state import Arrangement
from opacus_memprof.clipping.kernels.native import is_backward_of_inputs
from opacus_memprof.clipping.layers import Layer
from opacus_memprof.errors import MemprofError

TappedCall = tuple[Layer, Bookkeeping, "Arrangement | None", int, int]


def receive_gradient(call: TappedCall, x: torch.Tensor | None, g: torch.Tensor) -> None:
    """Passes a layer's input and the gradient of its output to `bookkeeping.add`.

    Args:
        call: the layer, the bookkeeping, the position of the samples in input and output (None for the first
            dimension), the number of samples, and the number of the forward.
        x: the input; None where it is not needed.
        g: the gradient of the output.

    Raises:
        MemprofError: backward runs with create_graph=True.
    """
    layer, bookkeeping, where, batch, forward = call
    if g.requires_grad:
        raise MemprofError(_no_second_derivatives(layer.describe()))
    if where is not None:
        g = where.by_sample(g, batch)
        x = None if x is None else where.by_sample(x, batch)
    _add(bookkeeping, layer, x, g, forward)


def _add(bookkeeping: Bookkeeping, layer: Layer, x: Any, g: Any, forward: int) -> None:
    if bookkeeping.refusal.error is not None or is_backward_of_inputs():
        return
    try:
        bookkeeping.add(layer, x, g, forward)
    except MemprofError as error:
        bookkeeping.refusal.add(error)


def _no_second_derivatives(what: str) -> str:
    return (
        f"backward goes through {what} with create_graph=True, but flash_clip has no second derivatives, so that a "
        "loss of gradients (a gradient penalty, forces, a Hessian) has no per-sample gradients: leave that term out, "
        "or compute it by finite differences."
    )


def _once(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps the backward of an autograd function so that it refuses create_graph=True."""
    differentiable_once = once_differentiable(backward)

    @functools.wraps(backward)
    def checked(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        if torch.is_grad_enabled() and any(g is not None and g.requires_grad for g in gradients):
            layer = getattr(ctx, "layer", None)
            raise MemprofError(_no_second_derivatives(layer.describe() if isinstance(layer, Layer) else "the model"))
        return differentiable_once(ctx, *gradients)

    return checked


class GradientTap(torch.autograd.Function):
    """Replaces `tap_gradient` under compiled autograd, which cannot run C++ nodes of other libraries than torch."""

    @staticmethod
    def forward(
        ctx: Any,
        output: torch.Tensor,
        anchor: torch.Tensor | None,
        x: torch.Tensor | None,
        call: TappedCall,
    ) -> torch.Tensor:
        ctx.call = call
        if x is not None:
            ctx.save_for_backward(x)
        return output.detach()

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        saved = ctx.saved_tensors
        with torch.no_grad(), torch.autocast(g.device.type, enabled=False):
            receive_gradient(ctx.call, saved[0] if saved else None, g)
        return g, None, None, None


def is_compiled_autograd_enabled() -> bool:
    """Returns whether a backward that started now would be compiled."""
    compiled = sys.modules.get("torch._dynamo.compiled_autograd")
    return compiled is not None and (compiled.compiled_autograd_enabled or compiled.in_compiled_autograd_region)


class CallTap(torch.autograd.Function):
    """The identity on a module's outputs, whose backward passes their gradients to `bookkeeping.add`.

    The module's call is passed, too. Inputs are saved through autograd (see csrc/clipping/gradient_tap.h).
    """

    @staticmethod
    def forward(
        ctx: Any,
        layer: Layer,
        bookkeeping: Bookkeeping,
        call: Call,
        forward: int,
        count: int,
        anchor: torch.Tensor | None,
        *tensors: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        ctx.layer, ctx.bookkeeping, ctx.call, ctx.inputs = layer, bookkeeping, call, len(tensors) - count
        ctx.forward_number = forward
        ctx.save_for_backward(*tensors[count:])
        return tuple(output.detach() for output in tensors[:count])

    @staticmethod
    @_once
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        with torch.autocast(gradients[0].device.type, enabled=False):
            call = ctx.call.with_tensors(ctx.saved_tensors)
            _add(ctx.bookkeeping, ctx.layer, call, list(gradients), ctx.forward_number)
        return (None, None, None, None, None, None, *gradients, *[None] * ctx.inputs)


class TwoPassBackward(torch.autograd.Function):
    """The identity on the model's outputs, detached from the model's graph.

    Its backward calls `run` with the outputs that the loss uses and their gradients.
    """

    @staticmethod
    def forward(
        ctx: Any, anchor: torch.Tensor, outputs: list[torch.Tensor], run: Callable[..., None]
    ) -> tuple[torch.Tensor, ...]:
        ctx.outputs, ctx.run = outputs, run
        ctx.set_materialize_grads(False)
        return tuple(output.detach() for output in outputs)

    @staticmethod
    @_once
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[None, None, None]:
        outputs, ctx.outputs = ctx.outputs, []
        ctx.run([(output, g) for output, g in zip(outputs, gradients, strict=True) if g is not None])
        return None, None, None


def run_two_passes(bookkeeping: Bookkeeping, outputs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Runs backward through the model twice: first for the norms, then for the clipped sums.

    The first pass keeps nothing. In the second pass the layers apply the clip factors.

    Args:
        bookkeeping: the bookkeeping of the model.
        outputs: the model's outputs with their gradients.
    """
    refusal = bookkeeping.refusal
    if not outputs or refusal.error is not None:
        return
    try:
        bookkeeping.begin_two_passes()
    except MemprofError as error:
        refusal.add(error)
        return
    tensors, gradients = [o for o, _ in outputs], [g for _, g in outputs]
    try:
        bookkeeping.mode = "norms"
        torch.autograd.backward(tensors, gradients, retain_graph=True)
        while bookkeeping.must_repeat_norms():
            torch.autograd.backward(tensors, gradients, retain_graph=True)
        if refusal.error is not None:
            return
        bookkeeping.begin_sums()
        torch.autograd.backward(tensors, gradients)
    finally:
        bookkeeping.end_two_passes()
