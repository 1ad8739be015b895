# SPDX-License-Identifier: Apache-2.0
"""Forms clipped sums, ``sum_n factors[n] (gradient of sample n)``, from what was kept."""

from __future__ import annotations

import torch

from opacus_memprof.clipping import native
from opacus_memprof.clipping.norms import has_kernels, matrix
from opacus_memprof.clipping.workspace import Workspace, accumulation_dtype, slices


def sum_stack(stack: torch.Tensor, factors: torch.Tensor, dtype: torch.dtype, workspace: Workspace) -> torch.Tensor:
    """The weighted sum of kept per-sample gradients.

    Args:
        stack: per-sample gradients, [N, ...].
        factors: clip factors, [N], float32 (float64).
        dtype: of the result.
        workspace: ceiling on temporaries.
    """
    if has_kernels(stack):
        from opacus_memprof.clipping.stacks_triton import weighted_sum_cuda

        return weighted_sum_cuda(stack.contiguous(), factors.float(), dtype)
    flat = matrix(stack)
    if flat.dtype == factors.dtype:
        summed = torch.mv(flat.mT, factors)
        if flat is not stack:
            summed = summed.view(stack.shape[1:])
        return summed if summed.dtype == dtype else summed.to(dtype)
    # Rounding the factors to a low-precision dtype would let a sample exceed the bound: sum in float32.
    total = torch.empty(flat.shape[1], dtype=dtype, device=stack.device)
    width = workspace.fit_at_least_one(
        len(stack) * factors.element_size(), flat.shape[1], "one element of every sample"
    )
    for part in slices(flat.shape[1], width):
        total[part] = factors @ flat[:, part].to(factors.dtype)
    return total.view(stack.shape[1:])


def sum_outer_products(
    g: torch.Tensor, a: torch.Tensor, factors: torch.Tensor | None, workspace: Workspace
) -> torch.Tensor | None:
    """As ``sum_products``, of operands [N, T, rows] and [N, T, columns], as [rows, columns]. None if one product does
    not do: the narrower operand, which scaling copies, does not fit into the workspace, or there is one sample, whose
    gradient is scaled instead."""
    if factors is not None:
        sums = native.sum_outer_products([(g, a)], factors, workspace.bytes)
        return sums[0] if sums else None
    if min(g.numel(), a.numel()) * g.element_size() > workspace.bytes:
        return None
    return torch.mm(g.reshape(-1, g.shape[2]).t(), a.reshape(-1, a.shape[2]))


def _scaled(x: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    scale = factors.view(-1, *[1] * (x.dim() - 1))
    # Low precision rounds the product, not the factors.
    return x * scale if x.dtype == factors.dtype else torch.mul(x, scale, out=torch.empty_like(x))


def scale_single_samples(stacks: list[torch.Tensor], factors: torch.Tensor) -> list[torch.Tensor]:
    """The clipped sums of a single sample: its gradients are scaled in place, which takes no memory.

    Args:
        stacks: each [1, ...], contiguous, not empty; of one dtype and device.
        factors: the clip factor, [1], float32 (float64).
    """
    if has_kernels(stacks[0]):
        # mul_ of low precision by float32 takes four times as long.
        from opacus_memprof.clipping.stacks_triton import scale_cuda

        scale_cuda(stacks, factors.float())
    else:
        for stack in stacks:
            stack.mul_(factors.view(-1, *[1] * (stack.dim() - 1)))
    return [stack[0] for stack in stacks]


def products(g: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
    """The weight gradients ``g[n] @ a[n]``, [N, rows, columns]."""
    # For a single sample a plain matrix product, as in training without privacy.
    return torch.mm(g[0], a[0]).unsqueeze(0) if g.shape[0] == 1 else torch.bmm(g, a)


def sum_products(
    g: torch.Tensor, a: torch.Tensor, factors: torch.Tensor | None, groups: int, workspace: Workspace
) -> torch.Tensor:
    """The weighted sum of weight gradients ``g[n] @ a[n]``: one matrix product over samples and tokens together, as in
    training without privacy.

    Args:
        g: output gradients, [N groups, rows, T], sample-major.
        a: inputs, [N groups, T, columns].
        factors: clip factors, [N], or None if ``g`` has been scaled already (the second of two passes).
        groups: of a grouped convolution; otherwise 1.
        workspace: ceiling on temporaries.

    Returns:
        [groups, rows, columns], in the operands' dtype if one product suffices, otherwise accumulated in float32
        (float64).
    """
    count, rows, tokens = g.shape
    columns, samples = a.shape[2], count // groups
    g = g.view(samples, groups, rows, tokens)
    a = a.view(samples, groups, tokens, columns)
    if samples == 0 or tokens == 0:
        return torch.zeros(groups, rows, columns, dtype=g.dtype, device=g.device)
    if factors is not None and samples == 1:
        return torch.bmm(g[0], a[0]).mul_(factors.to(accumulation_dtype(g.dtype)))
    # Scaling copies the narrower operand. Folding samples into tokens copies both if there are groups, or if the
    # columns of a token are not contiguous, as in an unfolded input.
    folds = groups == 1 and a.stride(3) == 1
    width = groups * (min(rows, columns) if folds else 2 * (rows + columns)) * g.element_size()
    total: torch.Tensor | None = None
    for n, t in workspace.tiles(samples, tokens, width, "one token of a clipped sum"):
        left, right = g[n, ..., t], a[n, :, t]
        if factors is not None and rows < columns:
            left = _scaled(left, factors[n])
        elif factors is not None:
            right = _scaled(right, factors[n])
        part = torch.bmm(
            left.permute(1, 2, 0, 3).reshape(groups, rows, -1),
            right.permute(1, 0, 2, 3).reshape(groups, -1, columns),
        )
        if total is None:
            is_only_part = (n.stop - n.start, t.stop - t.start) == (samples, tokens)
            total = part if is_only_part else part.to(accumulation_dtype(part.dtype))
        else:
            total += part
        del left, right, part
    assert total is not None  # there was at least one piece
    return total
