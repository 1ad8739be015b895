# SPDX-License-Identifier: Apache-2.0
"""Clipped sums from what was kept: ``sum_n factors[n] (gradient of sample n)``."""

from __future__ import annotations

import torch

from opacus_memprof.clipping.workspace import Workspace, accumulation_dtype, has_triton, pieces


def sum_stack(stack: torch.Tensor, factors: torch.Tensor, dtype: torch.dtype, workspace: Workspace) -> torch.Tensor:
    """The sum over kept per-sample gradients.

    Args:
        stack: [N, ...].
        factors: [N], float32 (float64).
        dtype: of the result.
    """
    if stack.is_cuda and stack.dtype != torch.float64 and has_triton():
        from opacus_memprof.clipping.sum_triton import weighted_sum_cuda

        return weighted_sum_cuda(stack.contiguous(), factors.float(), dtype)
    flat = stack.flatten(1)
    if flat.dtype == factors.dtype:
        return (factors @ flat).view(stack.shape[1:]).to(dtype)
    # Rounding the factors to a low-precision dtype would let a sample exceed the bound: sum in float32.
    total = torch.empty(flat.shape[1], dtype=dtype, device=stack.device)
    width = workspace.require(len(stack) * factors.element_size(), flat.shape[1], "one element of every sample")
    for part in pieces(flat.shape[1], width):
        total[part] = factors @ flat[:, part].to(factors.dtype)
    return total.view(stack.shape[1:])


def scale_only_sample(stack: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    """The sum where there is one sample: scaled in place, no memory and no reduction."""
    return stack.mul_(factors.view(-1, *[1] * (stack.dim() - 1)))[0]


def sum_products(
    g: torch.Tensor, a: torch.Tensor, factors: torch.Tensor | None, groups: int, workspace: Workspace
) -> torch.Tensor:
    """The sum over products: one matrix product over samples and tokens together, as in ordinary training.

    Args:
        g: [N groups, rows, T], sample-major.
        a: [N groups, T, columns].
        factors: [N], or None where ``g`` was scaled already (the second of two passes).

    Returns:
        [groups, rows, columns]; in the operands' dtype where one product suffices, otherwise accumulated in
        float32 (float64).
    """
    count, rows, tokens = g.shape
    columns, samples = a.shape[2], count // groups
    g = g.view(samples, groups, rows, tokens)
    a = a.view(samples, groups, tokens, columns)
    if samples == 0 or tokens == 0:
        return torch.zeros(groups, rows, columns, dtype=g.dtype, device=g.device)
    if factors is not None and samples == 1:
        return torch.bmm(g[0], a[0]).mul_(factors.to(accumulation_dtype(g.dtype)))
    # Scaling costs a copy of the narrower operand. Folding samples into tokens costs a copy of both with groups, or
    # where a token's columns do not lie together, as those of an unfolded input.
    folds = groups == 1 and a.stride(3) == 1
    width = groups * (min(rows, columns) if folds else 2 * (rows + columns)) * g.element_size()
    total: torch.Tensor | None = None
    for n, t in workspace.tiles(samples, tokens, width, "one token of a clipped sum"):
        left, right = g[n, ..., t], a[n, :, t]
        if factors is not None:
            scale = factors[n].view(-1, 1, 1, 1)
            if rows < columns:
                left = torch.mul(left, scale, out=torch.empty_like(left))
            else:
                right = torch.mul(right, scale, out=torch.empty_like(right))
        part = torch.bmm(
            left.permute(1, 2, 0, 3).reshape(groups, rows, -1),
            right.permute(1, 0, 2, 3).reshape(groups, -1, columns),
        )
        if total is None:
            only = (n.stop - n.start, t.stop - t.start) == (samples, tokens)
            total = part if only else part.to(accumulation_dtype(part.dtype))
        else:
            total += part
        del left, right, part
    assert total is not None  # there was at least one piece
    return total
