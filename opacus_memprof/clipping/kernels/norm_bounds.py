# SPDX-License-Identifier: Apache-2.0
"""Error bounds of Gram norms, and replacements of norms with too few correct digits.

A Gram norm adds up products `(g_t . g_u)(a_t . a_u)` of both signs. Rounding errors are relative to the sum of their
absolute values. A result that is a small share of that sum has lost its digits: the gradients of the tokens cancel. A
product may also underflow or overflow although the gradient does neither. Norms of such samples are computed from the
gradient itself, accumulated in float64.
"""

import math
from collections.abc import Callable

import torch

from opacus_memprof.clipping.workspace import Workspace, accumulation_dtype, slices

_ERROR = {torch.float32: 1e-3, torch.float64: 1e-9}
"""The largest relative error of a squared norm, by dtype of accumulation."""

_SUM_ERROR = 2.5e-4
"""The largest relative error of a sample's part in a clipped sum."""

_FORMED_ERROR = 5e-4
"""The value of `_SUM_ERROR` where the samples beyond it are added one by one on CUDA."""

_TF32_SHARE = 1 / 64
"""With TF32, the least accurate share of a squared norm in the absolute sum.

Operands are rounded to 11 bits, as in the product that forms the gradient. Smaller squared norms could have larger
errors than that product.
"""


def uses_tf32(dtype: torch.dtype, device: torch.device) -> bool:
    """Returns whether products of matrices of this dtype, on this device, round their operands to TF32."""
    # Reading allow_tf32 or get_float32_matmul_precision raises if the program has set fp32_precision.
    return device.type == "cuda" and dtype == torch.float32 and torch.backends.cuda.matmul.fp32_precision == "tf32"


def least_share(g: torch.Tensor, rows: int, columns: int) -> float:
    """Returns the share of the absolute sum that a Gram norm must reach to be correct to about 5e-4 (float64: 1e-9).

    Args:
        g: one of the operands.
        rows: the length of the dot products of one Gram matrix.
        columns: the length of the dot products of the other.
    """
    if uses_tf32(g.dtype, g.device):
        return _TF32_SHARE
    dtype = accumulation_dtype(g.dtype)
    # Rounding errors of a dot product grow as the square root of its length, or faster if they have one sign.
    return 2 * torch.finfo(dtype).eps * math.sqrt(max(rows, columns, 64)) / _ERROR[dtype]


def least_product(dtype: torch.dtype) -> float:
    """Returns the factor by which a sum of products must exceed its number of terms.

    Then terms that underflow are negligible.
    """
    dtype = accumulation_dtype(dtype)
    return torch.finfo(dtype).tiny / _ERROR[dtype]


def lost_digits(
    total: torch.Tensor, absolute: Callable[[], torch.Tensor], g: torch.Tensor, a: torch.Tensor
) -> torch.Tensor | None:
    """Returns which Gram norms are inaccurate, as booleans [N]. On the CPU, returns None if all are accurate.

    Args:
        total: Gram norms, [N].
        absolute: returns the sums of the absolute values of their terms, [N].
        g: output gradients, [N, rows, T].
        a: inputs, [N, T, columns].
    """
    (_, rows, tokens), columns = g.shape, a.shape[2]
    of_g, of_a = (torch.linalg.vector_norm(x, dim=(1, 2), dtype=total.dtype).square_() for x in (g, a))
    # By Cauchy-Schwarz the entries of a Gram matrix add up to at most T times its trace.
    smallest = (of_g * columns).add_(of_a, alpha=rows).add_(tokens).mul_(tokens * least_product(g.dtype))
    share = least_share(g, rows, columns)
    if g.is_cpu:
        # The product of the traces is at least the absolute sum, and small models have few tokens.
        few = is_below(total, torch.add(smallest, of_g.mul_(of_a), alpha=share))
        if not few.any():
            return None
    return is_below(total, smallest.add_(absolute(), alpha=share))


def is_below(norms: torch.Tensor, least: torch.Tensor) -> torch.Tensor:
    """Returns which squared norms are less than `least`, infinite or NaN."""
    accurate: torch.Tensor = (norms >= least) & (norms < math.inf)  # false for NaN
    return accurate.logical_not_()


