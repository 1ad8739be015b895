# SPDX-License-Identifier: Apache-2.0
"""Exact squared norms of per-sample gradients, without T x T matrices.

The operands are `g` of shape [N, rows, T] and `a` of shape [N, T, columns], with any strides: N weight gradients `g[n]
@ a[n]`. Results are float32 (float64 for float64) of shape [N].
"""

from collections.abc import Callable, Sequence

import torch

from opacus_memprof.clipping import cost
from opacus_memprof.clipping.kernels.native import norms_cpu
from opacus_memprof.clipping.kernels.norm_bounds import (
    formed_squared_norm,
    has_digits,
    lost_digits,
    product_squared_norms,
)
from opacus_memprof.clipping.workspace import (
    CPU_DTYPES,
    KERNEL_DTYPES,
    Workspace,
    accumulation_dtype,
    has_triton,
    is_low_precision,
    slices,
)


def matrix(stack: torch.Tensor) -> torch.Tensor:
    """Returns `stack` as [N, numbers of each sample]."""
    if stack.dim() == 2:
        return stack
    return stack.unsqueeze(1) if stack.dim() == 1 else stack.flatten(1)


def squared_norms(stack: torch.Tensor) -> torch.Tensor:
    """Returns the squared norm of every `stack[n]`, accumulated in float32 (float64)."""
    dtype = accumulation_dtype(stack.dtype)
    if stack.numel() == 0:
        return torch.zeros(stack.shape[0], dtype=dtype, device=stack.device)
    norms: torch.Tensor = torch.linalg.vector_norm(matrix(stack), dim=1, dtype=dtype)
    return norms.square_()


def norms_of_sums(sums: Sequence[torch.Tensor]) -> torch.Tensor:
    """Returns the norm of each tensor, [tensors], on the device of the first one."""
    if all(total.is_cpu and total.dtype in CPU_DTYPES and total.is_contiguous() for total in sums):
        return norms_cpu(sums)
    norms = torch._foreach_norm(list(sums))
    return torch.stack([each.to(norms[0].device) for each in norms])


_SMALL = 1 << 16  # elements: of a sample on CUDA; of all samples on the CPU, where torch uses several threads for more


def is_small(stack: torch.Tensor) -> bool:
    """Returns whether `stack` is processed together with other stacks, for norms and clipped sum.

    See small_layers.py.
    """
    if stack.is_cpu:
        most = _SMALL if stack.dtype in CPU_DTYPES else 0
    else:
        most = _SMALL * stack.shape[0] if has_kernels(stack) else 0
    return 0 < stack.numel() <= most and stack.is_contiguous()


def defers_norms(stack: torch.Tensor) -> bool:
    """Returns whether the norms of `stack` are deferred to the optimizer's step.

    The step computes the norms of small stacks, and of single samples, together (see small_layers.py).
    """
    return is_small(stack) or (stack.shape[0] == 1 and has_kernels(stack) and stack.numel() > 0)


def has_kernels(x: torch.Tensor) -> bool:
    """Returns whether the Triton kernels support such a tensor."""
    return x.is_cuda and x.dtype in KERNEL_DTYPES and has_triton()


def squared_norms_unless_deferred(stack: torch.Tensor) -> torch.Tensor | None:
    """Returns `squared_norms(stack)`, or None if they are deferred to the optimizer's step."""
    return None if defers_norms(stack) else squared_norms(stack)


def gradient_squared_norms(
    g: torch.Tensor, a: torch.Tensor, workspace: Workspace, lost: torch.Tensor | None = None
) -> torch.Tensor:
    """Returns the squared norms, by forming the gradients `g[n] @ a[n]`, some rows of some samples at a time.

    Args:
        g: output gradients, [N, rows, T].
        a: inputs, [N, T, columns].
        workspace: limit on temporaries.
        lost: on CUDA, booleans [N]; written here: the samples whose tokens cancel too much.
    """
    count, rows, _ = g.shape
    row_bytes = a.shape[2] * accumulation_dtype(a.dtype).itemsize
    total = torch.zeros(count, dtype=accumulation_dtype(g.dtype), device=g.device)
    for n, r in workspace.tiles(count, rows, row_bytes, "one row of a weight gradient"):
        total[n] += squared_norms(_accumulated_product(g[n, r], a[n]))
    if lost is None:
        return total
    return replace_lost_norms(total, torch.logical_not(has_digits(total, g, a), out=lost), g, a, workspace)


