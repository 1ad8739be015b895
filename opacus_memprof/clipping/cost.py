# SPDX-License-Identifier: Apache-2.0
"""The cost of clipping one layer, computed from its shapes.

Decides what is kept, how norms are computed, and how the work is split to stay below the workspace limit. The layers
and kernels of flash_clip use these decisions; the out-of-memory advice uses their sizes in bytes.

A linear map with a `rows x columns` weight sees, for each of `batch` samples, `tokens` inputs `a` (columns)
and output gradients `g` (rows). The sample's weight gradient is `sum_t g_t a_t^T`, and its squared norm is also
`sum_{t,u} (g_t . g_u)(a_t . a_u)` (Goodfellow 2015, arXiv 1510.01799; Li et al. 2022, arXiv 2110.05679). So there are
two exact ways to compute the norm, and two things that can be kept until the clip factors are known (book-keeping, Bu
et al. 2023, arXiv 2210.00038):

====================  ============================  =======================================
                      per-sample gradient           pair (a, g), norm by Gram tiles
====================  ============================  =======================================
elements kept         batch rows columns            batch tokens (rows + columns)
floating point, norm  2 batch rows columns          batch tokens (tokens + tile) (rows + columns)
weight gradient       once, it *is* the gradient    once, when the clipped sum is formed
====================  ============================  =======================================

For both memory and time the two are equal at `tokens = rows columns / (rows + columns)`. With fewer tokens the pair
is smaller, and the Gram product (half of it, by symmetry) costs less than half a weight gradient. With more tokens the
gradient is smaller, and costs only what training without privacy computes too. Hence the rule: *keep whichever is
smaller*.

This module needs no torch, so it can be used before a program runs.
"""

import functools
import math
from dataclasses import dataclass
from typing import Literal

FLOPS_PER_BYTE = 100.0
"""Machine balance: the number of floating-point operations that take as long as moving one byte.

It is 103 (TF32) to 206 (bfloat16) on an H200 and about 10 on ordinary CPUs. Another value changes the choice only where
both ways cost nearly the same.
"""

GRAM_TILE = 128
"""Tokens on one side of a Gram tile, as in the CUDA kernel."""

GRAM_NUMBERS = 3
"""Numbers that the CUDA kernel writes for each Gram tile: sum, sum of absolute values, and a bound on entries."""

DEFAULT_WORKSPACE_MB = 256.0
"""Default limit on the temporaries of a layer, in MiB."""

INDEX_BYTES = 64
"""Bytes for each token of an embedding: sorted indices, order, slots and the temporaries of sorting, all int64."""

NORM_TOKENS = 32
"""Tokens of a sample that one program of the CUDA kernel of LayerNorm and RMSNorm adds up."""

_NORM_COPIES = 3  # normalized input, a cast of the input if dtypes differ, and statistics
_GROUP_NORM_NUMBERS = 1 << 16  # elements of a sample and group that one program of the CUDA kernel processes
_DRAWN_APART = 1 << 31  # bytes; torch draws the noise of larger tensors in parts, whose order the kernel cannot repeat


def draws_in_place(nbytes: int) -> bool:
    """Returns whether CUDA can draw the noise of a sum of so many bytes in place, without temporaries."""
    return nbytes < _DRAWN_APART


@dataclass(frozen=True)
class Cost:
    """Floating-point operations and bytes moved to and from device memory."""

    flops: int
    bytes: int

    @property
    def in_bytes(self) -> float:
        """The cost as one number: bytes moved, plus operations divided by `FLOPS_PER_BYTE`."""
        return self.bytes + self.flops / FLOPS_PER_BYTE


@dataclass(frozen=True)
class Choice:
    """The chosen way to clip one layer.

    Attributes:
        norm: how the per-sample norms are computed.
        keep: what is kept until the clip factors are known.
        norm_cost: the cost of computing the norms.
        kept_bytes: bytes that are kept from this layer's backward until the clipped sum is formed.
    """

    norm: Literal["gradient", "gram"]
    keep: Literal["gradient", "pair"]
    norm_cost: Cost
    kept_bytes: int


def gradient_norm_cost(batch: int, tokens: int, rows: int, columns: int, itemsize: int) -> Cost:
    """Returns the cost of norms from per-sample gradients that are formed, read once and dropped."""
    elements = batch * (tokens * (rows + columns) + 2 * rows * columns)
    return Cost(2 * batch * (tokens + 1) * rows * columns, elements * itemsize)


def kept_norm_cost(batch: int, rows: int, columns: int, itemsize: int) -> Cost:
    """Returns the cost of norms from per-sample gradients that are kept: one read."""
    return Cost(2 * batch * rows * columns, batch * rows * columns * itemsize)