def has_digits(squares: torch.Tensor, g: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
    """Returns which gradients keep enough correct digits in a product with rounded operands, as booleans [N].

    A clipped sum may round the operands of these samples. In the others the gradients of the tokens cancel too much.

    Args:
        squares: the squared norms of `g[n] @ a[n]`, [N].
        g: output gradients, with the samples first.
        a: inputs, with the samples first; ones if the inputs are indices.
    """
    # By Cauchy-Schwarz the norms of the tokens' gradients add up to at most the product of these.
    most = _norms(g).mul_(_norms(a)) if a.is_floating_point() else _norms(g).mul_(math.sqrt(a[0].numel()))
    # Two numbers of bfloat16 have 16 bits.
    rounding = 2.0**-17 if g.dtype == torch.bfloat16 and a.is_floating_point() else 2 * torch.finfo(torch.float32).eps
    accurate: torch.Tensor = squares.sqrt() >= most.mul_(rounding / _FORMED_ERROR)
    return accurate  # false for NaN


def formed_squared_norm(
    g: torch.Tensor,
    a: torch.Tensor,
    workspace: Workspace,
    picked: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> torch.Tensor:
    """Returns the squared norm of `g @ a`, a scalar in float64, from blocks accumulated in float64.

    Args:
        g: output gradients of a sample, [rows, T].
        a: its inputs, [T, columns].
        workspace: limit on temporaries.
        picked: indices of rows, [S], and the addends of these rows, [S, columns]. Negative indices are ignored.
    """
    rows, tokens = g.shape
    side = max(1, math.isqrt(workspace.bytes // 24))  # of three square blocks of float64
    total = torch.zeros((), dtype=torch.float64, device=g.device)
    for r in slices(rows, side):
        for c in slices(a.shape[1], side):
            block = torch.zeros(r.stop - r.start, c.stop - c.start, dtype=torch.float64, device=g.device)
            for t in slices(tokens, side):
                block.addmm_(g[r, t].double(), a[t, c].double())
            if picked is not None:
                ids, d = picked
                at = ((ids >= r.start) & (ids < r.stop)).nonzero().flatten()
                for s in slices(len(at), side):
                    block.index_add_(0, ids[at[s]] - r.start, d[at[s], c].double())
            total += torch.linalg.vector_norm(block).square_()
            del block
    return total


def product_squared_norms(g: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
    """Returns the squared norms of `g[n] @ a[n]` for a single token, [N]: the product of both squared norms.

    They are float64, because either square may be out of float32's range.
    """
    norms = [torch.linalg.vector_norm(x.flatten(1), dim=1, dtype=torch.float64) for x in (g, a)]
    squares: torch.Tensor = norms[0].mul_(norms[1]).square_()
    return squares.to(accumulation_dtype(g.dtype))


def pair_for_sums(
    x: torch.Tensor, g: torch.Tensor, squares: torch.Tensor, terms: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the input and output gradient from which clipped sums are formed.

    They are in float64 if the tokens of a sample cancel so much that rounding the scaled numbers to float32 would
    change its gradient. This is not checked on CUDA, where the host would wait for the device.

    Args:
        x: the layer's input, with the batch first.
        g: its output gradient, with the batch first.
        squares: the squared norms of the weight's gradients, [B].
        terms: the number of products in which each number of `x` occurs for each of its columns; for indices, the
            number of indices of a sample.
    """
    if g.dtype == torch.float64 or not g.is_cpu or g.numel() == 0 or g.dim() == 2:
        return x, g
    # By Cauchy-Schwarz the norms of the tokens' gradients add up to at most this.
    most = _norms(g) * _norms(x) if x.is_floating_point() else _norms(g)
    rounding = most.mul_(math.sqrt(terms) * 2 * torch.finfo(torch.float32).eps / _SUM_ERROR)
    if not (rounding > squares.sqrt()).any():
        return x, g
    return x.double() if x.is_floating_point() else x, g.double()


def _norms(x: torch.Tensor) -> torch.Tensor:
    norms: torch.Tensor = torch.linalg.vector_norm(x, dim=tuple(range(1, x.dim())), dtype=torch.float32)
    return norms
