# SPDX-License-Identifier: Apache-2.0
"""Adds clipped gradients of samples whose tokens cancel to clipped sums on CUDA.

The product that forms a clipped sum rounds `factor * g` to float32, and to TF32 or two numbers of bfloat16. Where the
tokens of a sample cancel, this changes its gradient. Such samples have factor 0 in that product. Here their gradients
are formed in float64 and added, sample by sample and always in the same order. The device knows which samples these are
(see norm_bounds.py), so the host does not wait. If there are none, the programs end at once. Imported only for CUDA
tensors.
"""

from collections.abc import Sequence

import torch
import triton  # type: ignore[import-untyped, import-not-found, unused-ignore]
import triton.language as tl  # type: ignore[import-untyped, import-not-found, unused-ignore]

from opacus_memprof.clipping.kernels.formed import BLOCK, add_product, count_blocks
from opacus_memprof.clipping.kernels.native import launch, product_table
from opacus_memprof.clipping.kernels.stacks import TYPES

_PROGRAMS = 1024  # limit for one layer
_EMBEDDING_COLUMNS = 128


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def largest(numbers, count, CHUNK: tl.constexpr):  # type: ignore[no-untyped-def]
    most = tl.zeros((CHUNK,), dtype=tl.float32)
    for start in range(0, count, CHUNK):
        at = start + tl.arange(0, CHUNK)
        most = tl.maximum(most, tl.load(numbers + at, mask=at < count, other=0.0))
    return tl.max(most, 0)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def add_products(  # type: ignore[no-untyped-def]  # Triton would interpret annotations as its types
    table,
    factors,
    count,
    factors_layer,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TYPE: tl.constexpr,
    TARGET: tl.constexpr,
):
    layer = tl.program_id(1).to(tl.int64)
    factors += layer * factors_layer
    if largest(factors, count, 128) > 0:
        row = table + layer * 12
        g = tl.load(row).to(tl.pointer_type(TYPE))
        a = tl.load(row + 1).to(tl.pointer_type(TYPE))
        out = tl.load(row + 2).to(tl.pointer_type(TARGET))
        tokens, rows, columns = tl.load(row + 3), tl.load(row + 4), tl.load(row + 5)
        g_sample, g_token, g_feature = tl.load(row + 6), tl.load(row + 7), tl.load(row + 8)
        a_sample, a_token, a_feature = tl.load(row + 9), tl.load(row + 10), tl.load(row + 11)
        across = tl.cdiv(columns, COLUMNS)
        for each in range(tl.program_id(0), tl.cdiv(rows, ROWS) * across, tl.num_programs(0)):
            r = ((each // across) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
            c = ((each % across) * COLUMNS + tl.arange(0, COLUMNS)).to(tl.int64)
            block = tl.zeros((ROWS, COLUMNS), dtype=tl.float64)
            for n in range(count):
                factor = tl.load(factors + n).to(tl.float64)
                if factor > 0:
                    own = tl.zeros((ROWS, COLUMNS), dtype=tl.float64)
                    left, right = g + n * g_sample, a + n * a_sample
                    # fmt: off
                    own = add_product(own, left, right, r, c, tokens, rows, columns, g_token, g_feature, a_token,
                                      a_feature)
                    # fmt: on
                    block += own * factor
            at = out + r[:, None] * columns + c[None, :]
            inside = (r < rows)[:, None] & (c < columns)[None, :]
            block += tl.load(at, mask=inside, other=0.0).to(tl.float64)
            tl.store(at, block.to(TARGET), mask=inside)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def add_rows(  # type: ignore[no-untyped-def]
    ids, g, factors, out, count, tokens, columns, g_sample, g_token, g_feature, skipped, BLOCK: tl.constexpr
):
    if largest(factors, count, 128) > 0:
        c = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
        inside = c < columns
        zero = tl.full((), 0, tl.int64)  # offsets may exceed 32 bits
        for n in range(count):
            factor = tl.load(factors + n).to(tl.float64)
            if factor > 0:
                own, source = ids + (zero + n) * tokens, g + (zero + n) * g_sample + c * g_feature
                for token in range(tokens):
                    row = tl.load(own + token)
                    # The first of several equal tokens adds up all of them.
                    before = 0
                    for other in range(token):
                        before += tl.where(tl.load(own + other) == row, 1, 0)
                    if (before == 0) & (row != skipped):
                        total = tl.zeros((BLOCK,), dtype=tl.float64)
                        for other in range(token, tokens):
                            each = tl.load(source + (zero + other) * g_token, mask=inside, other=0.0).to(tl.float64)
                            total += tl.where(tl.load(own + other) == row, each, 0.0)
                        at = out + row * columns + c
                        total = total * factor + tl.load(at, mask=inside, other=0.0).to(tl.float64)
                        tl.store(at, total.to(out.dtype.element_ty), mask=inside)


def add_products_cuda(
    pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], totals: Sequence[torch.Tensor], factors: torch.Tensor
) -> None:
    """Adds `sum_n factors[n] g[n].T @ a[n]` to each total, with one launch.

    Args:
        pairs: operands, [N, ..., rows] and [N, ..., columns], contiguous unless they have three dimensions; all of one
            dtype and device, not empty.
        totals: one for each pair, [rows, columns], contiguous, of one dtype.
        factors: float32; [pairs, N], or [N] for all pairs. Samples with factor 0 take no time.
    """
    g = pairs[0][0]
    blocks = max(count_blocks(*total.shape) for total in totals)
    grid = (min(blocks, _PROGRAMS), len(pairs), 1)
    types = {"TYPE": TYPES[g.dtype], "TARGET": _TARGETS[totals[0].dtype]}
    each = factors.stride(0) if factors.dim() == 2 else 0
    launch(add_products, grid, product_table(pairs, totals), factors, len(g), each, **BLOCK, **types)


def add_rows_cuda(
    ids: torch.Tensor, g: torch.Tensor, factors: torch.Tensor, total: torch.Tensor, padding: int | None
) -> None:
    """Adds the clipped gradients of an embedding to `total`.

    Args:
        ids: indices, [N, T].
        g: output gradients, [N, T, columns], any strides; float32, float16 or bfloat16.
        factors: [N], float32. Samples with factor 0 take no time.
        total: [rows, columns], contiguous.
        padding: the row without a gradient.
    """
    columns = g.shape[2]
    grid = (triton.cdiv(columns, _EMBEDDING_COLUMNS), 1, 1)
    sizes = (len(ids), ids.shape[1], columns, *g.stride(), -1 if padding is None else padding)
    launch(add_rows, grid, ids.contiguous(), g, factors, total, *sizes, BLOCK=_EMBEDDING_COLUMNS)


_TARGETS = {**TYPES, torch.float64: tl.float64}