def _accumulated_product(g: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
    """Returns `g @ a`, in float32 for low precision, as clipped sums are formed.

    Rounding it could make a norm smaller.
    """
    if not is_low_precision(g.dtype):
        return torch.bmm(g, a)
    return torch.bmm(g, a, out_dtype=torch.float32) if g.is_cuda else torch.bmm(g.float(), a.float())


def gram_squared_norms(
    g: torch.Tensor, a: torch.Tensor, workspace: Workspace, lost: torch.Tensor | None = None
) -> torch.Tensor:
    """Returns the squared norms `sum_{t,u} (g_t . g_u)(a_t . a_u)`, tile by tile over the lower triangle.

    On CUDA a Triton kernel keeps both tiles in registers. Otherwise two tiles that fit into `workspace` are formed,
    multiplied and summed. Where the sum cancels, the norm is computed from the gradient instead (see norm_bounds.py).

    Args:
        g: see `gradient_squared_norms`.
        a: see `gradient_squared_norms`.
        workspace: see `gradient_squared_norms`.
        lost: see `gradient_squared_norms`.
    """
    if g.shape[2] == 1:
        if lost is not None:
            lost.zero_()
        return product_squared_norms(g, a)
    if has_kernels(g):
        from opacus_memprof.clipping.kernels.gram import gram_squared_norms_cuda

        return gram_squared_norms_cuda(g, a, lost)
    return _tiled_squared_norms(g, a, workspace)


def _tiled_squared_norms(g: torch.Tensor, a: torch.Tensor, workspace: Workspace) -> torch.Tensor:
    total, absolute = _tiled_sums(g, a, workspace)
    lost = lost_digits(total, absolute, g, a)
    return total if lost is None else replace_lost_norms(total, lost, g, a, workspace)


def replace_lost_norms(
    norms: torch.Tensor,
    lost: torch.Tensor,
    g: torch.Tensor,
    a: torch.Tensor,
    workspace: Workspace,
    picked: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> torch.Tensor:
    """Returns the squared norms; inaccurate ones are replaced by those of the gradients `g[n] @ a[n]`.

    Args:
        norms: squared norms, [N]. May be changed.
        lost: the inaccurate ones, booleans [N].
        g: output gradients, [N, rows, T].
        a: inputs, [N, T, columns].
        workspace: limit on temporaries.
        picked: indices of rows, [N, S], and the addends of these rows, [N, S, columns]. Negative indices are ignored.
    """
    if lost.is_cuda and has_triton():  # the host does not wait for the device
        from opacus_memprof.clipping.kernels.gram import replace_lost_norms_cuda

        return replace_lost_norms_cuda(norms, lost, g, a, picked)
    for n in lost.nonzero().flatten().tolist():
        own = None if picked is None else (picked[0][n], picked[1][n])
        norms[n] = formed_squared_norm(g[n], a[n], workspace, own)
    return norms


def _tiled_sums(
    g: torch.Tensor, a: torch.Tensor, workspace: Workspace
) -> tuple[torch.Tensor, Callable[[], torch.Tensor]]:
    """Returns the sums of the products, and a function that returns the sums of their absolute values, each [N]."""
    count, rows, tokens = g.shape
    dtype = accumulation_dtype(g.dtype)
    if g.dtype == a.dtype == dtype and 2 * count * tokens * tokens * dtype.itemsize <= workspace.bytes:
        products = torch.bmm(g.mT, g).mul_(torch.bmm(a, a.mT)).flatten(1)
        return products.sum(1), lambda: torch.linalg.vector_norm(products, 1, 1)
    tile, samples = _tile(count, tokens, rows + a.shape[2], g.dtype, workspace)
    total = torch.zeros(count, dtype=dtype, device=g.device)
    absolute = torch.zeros_like(total)
    for n in slices(count, samples):
        for i in slices(tokens, tile):
            g_i, a_i = g[n, :, i].mT.to(dtype), a[n, i].to(dtype)
            for j in slices(i.stop, tile):
                # A low-precision product would round the tiles, so the strips are cast to float32 first.
                gram = torch.bmm(g_i, g[n, :, j].to(dtype))
                gram.mul_(torch.bmm(a_i, a[n, j].mT.to(dtype)))
                times = 1 if i == j else 2
                total[n] += gram.sum((1, 2)).mul_(times)
                absolute[n] += torch.linalg.vector_norm(gram, 1, (1, 2)).mul_(times)
                del gram
    return total, lambda: absolute


def _tile(count: int, tokens: int, width: int, dtype: torch.dtype, workspace: Workspace) -> tuple[int, int]:
    """Returns the side of a tile and the number of samples at a time, see `cost.gram_block`."""
    side, samples = cost.gram_block(count, tokens, width, dtype.itemsize, workspace.bytes)
    if side == 0:
        workspace.fit_at_least_one(cost.gram_block_bytes(1, width, dtype.itemsize), 1, "one tile of a Gram product")
    return max(1, side), samples