def gram_norm_cost(batch: int, tokens: int, rows: int, columns: int, itemsize: int, tile: int = GRAM_TILE) -> Cost:
    """Returns the cost of norms from the lower triangle of Gram tiles.

    Each tile reads its two strips of `a` and `g`. Reads that hit the L2 cache are counted as well.
    """
    if tokens == 1:
        return Cost(2 * batch * (rows + columns), batch * (rows + columns) * itemsize)
    tiles = -(-tokens // tile)
    flops = batch * tokens * (tokens + tile) * (rows + columns)
    return Cost(flops, batch * (tiles + 1) * tokens * (rows + columns) * itemsize)


def ghost_norm_cost(batch: int, tokens: int, rows: int, columns: int, itemsize: int, bias: bool) -> Cost:
    """Returns the cost of norms as Opacus 1.6 computes them for three-dimensional inputs.

    Opacus writes and reads ggT, aaT and their product. With a bias it computes ggT again.
    """
    if tokens == 1:
        return gram_norm_cost(batch, tokens, rows, columns, itemsize)
    square = batch * tokens * tokens
    inputs = batch * tokens * (rows + columns + (rows if bias else 0))
    flops = 2 * square * (rows + columns + (rows if bias else 0))
    return Cost(flops, (inputs + square * (8 if bias else 6)) * itemsize)


@functools.lru_cache(maxsize=4096)  # called for every layer in every step
def choose(
    batch: int,
    tokens: int,
    rows: int,
    columns: int,
    itemsize: int,
    *,
    pair_elements: int | None = None,
    keep: bool = True,
) -> Choice:
    """Chooses the cheapest exact way to clip one layer.

    Args:
        batch: samples (times groups, for a grouped convolution).
        tokens: product of the dimensions between batch and features; output positions of a convolution.
        rows: rows of the weight matrix (of one group's, for a grouped convolution).
        columns: columns of the weight matrix (of one group's, for a grouped convolution).
        itemsize: bytes per element.
        pair_elements: elements of the tensors that are kept as the pair. Default: `batch tokens (rows + columns)`. A
            convolution keeps its input, which is smaller than the unfolded one.
        keep: False if nothing is kept (two passes, or Opacus' ghost clipping): only the norm is chosen.
    """
    if pair_elements is None:
        pair_elements = batch * tokens * (rows + columns)
    gradient_elements = batch * rows * columns
    gram = gram_norm_cost(batch, tokens, rows, columns, itemsize)
    gradient = gradient_norm_cost(batch, tokens, rows, columns, itemsize)
    if keep and gradient_elements <= pair_elements:
        kept = kept_norm_cost(batch, rows, columns, itemsize)
        return Choice("gradient", "gradient", kept, gradient_elements * itemsize)
    kept_bytes = pair_elements * itemsize if keep else 0
    if gram.in_bytes <= gradient.in_bytes:
        return Choice("gram", "pair", gram, kept_bytes)
    return Choice("gradient", "pair", gradient, kept_bytes)


def fit(workspace: int, unit_bytes: int, count: int) -> int:
    """Returns how many of `count` units, of `unit_bytes` each, fit into `workspace` bytes at once."""
    return max(0, min(count, workspace // max(1, unit_bytes)))


def accumulated_itemsize(itemsize: int) -> int:
    """Returns the bytes per element of accumulated norms and sums, which are at least float32."""
    return max(itemsize, 4)


def gram_side(tokens: int) -> int:
    """Returns the number of tokens on one side of the CUDA kernel's tile."""
    return GRAM_TILE if tokens >= 512 else 64 if tokens > 32 else 32


def gram_tiles(tokens: int) -> int:
    """Returns the number of the CUDA kernel's tiles on one side of a T x T matrix."""
    return -(-tokens // gram_side(tokens))


def gram_block(batch: int, tokens: int, width: int, itemsize: int, workspace: int) -> tuple[int, int]:
    """Splits Gram products that are formed in memory into tiles.

    Args:
        batch: see `choose`.
        tokens: see `choose`.
        itemsize: see `choose`.
        width: the sum of rows and columns.
        workspace: limit on temporaries, in bytes.

    Returns:
        The side of a tile (0 if the workspace is too small for one) and the number of samples at a time.
    """
    samples = fit(workspace, gram_block_bytes(tokens, width, itemsize), batch)
    if samples:
        return tokens, samples
    item = accumulated_itemsize(itemsize)
    half = _cast_strips(width, itemsize) / 4
    side = int(math.sqrt(half * half + workspace / (2 * item)) - half)  # 2 s^2 + strips s = elements of the workspace
    return side, 1


def gram_block_bytes(side: int, width: int, itemsize: int) -> int:
    """Returns the bytes of two tiles, plus four strips that low-precision dtypes are cast to."""
    return accumulated_itemsize(itemsize) * (2 * side * side + _cast_strips(width, itemsize) * side)


def _cast_strips(width: int, itemsize: int) -> int:
    return 2 * width if itemsize < accumulated_itemsize(itemsize) else 0


def gram_bytes(batch: int, tokens: int, width: int, itemsize: int, workspace: int, *, in_registers: bool) -> int:
    """Returns the bytes of temporaries of norms from Gram tiles.

    Args:
        batch: see `gram_block`.
        tokens: see `gram_block`.
        width: see `gram_block`.
        itemsize: see `gram_block`.
        workspace: see `gram_block`.
        in_registers: whether the CUDA kernel forms the tiles.
    """
    if tokens == 1:
        return 0
    if in_registers and itemsize <= 4:
        return 4 * GRAM_NUMBERS * batch * gram_tiles(tokens) ** 2
    side, samples = gram_block(batch, tokens, width, itemsize, workspace)
    return samples * gram_block_bytes(side, width, itemsize)


def copied_numbers(rows: int, columns: int, itemsize: int, *, folds: bool, splits: bool) -> int:
    """Returns how many elements per token and group are copied to compute a clipped sum.

    Args:
        rows: see `choose`.
        columns: see `choose`.
        itemsize: see `choose`.
        folds: whether samples and tokens can be folded into one dimension without a copy. This is not possible with
            groups, nor if the columns of a token are not contiguous, as in an unfolded input.
        splits: whether low-precision numbers are multiplied as two numbers (see `splits_operands`).
    """
    if itemsize >= 4:
        return min(rows, columns) if folds else 2 * (rows + columns)
    if splits:
        return 4 * min(rows, columns) + (0 if folds else max(rows, columns))  # in float32, and as two numbers
    return 2 * (rows + columns)  # both operands in float32


def norm_bytes(numbers: int, itemsize: int) -> int:
    """Returns the bytes of temporaries for a LayerNorm, RMSNorm or GroupNorm whose input has `numbers` elements."""
    return _NORM_COPIES * numbers * itemsize


_NORM_FEATURES = 1 << 14  # of a token, which one program of the CUDA kernel has in registers


def token_norm_bytes(samples: int, tokens: int, features: int, *, has_mean: bool) -> int | None:
    """Returns the bytes of temporaries of the CUDA kernel of LayerNorm and RMSNorm; None if it is not used.

    They are sums over `NORM_TOKENS` tokens each, in float32.

    Args:
        samples: number of samples.
        tokens: tokens of each sample.
        features: features of each token.
        has_mean: whether the layer subtracts the mean, as LayerNorm does.
    """
    if not 0 < features <= _NORM_FEATURES:
        return None
    parts = -(-tokens // NORM_TOKENS)
    return 4 * (1 + has_mean) * samples * parts * features if parts > 1 else 0


def has_group_norm_kernel(numbers: int, groups: int) -> bool:
    """Returns whether GroupNorm's CUDA kernel is used for samples of `numbers` elements.

    One program of the kernel processes a whole group. For larger groups torch's kernels are faster, but need
    temporaries.
    """
    return 0 < numbers <= _GROUP_NORM_NUMBERS * groups


def embedding_sample_bytes(tokens: int, width: int, itemsize: int, sum_itemsize: int, copied: bool = False) -> int:
    """Returns the bytes of temporaries of an embedding's norm for one sample.

    Args:
        tokens: number of tokens in the sample.
        width: width of the embedding table.
        itemsize: bytes per element of the output gradients.
        sum_itemsize: bytes per element of sums over equal indices.
        copied: whether the output gradients are copied because they are not contiguous.
    """
    cast = 0 if itemsize == sum_itemsize else sum_itemsize
    return tokens * (INDEX_BYTES + width * (copied * itemsize + sum_itemsize + cast))


def embedding_workspace(batch: int, tokens: int, width: int, itemsize: int, sample_bytes: int, workspace: int) -> int:
    """Returns the limit on an embedding's temporaries, in bytes, where sums are float64.

    It is at most what all samples together would need in float32.
    """
    return min(workspace, max(sample_bytes, batch * tokens * (width * itemsize + INDEX_BYTES)))


@dataclass(frozen=True)
class Unfolding:
    """The way in which a convolution's input is unfolded: at once, or some samples, groups or channels at a time.

    Attributes:
        samples, groups: sizes of the input.
        channels: channels in one group.
        taps: elements of the kernel.
        tokens: output positions.
        padded: elements of one channel of a sample, including padding.
        copied: elements of one channel of a sample that are copied before they are unfolded.
        itemsize: bytes per element.
        is_view: whether the input is used as it is, without unfolding.
    """

    samples: int
    groups: int
    channels: int
    taps: int
    tokens: int
    padded: int
    copied: int
    itemsize: int
    is_view: bool

    def fits(self, workspace: int) -> bool:
        """Returns whether all samples can be unfolded at once."""
        elements = self.copied + (0 if self.is_view else self.taps * self.tokens)
        return self.samples * self.groups * self.channels * elements * self.itemsize <= workspace

    @property
    def channel_bytes(self) -> int:
        """Bytes of one channel: unfolded, plus at most two copies of the input (one cast or sliced, one padded)."""
        return (self.taps * self.tokens + 2 * self.padded) * self.itemsize

    def part(self, workspace: int) -> tuple[int, int, int]:
        """Returns the number of samples, groups and channels at a time; 0 channels if the workspace is too small."""
        unit = self.channel_bytes
        groups = fit(workspace, self.channels * unit, self.groups)
        samples = fit(workspace, self.groups * self.channels * unit, self.samples)
        channels = self.channels if groups else fit(workspace, unit, self.channels)
        return max(1, samples), max(1, groups), channels
