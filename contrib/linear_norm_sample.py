# SPDX-License-Identifier: Apache-2.0
"""Opacus' norm sampler for ``nn.Linear`` with a bound on cancellation.

Ghost clipping computes the norm of ``sum_t g_t a_t^T`` as ``sum_{t,u} (g_t . g_u)(a_t . a_u)``. Rounding errors of that
sum are relative to the sum of absolute values. Where the gradients of the tokens cancel, all digits are lost: Opacus
replaces a negative result by 0, so the sample is not clipped at all. The products may also underflow or overflow when
the gradient does not. The sampler here finds such samples, and computes their norms from the gradient in float64.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
import torch.nn as nn

DEFAULT_WORKSPACE_BYTES = 256 << 20


def compute_linear_norm_sample(
    layer: nn.Linear, activations: list[torch.Tensor], backprops: torch.Tensor
) -> dict[nn.Parameter, torch.Tensor]:
    """Computes per-sample gradient norms of ``nn.Linear``.

    Args:
        layer: Layer
        activations: Activations, [batch, in_features] or [batch, tokens, in_features]
        backprops: Backpropagations, [batch, out_features] or [batch, tokens, out_features]
    """
    dtype = accumulation_dtype(backprops.dtype)
    ret = {}
    if layer.weight.requires_grad:
        g, a = backprops, activations[0].to(backprops.dtype)
        if g.dim() == 2:
            g, a = g.unsqueeze(1), a.unsqueeze(1)
        ggT = torch.einsum("nik,njk->nij", g.to(dtype), g.to(dtype))  # noqa: N806  # as in Opacus
        aaT = torch.einsum("nik,njk->nij", a.to(dtype), a.to(dtype))  # noqa: N806
        products = ggT.mul_(aaT).flatten(1)
        norms = products.sum(1)
        replace_lost_norms(norms, products.abs().sum(1), g.mT, a)
        ret[layer.weight] = norms.sqrt()
    if layer.bias is not None and layer.bias.requires_grad:
        g = backprops if backprops.dim() == 2 else backprops.sum(1, dtype=dtype)
        ret[layer.bias] = torch.linalg.vector_norm(g, dim=1, dtype=dtype)
    return ret


def replace_lost_norms(
    norms: torch.Tensor,
    absolute: torch.Tensor,
    g: torch.Tensor,
    a: torch.Tensor,
    workspace_bytes: int = DEFAULT_WORKSPACE_BYTES,
) -> None:
    """Replaces squared norms with too few correct digits, in place. Waits for the device.

    Args:
        norms: sums of products, [N]
        absolute: sums of the absolute values of the products, [N]
        g: [N, rows, tokens], any strides
        a: [N, tokens, columns], any strides
        workspace_bytes: ceiling on the temporaries
    """
    (_, rows, tokens), columns = g.shape, a.shape[2]
    number = torch.finfo(norms.dtype)
    accuracy = 1e-9 if norms.dtype == torch.float64 else 1e-3
    tf32 = norms.is_cuda and g.dtype == torch.float32 and torch.backends.cuda.matmul.allow_tf32
    # Rounding errors of a dot product grow as the square root of its length; TF32 rounds the operands to 11 bits.
    share = 1 / 64 if tf32 else 2 * number.eps * math.sqrt(max(rows, columns, 64)) / accuracy
    # Products below ``tiny`` are lost. The entries of a Gram matrix add up to no more than tokens times its trace.
    of_g, of_a = (torch.linalg.vector_norm(x, dim=(1, 2), dtype=norms.dtype).square() for x in (g, a))
    least = absolute * share + (of_g * columns + of_a * rows + tokens) * (tokens * number.tiny / accuracy)
    is_accurate = (norms >= least) & (norms < math.inf)  # NaN compares false
    for n in (~is_accurate).nonzero().flatten().tolist():
        norms[n] = _squared_norm_of_gradient(g[n], a[n], workspace_bytes)


def _squared_norm_of_gradient(g: torch.Tensor, a: torch.Tensor, workspace_bytes: int) -> torch.Tensor:
    """The squared norm of ``g @ a``, [rows, tokens] and [tokens, columns], from blocks in float64."""
    side = max(1, math.isqrt(workspace_bytes // 24))  # of three blocks
    total = torch.zeros((), dtype=torch.float64, device=g.device)
    for r in _slices(len(g), side):
        for c in _slices(a.shape[1], side):
            block = torch.zeros(r.stop - r.start, c.stop - c.start, dtype=torch.float64, device=g.device)
            for t in _slices(len(a), side):
                block.addmm_(g[r, t].double(), a[t, c].double())
            total += block.norm().square()
            del block
    return total


def _slices(count: int, size: int) -> Iterator[slice]:
    for start in range(0, count, size):
        yield slice(start, min(start + size, count))


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which norms of ``dtype`` accumulate: float32, or float64 for float64."""
    return torch.float64 if dtype == torch.float64 else torch.float32
