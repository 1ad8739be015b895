# SPDX-License-Identifier: Apache-2.0
"""Sums of gradients by plain autograd, and whether the sums that layers have found agree with them."""

import math
from collections.abc import Callable, Iterable, Mapping

import torch
from torch import nn

from opacus_memprof.clipping.proof.recorder import Sum


def autograd_gradients(
    outputs: list[torch.Tensor], given: list[torch.Tensor], parameters: list[nn.Parameter]
) -> dict[nn.Parameter, torch.Tensor | None]:
    """Returns the gradients of parameters by plain autograd; None for parameters that the outputs do not depend on.

    It calls `backward` rather than `grad`, which reentrant checkpoints do not support. The parameters' own gradients
    stay as they were."""
    before = [p.grad for p in parameters]
    try:
        for p in parameters:
            p.grad = None
        torch.autograd.backward(outputs, given)
        return {p: None if p.grad is None else _real(p.grad) for p in parameters}
    finally:
        for p, grad in zip(parameters, before, strict=True):
            p.grad = grad


def _real(x: torch.Tensor) -> torch.Tensor:
    """Returns complex numbers as two real ones, as the layers have them."""
    return torch.view_as_real(x) if x.is_complex() else x


Gradients = Mapping[nn.Parameter, "torch.Tensor | None"]
_OTHER_SCALE = 1.1


def wrong_sums(
    found: Iterable[tuple[nn.Parameter, Sum]], autograd: Callable[[float], Gradients]
) -> tuple[dict[nn.Parameter, float], bool]:
    """Returns the parameters whose sums differ from autograd's by more than rounding.

    Args:
        found: what the layers have found, once for each parameter. It is gone through after `autograd`.
        autograd: what autograd finds for outputs' gradients that are multiplied by a number.

    Returns:
        The errors by parameter, relative to the gradient's norm, and whether all numbers are finite: others prove
        nothing.
    """
    expected = autograd(1.0)
    norms = {p: 0.0 if g is None else vector_norm(g) for p, g in expected.items()}
    of_all = math.hypot(*norms.values())
    wrong: dict[nn.Parameter, float] = {}
    is_finite = math.isfinite(of_all)
    for parameter, own in found:
        error, norm = _distance(own.total, expected.get(parameter)), norms.get(parameter, 0.0)
        if not math.isfinite(error) or not math.isfinite(norm):
            is_finite = False
        elif error > precision(own.dtype, parameter) * norm + 6.4 * torch.finfo(own.dtype).eps * of_all:
            wrong[parameter] = error
    if wrong and is_finite:
        # Gradients may cancel to less than their rounding, which other numbers round in another way.
        again = autograd(_OTHER_SCALE)
        for parameter, error in list(wrong.items()):
            gradient, first = again.get(parameter), expected.get(parameter)
            rounding = 0.0 if gradient is None else _distance(gradient / _OTHER_SCALE, first)
            if error <= 8 * rounding:
                del wrong[parameter]
    return {p: error / max(norms.get(p, 0.0), 1e-30) for p, error in wrong.items()}, is_finite


def _distance(a: torch.Tensor, b: torch.Tensor | None) -> float:
    return vector_norm(a if b is None else a - b.view_as(a).to(a.dtype))


def precision(dtype: torch.dtype, parameter: torch.Tensor) -> float:
    """Returns by how much, relative to its norm, the sum of a parameter's gradients may differ from autograd's, which
    rounds in another order."""
    if parameter.is_cuda and dtype == torch.float32 and torch.get_float32_matmul_precision() != "highest":
        return 1e-2
    return {torch.float64: 1e-7, torch.complex128: 1e-7, torch.bfloat16: 2e-2, torch.float16: 5e-3}.get(dtype, 1e-3)


def vector_norm(x: torch.Tensor) -> float:
    """Returns the norm, computed in double precision."""
    return float(torch.linalg.vector_norm(x.detach(), dtype=torch.complex128 if x.is_complex() else torch.float64))
