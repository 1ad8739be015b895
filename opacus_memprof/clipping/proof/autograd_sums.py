# SPDX-License-Identifier: Apache-2.0
"""Computes sums of gradients by plain autograd, and compares them with the sums that layers have computed."""

import math
from collections.abc import Callable, Iterable

import torch
from torch import nn

from opacus_memprof.clipping.proof.recorder import Sum

Gradients = dict[nn.Parameter, "torch.Tensor | None"]


def add_gradients(outputs: list[torch.Tensor], given: list[torch.Tensor], total: Gradients) -> None:
    """Adds gradients of parameters by plain autograd, in place where there is one already.

    It calls `backward` rather than `grad`, which reentrant checkpoints do not support. The parameters' own gradients do
    not change.

    Args:
        outputs: tensors that depend on the parameters.
        given: the gradients of the outputs.
        total: the gradients so far by parameter; None for parameters that no output has depended on.
    """
    before = [p.grad for p in total]
    try:
        for p, gradient in total.items():
            p.grad = gradient
        torch.autograd.backward(outputs, given)
        total.update({p: p.grad for p in total})
    finally:
        for p, grad in zip(total, before, strict=True):
            p.grad = grad


def _all_real(gradients: Gradients) -> Gradients:
    """Returns complex gradients as pairs of real numbers, as the layers store them."""
    return {p: torch.view_as_real(g) if g is not None and g.is_complex() else g for p, g in gradients.items()}


_OTHER_SCALE = 1.1


def wrong_sums(
    found: Iterable[tuple[nn.Parameter, Sum]], autograd: Callable[[float], Gradients]
) -> tuple[dict[nn.Parameter, float], bool]:
    """Returns the parameters whose sums differ from autograd's by more than rounding.

    Args:
        found: the sums of the layers, once for each parameter. Consumed after `autograd` has returned.
        autograd: returns autograd's gradients, for outputs' gradients that are multiplied by a number.

    Returns:
        The errors by parameter, relative to the gradient's norm, and whether all numbers are finite; other numbers
        prove nothing.
    """
    expected = _all_real(autograd(1.0))
    owned = [(p, own.dtype, _distance(own.total, expected.get(p))) for p, own in found]
    measured = {p: _norm(g) for p, g in expected.items() if g is not None}
    norms = dict(zip(measured, _numbers(measured.values()), strict=True))
    of_all = math.hypot(*norms.values())
    wrong: dict[nn.Parameter, float] = {}
    is_finite = math.isfinite(of_all)
    for (parameter, dtype, _), error in zip(owned, _numbers(each for *_, each in owned), strict=True):
        norm = norms.get(parameter, 0.0)
        if not math.isfinite(error) or not math.isfinite(norm):
            is_finite = False
        elif error > precision(dtype, parameter) * norm + 6.4 * torch.finfo(dtype).eps * of_all:
            wrong[parameter] = error
    if wrong and is_finite:
        # Gradients may cancel to less than their rounding errors, which differ for other numbers.
        again = _all_real(autograd(_OTHER_SCALE))
        for parameter, error in list(wrong.items()):
            gradient, first = again.get(parameter), expected.get(parameter)
            rounding = 0.0 if gradient is None else float(_distance(gradient / _OTHER_SCALE, first))
            if error <= 8 * rounding:
                del wrong[parameter]
    return {p: error / max(norms.get(p, 0.0), 1e-30) for p, error in wrong.items()}, is_finite


def _distance(a: torch.Tensor, b: torch.Tensor | None) -> torch.Tensor:
    return _norm(a if b is None else a - b.view_as(a).to(a.dtype))


def _norm(x: torch.Tensor) -> torch.Tensor:
    """Returns the norm as a scalar, in double precision."""
    dtype = torch.complex128 if x.is_complex() else torch.float64
    norm: torch.Tensor = torch.linalg.vector_norm(x.detach(), dtype=dtype)
    return norm


def _numbers(scalars: Iterable[torch.Tensor]) -> list[float]:
    """Returns the values of scalars, which may be on several devices. The host waits once for each device."""
    scalars = list(scalars)
    found = [0.0] * len(scalars)
    for device in dict.fromkeys(each.device for each in scalars):
        places = [i for i, each in enumerate(scalars) if each.device == device]
        for i, value in zip(places, torch.stack([scalars[i].real for i in places]).tolist(), strict=True):
            found[i] = value
    return found


def precision(dtype: torch.dtype, parameter: torch.Tensor) -> float:
    """Returns the relative difference to autograd's sum that rounding in another order may cause.

    It is relative to the norm of the sum of a parameter's gradients.
    """
    if parameter.is_cuda and dtype == torch.float32 and torch.get_float32_matmul_precision() != "highest":
        return 1e-2
    return {torch.float64: 1e-7, torch.complex128: 1e-7, torch.bfloat16: 2e-2, torch.float16: 5e-3}.get(dtype, 1e-3)
