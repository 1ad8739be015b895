# SPDX-License-Identifier: Apache-2.0
"""Gradients of samples whose tokens cancel, formed in float64 on CUDA: their norms, and what they add to clipped sums.

The device decides for which samples norms from Gram tiles are accurate (see norm_bounds.py), so the host does not wait.
Programs of accurate samples end at once. Others form blocks of the sample's gradient. There are no atomics: each
program writes one number.

The product that forms a clipped sum rounds `factor * g` to float32, and to TF32 or two numbers of bfloat16. Where the
tokens of a sample cancel, this changes its gradient. Such samples have factor 0 in that product, and their gradients
are added here, sample by sample and always in the same order. If there are none, the programs end at once.

Imported only for CUDA tensors.
"""

from collections.abc import Sequence
from typing import Any

import torch
import triton  # type: ignore[import-untyped, import-not-found, unused-ignore]
import triton.language as tl  # type: ignore[import-untyped, import-not-found, unused-ignore]

from opacus_memprof.clipping.kernels.native import address_table, launch, product_table
from opacus_memprof.clipping.kernels.stacks import TYPES

_PROGRAMS = 2048  # programs of a launch, unless there are more samples: fills a GPU if many samples are formed
_PROGRAMS_OF_SUMS = 1024  # limit for one layer
BLOCK = {"ROWS": 32, "COLUMNS": 64}  # block of a gradient that is formed
_EMBEDDING_COLUMNS = 128
_TARGETS = {**TYPES, torch.float64: tl.float64}


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def add_product(  # type: ignore[no-untyped-def]  # Triton would interpret annotations as its types
    block, g, a, r, c, tokens, rows, columns, g_token, g_feature, a_token, a_feature
):
    """Adds rows `r` and columns `c` of a sample's gradient to `block`."""
    left, right = g + r * g_feature, a + c * a_feature
    for _ in range(tokens):  # tl.dot has no float64 on many devices
        x = tl.load(left, mask=r < rows, other=0.0).to(tl.float64)
        y = tl.load(right, mask=c < columns, other=0.0).to(tl.float64)
        block += x[:, None] * y[None, :]
        left += g_token
        right += a_token
    return block


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def add_picked(block, ids, d, r, c, count, columns, d_token, d_feature):  # type: ignore[no-untyped-def]
    """Adds an embedding's contribution to rows `r` and columns `c` of a sample's gradient to `block`."""
    for token in range(count):
        row = tl.load(ids + token)
        y = tl.load(d + token * d_token + c * d_feature, mask=c < columns, other=0.0).to(tl.float64)
        block += tl.where(r[:, None] == row, y[None, :], 0.0)
    return block


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def write_norm(  # type: ignore[no-untyped-def]
    g,
    a,
    parts,
    out,
    lost,
    tiles,
    tokens,
    rows,
    columns,
    g_token,
    g_feature,
    a_token,
    a_feature,
    share,
    floor,
    ids,
    d,
    count,
    d_token,
    d_feature,
    HAS_PICKED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Writes this program's part of a sample's squared norm, and to `lost` whether the tiles' sum is inaccurate.

    `parts` are the sample's tiles.
    """
    program = tl.program_id(1)
    number = parts.dtype.element_ty
    total = tl.zeros((128,), dtype=number)
    absolute = tl.zeros((128,), dtype=number)
    squares = tl.zeros((128,), dtype=number)
    for start in range(0, tiles * tiles, 128):
        at = start + tl.arange(0, 128)
        is_written = (at < tiles * tiles) & (at % tiles <= at // tiles)
        total += tl.load(parts + 3 * at, mask=is_written, other=0.0)
        absolute += tl.load(parts + 3 * at + 1, mask=is_written, other=0.0)
        squares += tl.load(parts + 3 * at + 2, mask=is_written & (at % tiles == at // tiles), other=0.0)
    norm = tl.sum(total)
    least = tl.sum(absolute) * share + (tl.sum(squares) + tokens) * (tokens * floor)
    is_accurate = (norm >= least) & (norm < float("inf"))  # false for NaN
    if program == 0:
        tl.store(lost, tl.where(is_accurate, 0, 1).to(tl.uint8))
    if is_accurate:
        tl.store(out, tl.where(program == 0, norm, 0.0))
    else:
        across = tl.cdiv(columns, COLUMNS)
        sums = tl.zeros((ROWS,), dtype=tl.float64)
        for each in range(program, tl.cdiv(rows, ROWS) * across, tl.num_programs(1)):
            r = ((each // across) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
            c = ((each % across) * COLUMNS + tl.arange(0, COLUMNS)).to(tl.int64)
            block = tl.zeros((ROWS, COLUMNS), dtype=tl.float64)
            # fmt: off
            block = add_product(block, g, a, r, c, tokens, rows, columns, g_token, g_feature, a_token, a_feature)
            # fmt: on
            if HAS_PICKED:
                block = add_picked(block, ids, d, r, c, count, columns, d_token, d_feature)
            sums += tl.sum(block * block, 1)
        tl.store(out, tl.sum(sums).to(number))


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def norms_of_layer(  # type: ignore[no-untyped-def]
    g,
    a,
    parts,
    out,
    lost,
    tiles,
    tokens,
    rows,
    columns,
    g_sample,
    g_token,
    g_feature,
    a_sample,
    a_token,
    a_feature,
    share,
    floor,
    ids,
    d,
    count,
    ids_sample,
    d_sample,
    d_token,
    d_feature,
    HAS_PICKED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    sample = tl.program_id(0).to(tl.int64)
    parts += sample * tiles * tiles * 3
    out += sample * tl.num_programs(1) + tl.program_id(1)
    # fmt: off
    write_norm(g + sample * g_sample, a + sample * a_sample, parts, out, lost + sample, tiles, tokens, rows, columns,
               g_token, g_feature, a_token, a_feature, share, floor, ids + sample * ids_sample,
               d + sample * d_sample, count, d_token, d_feature, HAS_PICKED, ROWS, COLUMNS)
    # fmt: on


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def norms_of_layers(  # type: ignore[no-untyped-def]
    operands,
    parts,
    out,
    lost,
    count,
    tiles,
    tokens,
    rows,
    columns,
    g_sample,
    g_token,
    g_feature,
    a_sample,
    a_token,
    a_feature,
    share,
    floor,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TYPE: tl.constexpr,
    ALIGNMENT: tl.constexpr,
):
    both = tl.program_id(0).to(tl.int64)
    layer, sample = both // count, both % count
    parts += both * tiles * tiles * 3
    out += both * tl.num_programs(1) + tl.program_id(1)
    g = tl.multiple_of(tl.load(operands + 2 * layer).to(tl.pointer_type(TYPE)), ALIGNMENT)
    a = tl.multiple_of(tl.load(operands + 2 * layer + 1).to(tl.pointer_type(TYPE)), ALIGNMENT)
    # fmt: off
    write_norm(g + sample * g_sample, a + sample * a_sample, parts, out, lost + both, tiles, tokens, rows, columns,
               g_token, g_feature, a_token, a_feature, share, floor, operands, a, 0, 0, 0, False, ROWS, COLUMNS)
    # fmt: on


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def norms_of_outer_products(table, out, BLOCK: tl.constexpr, SOURCE: tl.constexpr):  # type: ignore[no-untyped-def]
    n, pair = tl.program_id(0).to(tl.int64), tl.program_id(1)
    norm = tl.full((), 1.0, tl.float64)
    for each in tl.static_range(2):
        row = table + 2 * (2 * pair + each)
        size = tl.load(row + 1)
        source = tl.load(row).to(tl.pointer_type(SOURCE)) + n * size
        total = tl.zeros((BLOCK,), dtype=tl.float64)
        for start in range(0, size, BLOCK):
            at = start + tl.arange(0, BLOCK)
            x = tl.load(source + at, mask=at < size, other=0.0).to(tl.float64)
            total += x * x
        norm *= tl.sum(total)
    tl.store(out + pair * tl.num_programs(0) + n, norm.to(tl.float32))


def norms_of_layer_cuda(
    g: torch.Tensor,
    a: torch.Tensor,
    parts: torch.Tensor,
    lost: torch.Tensor,
    sizes: tuple[int, ...],
    bounds: tuple[float, float],
    picked: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> torch.Tensor:
    """Returns the squared norms of `g[n] @ a[n]`, [N], in the dtype of `parts`.

    Args:
        g: output gradients, [N, rows, T].
        a: inputs, [N, T, columns].
        parts: for each tile of a sample its sum, the sum of absolute values and, on the diagonal, a bound on the Gram
            matrices' entries, [N, tiles, tiles, 3]. Tiles above the diagonal are not read.
        lost: booleans [N]; written here: the samples whose gradients are formed.
        sizes: T, rows, columns, and the strides of `g` and `a`: sample, token, feature.
        bounds: the results of `least_share` and `least_product`.
        picked: indices of rows, [N, S] and contiguous, and the addends of these rows where a gradient is formed, [N, S,
            columns].
    """
    out = _empty_norms(parts, sizes)
    if out.numel():
        ids, d = (parts, a) if picked is None else picked
        more = (ids, d, ids.shape[1], ids.stride(0), *d.stride())
        arguments = (g, a, parts, out, lost.view(torch.uint8), parts.shape[1], *sizes, *bounds, *more)
        launch(norms_of_layer, (*out.shape, 1), *arguments, HAS_PICKED=picked is not None, **BLOCK)
    return _total(out)


def norms_of_layers_cuda(
    operands: torch.Tensor,
    count: int,
    parts: torch.Tensor,
    lost: torch.Tensor,
    sizes: tuple[int, ...],
    bounds: tuple[float, float],
    kinds: dict[str, Any],
) -> torch.Tensor:
    """Returns the squared norms of `norms_of_layer_cuda` for several layers, [layers N].

    Args:
        operands: a table of addresses of each layer's `g` and `a`.
        count: N.
        parts: the tiles of all layers, [layers N, tiles, tiles, 3].
        lost: see `norms_of_layer_cuda`, [layers N].
        sizes: see `norms_of_layer_cuda`; the same for all layers.
        bounds: see `norms_of_layer_cuda`; the same for all layers.
        kinds: the operands' type and alignment.
    """
    out = _empty_norms(parts, sizes)
    if out.numel():
        arguments = (operands, parts, out, lost.view(torch.uint8), count, parts.shape[1], *sizes, *bounds)
        launch(norms_of_layers, (*out.shape, 1), *arguments, **BLOCK, **kinds)
    return _total(out)


def norms_of_outer_products_cuda(pairs: Sequence[tuple[torch.Tensor, ...]]) -> torch.Tensor:
    """Returns the squared norms of `g[n] @ a[n]` for pairs (g, a) with a single token, [pairs, N] float32.

    Uses one launch. Squares that are out of float32's range are computed in float64.

    Args:
        pairs: contiguous operands, [N, rows, 1] and [N, 1, columns], of one dtype and device.
    """
    count = len(pairs[0][0])
    out = torch.empty(len(pairs), count, dtype=torch.float32, device=pairs[0][0].device)
    table = address_table([(x,) for pair in pairs for x in pair], True)
    source = TYPES[pairs[0][0].dtype]
    launch(norms_of_outer_products, (count, len(pairs), 1), table, out, BLOCK=512, SOURCE=source)
    return out


def count_blocks(rows: int, columns: int) -> int:
    """Returns the number of blocks of a gradient."""
    return int(triton.cdiv(rows, BLOCK["ROWS"]) * triton.cdiv(columns, BLOCK["COLUMNS"]))


def _empty_norms(parts: torch.Tensor, sizes: tuple[int, ...]) -> torch.Tensor:
    """Returns an empty tensor for the results of each sample's programs, [samples, programs]."""
    programs = max(1, min(count_blocks(sizes[1], sizes[2]), _PROGRAMS // max(1, len(parts))))
    return torch.empty(len(parts), programs, dtype=parts.dtype, device=parts.device)


def _total(out: torch.Tensor) -> torch.Tensor:
    return out.view(-1) if out.shape[1] == 1 else out.sum(1)


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
    grid = (min(blocks, _PROGRAMS_OF_SUMS), len(pairs), 1)
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
