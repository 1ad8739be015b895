# SPDX-License-Identifier: Apache-2.0
"""The tiled Gram product on CUDA, which never writes ggT or aaT to device memory, for one layer or many equal ones.

One program per sample and tile pair (i >= j) forms a tile of ggT and the same tile of aaT in registers, multiplies them
elementwise and writes the sum, and the sum of absolute values; tiles off the diagonal count twice. There are no
atomics: a second kernel adds the sums up and replaces norms with too few correct digits (see formed.py), so the result
is deterministic. Imported only for CUDA tensors (Triton is a dependency of PyTorch's CUDA wheels).
"""

from collections.abc import Sequence
from typing import Any

import torch
import triton  # type: ignore[import-untyped, import-not-found, unused-ignore]
import triton.language as tl  # type: ignore[import-untyped, import-not-found, unused-ignore]

from opacus_memprof.clipping import cost
from opacus_memprof.clipping.kernels.formed import norms_of_layer_cuda, norms_of_layers_cuda
from opacus_memprof.clipping.kernels.native import address_table, launch
from opacus_memprof.clipping.kernels.norm_bounds import least_product, least_share
from opacus_memprof.clipping.kernels.stacks import TYPES

_MOST_PROGRAMS = 65535  # limit of the third dimension of a launch
_MOST_PARTS = 1 << 22  # sums of tiles that a launch writes, unless one layer has more: 48 MiB


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def gram_block(  # type: ignore[no-untyped-def]  # Triton would interpret annotations as its types
    x,
    here,
    there,
    tokens,
    width,
    x_token,
    x_feature,
    SIDE: tl.constexpr,
    DEPTH: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Returns the products of the tokens `here` with the tokens `there` of a sample."""
    depth = tl.arange(0, DEPTH).to(tl.int64)
    here_inside = here[:, None] < tokens
    there_inside = there[None, :] < tokens
    gram = tl.zeros((SIDE, SIDE), dtype=tl.float32)
    left = x + here[:, None] * x_token + depth[None, :] * x_feature
    right = x + there[None, :] * x_token + depth[:, None] * x_feature
    for start in range(0, width, DEPTH):
        inside = start + depth < width
        a = tl.load(left, mask=here_inside & inside[None, :], other=0.0)
        b = tl.load(right, mask=there_inside & inside[:, None], other=0.0)
        gram = tl.dot(a, b, gram, input_precision=PRECISION)
        left += DEPTH * x_feature
        right += DEPTH * x_feature
    return gram


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def write_tile(  # type: ignore[no-untyped-def]
    g,
    a,
    sample,
    part,
    tokens,
    rows,
    columns,
    g_sample,
    g_token,
    g_feature,
    a_sample,
    a_token,
    a_feature,
    SIDE: tl.constexpr,
    DEPTH: tl.constexpr,
    PRECISION: tl.constexpr,
):
    i = tl.program_id(0)
    j = tl.program_id(1)
    here = (i * SIDE + tl.arange(0, SIDE)).to(tl.int64)
    there = (j * SIDE + tl.arange(0, SIDE)).to(tl.int64)
    # fmt: off
    gram = gram_block(g + sample * g_sample, here, there, tokens, rows, g_token, g_feature, SIDE, DEPTH, PRECISION)
    other = gram_block(a + sample * a_sample, here, there, tokens, columns, a_token, a_feature, SIDE, DEPTH, PRECISION)
    # fmt: on
    twice = tl.where(i == j, 1.0, 2.0)
    if i == j:  # the traces are bounds on all entries
        diagonal = here[:, None] == there[None, :]
        tl.store(part + 2, tl.sum(tl.where(diagonal, gram * columns + other * rows, 0.0)))
    gram *= other
    tl.store(part, tl.sum(gram) * twice)
    tl.store(part + 1, tl.sum(tl.abs(gram)) * twice)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def gram_tile(  # type: ignore[no-untyped-def]
    g,
    a,
    parts,
    tokens,
    rows,
    columns,
    g_sample,
    g_token,
    g_feature,
    a_sample,
    a_token,
    a_feature,
    SIDE: tl.constexpr,
    DEPTH: tl.constexpr,
    PRECISION: tl.constexpr,
):
    i, j, sample = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    if j > i:
        return
    tiles = tl.num_programs(0)
    part = parts + ((sample * tiles + i) * tiles + j) * 3
    # fmt: off
    write_tile(g, a, sample, part, tokens, rows, columns, g_sample, g_token, g_feature, a_sample, a_token, a_feature,
               SIDE, DEPTH, PRECISION)
    # fmt: on


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def gram_tiles(  # type: ignore[no-untyped-def]
    operands,
    parts,
    count,
    tokens,
    rows,
    columns,
    g_sample,
    g_token,
    g_feature,
    a_sample,
    a_token,
    a_feature,
    SIDE: tl.constexpr,
    DEPTH: tl.constexpr,
    PRECISION: tl.constexpr,
    TYPE: tl.constexpr,
    ALIGNMENT: tl.constexpr,
):
    i, j, both = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    if j > i:
        return
    tiles = tl.num_programs(0)
    part = parts + ((both * tiles + i) * tiles + j) * 3
    layer, sample = both // count, both % count
    g = tl.multiple_of(tl.load(operands + 2 * layer).to(tl.pointer_type(TYPE)), ALIGNMENT)
    a = tl.multiple_of(tl.load(operands + 2 * layer + 1).to(tl.pointer_type(TYPE)), ALIGNMENT)
    # fmt: off
    write_tile(g, a, sample, part, tokens, rows, columns, g_sample, g_token, g_feature, a_sample, a_token, a_feature,
               SIDE, DEPTH, PRECISION)
    # fmt: on


def gram_squared_norms_cuda(g: torch.Tensor, a: torch.Tensor, lost: torch.Tensor | None = None) -> torch.Tensor:
    """Returns the squared norms of `g[n] @ a[n]`. Where the Gram product cancels, the gradient is formed in float64.

    Args:
        g: [N, rows, T], any strides; float32, float16 or bfloat16.
        a: [N, T, columns], same dtype and device.
        lost: booleans [N]; written here: the samples whose gradients are formed.

    Returns:
        [N] float32, accumulated in float32. float32 operands use TF32 exactly where `torch.matmul` would.
    """
    tiles, parts = _tiles(g), _parts(g, 1)
    if parts.numel():
        launch(gram_tile, (tiles, tiles, len(g)), g, a, parts, *_sizes(g, a), **_settings(g))
    return norms_of_layer_cuda(g, a, parts, _lost(g) if lost is None else lost, _sizes(g, a), _bounds(g, a))


def gram_squared_norms_of_layers(pairs: Sequence[tuple[torch.Tensor, ...]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the norms of `gram_squared_norms_cuda` for each pair (g, a), [pairs, N] float32, with few launches.

    Also returns for which samples the gradient was formed, booleans [pairs, N]. All pairs have the same shapes,
    strides, dtype and device.
    """
    g, a = pairs[0]
    is_aligned = all(x.data_ptr() % 16 == 0 for pair in pairs for x in pair)
    kinds = {"TYPE": TYPES[g.dtype], "ALIGNMENT": 16 if is_aligned else g.element_size()}
    operands = address_table(pairs, False)
    tiles, sizes, bounds = _tiles(g), _sizes(g, a), _bounds(g, a)
    layers = max(1, min(_MOST_PROGRAMS, _MOST_PARTS // (tiles * tiles)) // max(1, len(g)))  # in a launch
    norms: list[torch.Tensor] = []
    lost = _lost(g, len(pairs))
    for start in range(0, len(pairs), layers):
        some = operands[start : start + layers]
        parts = _parts(g, len(some))
        if parts.numel():
            launch(gram_tiles, (tiles, tiles, len(parts)), some, parts, len(g), *sizes, **_settings(g), **kinds)
        own = lost[start * len(g) : (start + layers) * len(g)]
        norms.append(norms_of_layers_cuda(some, len(g), parts, own, sizes, bounds, kinds).view(len(some), len(g)))
    return norms[0] if len(norms) == 1 else torch.cat(norms), lost.view(len(pairs), len(g))


def replace_lost_norms_cuda(
    norms: torch.Tensor,
    lost: torch.Tensor,
    g: torch.Tensor,
    a: torch.Tensor,
    picked: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> torch.Tensor:
    """Returns the squared norms; inaccurate ones are replaced by those of the gradients `g[n] @ a[n]`.

    Args:
        norms: squared norms, [N].
        lost: the inaccurate ones, booleans [N].
        g: [N, rows, T], any strides and floating point dtype.
        a: [N, T, columns], same device.
        picked: indices of rows, [N, S], and the addends of these rows, [N, S, columns]. Negative indices are ignored.
    """
    parts = norms.new_zeros(len(norms), 1, 1, 3)
    parts[:, 0, 0, 0] = norms.masked_fill(lost, torch.nan)
    if picked is not None:
        picked = (picked[0].contiguous(), picked[1])
    return norms_of_layer_cuda(g, a, parts, _lost(g), _sizes(g, a), (0.0, 0.0), picked)


def _tiles(g: torch.Tensor) -> int:
    """Returns the number of tiles on one side."""
    return cost.gram_tiles(g.shape[2])


def _parts(g: torch.Tensor, layers: int) -> torch.Tensor:
    """Returns the tensor to which the kernel writes the sums of tiles, [layers N, tiles, tiles, 3]."""
    tiles = _tiles(g)
    return torch.empty(layers * len(g), tiles, tiles, cost.GRAM_NUMBERS, dtype=torch.float32, device=g.device)


def _lost(g: torch.Tensor, layers: int = 1) -> torch.Tensor:
    """Returns the tensor to which kernels write which norms the tiles do not give, booleans [layers N]."""
    return torch.empty(layers * len(g), dtype=torch.bool, device=g.device)


def _sizes(g: torch.Tensor, a: torch.Tensor) -> tuple[int, ...]:
    strides = (g.stride(0), g.stride(2), g.stride(1), a.stride(0), a.stride(1), a.stride(2))
    return (g.shape[2], g.shape[1], a.shape[2], *strides)


def _bounds(g: torch.Tensor, a: torch.Tensor) -> tuple[float, float]:
    return least_share(g, g.shape[1], a.shape[2]), least_product(g.dtype)


def _settings(g: torch.Tensor) -> dict[str, Any]:
    side = cost.gram_side(g.shape[2])
    # Reading allow_tf32 or get_float32_matmul_precision raises if the program has set fp32_precision.
    tf32 = torch.backends.cuda.matmul.fp32_precision == "tf32"
    return {
        "SIDE": side,
        "DEPTH": 32 if g.dtype == torch.float32 else 64,
        "PRECISION": "tf32" if tf32 else "ieee",
        "num_warps": 8 if side == 128 else 4,
    }
