# SPDX-License-Identifier: Apache-2.0
"""Exact squared norms of per-sample gradients, without T x T matrices.

Operands throughout: ``g`` of shape [N, rows, T] and ``a`` of shape [N, T, columns], N independent products whose
``g @ a`` is a weight gradient. Any strides. Results are float32 (float64 for float64) of shape [N].
"""

from __future__ import annotations

import math

import torch

from opacus_memprof.clipping.workspace import Workspace, accumulation_dtype, has_triton, pieces


def squared_norms(stack: torch.Tensor) -> torch.Tensor:
    """Squared norm of every ``stack[n]``, accumulated in float32 (float64)."""
    dtype = accumulation_dtype(stack.dtype)
    if stack.numel() == 0:
        return torch.zeros(len(stack), dtype=dtype, device=stack.device)
    norms: torch.Tensor = torch.linalg.vector_norm(stack.flatten(1), dim=1, dtype=dtype)
    return norms.square_()


def gradient_squared_norms(g: torch.Tensor, a: torch.Tensor, workspace: Workspace) -> torch.Tensor:
    """By forming the gradients ``g @ a``, some rows of some samples at a time."""
    count, rows, _ = g.shape
    row_bytes = a.shape[2] * a.element_size()
    total = torch.zeros(count, dtype=accumulation_dtype(g.dtype), device=g.device)
    for n, r in workspace.tiles(count, rows, row_bytes, "one row of a weight gradient"):
        total[n] += squared_norms(torch.bmm(g[n, r], a[n]))
    return total


def gram_squared_norms(g: torch.Tensor, a: torch.Tensor, workspace: Workspace) -> torch.Tensor:
    """By ``sum_{t,u} (g_t . g_u)(a_t . a_u)``, tile by tile over the lower triangle.

    On CUDA one Triton kernel keeps both tiles in registers; elsewhere two tiles of at most ``workspace`` are formed,
    multiplied and summed.
    """
    if g.shape[2] == 1:
        return squared_norms(g) * squared_norms(a)
    if g.is_cuda and g.dtype != torch.float64 and has_triton():
        from opacus_memprof.clipping.gram_triton import gram_squared_norms_cuda

        return gram_squared_norms_cuda(g, a)
    return _tiled_squared_norms(g, a, workspace)


def _tiled_squared_norms(g: torch.Tensor, a: torch.Tensor, workspace: Workspace) -> torch.Tensor:
    count, rows, tokens = g.shape
    dtype = accumulation_dtype(g.dtype)
    tile, samples = _tile(count, tokens, rows + a.shape[2], g.dtype, workspace)
    total = torch.zeros(count, dtype=dtype, device=g.device)
    for n in pieces(count, samples):
        for i in pieces(tokens, tile):
            g_i, a_i = g[n, :, i].mT.to(dtype), a[n, i].to(dtype)
            for j in pieces(i.stop, tile):
                # A low-precision product would round the tiles; casting the strips keeps the sums in float32.
                gram = torch.bmm(g_i, g[n, :, j].to(dtype))
                gram.mul_(torch.bmm(a_i, a[n, j].mT.to(dtype)))
                total[n] += gram.sum((1, 2)).mul_(1 if i == j else 2)
                del gram
    return total.clamp_(min=0)  # rounding can leave a zero norm slightly negative


def _tile(count: int, tokens: int, width: int, dtype: torch.dtype, workspace: Workspace) -> tuple[int, int]:
    """Side of a tile and samples at a time: two tiles and, for low precision, four cast strips within the ceiling."""
    item = accumulation_dtype(dtype).itemsize
    strips = 0 if dtype == accumulation_dtype(dtype) else 2 * width

    def bytes_of(side: int) -> int:
        return item * (2 * side * side + strips * side)

    samples = workspace.fit(bytes_of(tokens), count)
    if samples >= 1:
        return tokens, samples
    budget = workspace.bytes / (2 * item)
    half = strips / 4
    side = int(math.sqrt(half * half + budget) - half)  # 2 s^2 + strips s = budget of elements
    workspace.require(bytes_of(1), 1, "one tile of a Gram product")
    return max(1, side), 1
