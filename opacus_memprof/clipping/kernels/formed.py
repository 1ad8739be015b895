# SPDX-License-Identifier: Apache-2.0
"""Norms on CUDA: from Gram tiles where these are accurate, otherwise from gradients.

The device decides whether a sample's norm is accurate (see norm_bounds.py), so the host does not wait. Programs of
accurate samples end at once. Other programs form blocks of the sample's gradient in float64. There are no atomics: each
program writes one number. Imported only for CUDA tensors.
"""

from collections.abc import Sequence
from typing import Any

import torch
import triton  # type: ignore[import-untyped, import-not-found, unused-ignore]
import triton.language as tl  # type: ignore[import-untyped, import-not-found, unused-ignore]

from opacus_memprof.clipping.kernels.native import address_table, launch
from opacus_memprof.clipping.kernels.stacks import TYPES

_PROGRAMS = 2048  # programs of a launch, unless there are more samples: fills a GPU if many samples are formed
BLOCK = {"ROWS": 32, "COLUMNS": 64}  # block of a gradient that is formed


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
