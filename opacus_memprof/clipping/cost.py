# SPDX-License-Identifier: Apache-2.0
"""The cost of clipping one layer, computed from its shapes, and the choice of how to clip it.

A linear map with a ``rows x columns`` weight sees, for each of ``batch`` samples, ``tokens`` inputs ``a`` (columns)
and output gradients ``g`` (rows). The sample's weight gradient is ``sum_t g_t a_t^T``, and its squared norm is also
``sum_{t,u} (g_t . g_u)(a_t . a_u)`` (Goodfellow 2015, arXiv 1510.01799; Li et al. 2022, arXiv 2110.05679). So there are
two exact ways to compute the norm, and two things that can be kept until the clip factors are known (book-keeping, Bu
et al. 2023, arXiv 2210.00038):

====================  ============================  =======================================
                      per-sample gradient           pair (a, g), norm by Gram tiles
====================  ============================  =======================================
elements kept         batch rows columns            batch tokens (rows + columns)
floating point, norm  2 batch rows columns          batch tokens (tokens + tile) (rows + columns)
weight gradient       once, it *is* the gradient    once, when the clipped sum is formed
====================  ============================  =======================================

For both memory and time the two are equal at ``tokens = rows columns / (rows + columns)``. With fewer tokens the pair
is smaller, and the Gram product (half of it, by symmetry) costs less than half a weight gradient. With more tokens the
gradient is smaller, and costs only what training without privacy computes too. Hence the rule: *keep whichever is
smaller*.

Needs no torch, so that it can be used before anything runs.
"""

import functools
from dataclasses import dataclass
from typing import Literal

FLOPS_PER_BYTE = 100.0
"""Machine balance: floating-point operations that take as long as moving one byte. It is 103 (TF32) to 206 (bfloat16)
on an H200 and about 10 on ordinary CPUs. Another value changes the choice only where both ways cost nearly the same."""

GRAM_TILE = 128
"""Tokens on one side of a Gram tile, as in the CUDA kernel."""

GROUP_NORM_NUMBERS = 1 << 16
"""Of a sample and group that one program of GroupNorm's CUDA kernel goes through; with more it would be slower than
torch's kernels, which need temporaries."""

_DRAWN_APART = 1 << 31
"""Bytes: of tensors as large as this torch draws noise in parts, whose order the kernel does not repeat."""


def draws_in_place(nbytes: int) -> bool:
    """Whether on CUDA the noise of a sum with so many bytes is drawn where it is added, and takes no memory."""
    return nbytes < _DRAWN_APART


@dataclass(frozen=True)
class Cost:
    """Floating-point operations and bytes moved to and from device memory."""

    flops: int
    bytes: int

    @property
    def in_bytes(self) -> float:
        """The cost as one number: bytes moved, plus operations divided by ``FLOPS_PER_BYTE``."""
        return self.bytes + self.flops / FLOPS_PER_BYTE


@dataclass(frozen=True)
class Choice:
    """How one layer is clipped.

    Attributes:
        norm: how the per-sample norms are computed.
        keep: what is kept until the clip factors are known.
        norm_cost: the cost of computing the norms.
        kept_bytes: bytes that are live from this layer's backward until the clipped sum is formed.
    """

    norm: Literal["gradient", "gram"]
    keep: Literal["gradient", "pair"]
    norm_cost: Cost
    kept_bytes: int


def gradient_norm_cost(batch: int, tokens: int, rows: int, columns: int, itemsize: int) -> Cost:
    """The cost of norms from per-sample gradients that are formed, read once and dropped."""
    elements = batch * (tokens * (rows + columns) + 2 * rows * columns)
    return Cost(2 * batch * (tokens + 1) * rows * columns, elements * itemsize)


def kept_norm_cost(batch: int, rows: int, columns: int, itemsize: int) -> Cost:
    """The cost of norms from per-sample gradients that are kept: one read."""
    return Cost(2 * batch * rows * columns, batch * rows * columns * itemsize)


def gram_norm_cost(batch: int, tokens: int, rows: int, columns: int, itemsize: int, tile: int = GRAM_TILE) -> Cost:
    """The cost of norms from the lower triangle of Gram tiles, each of which reads its two strips of ``a`` and ``g``.
    Strips that are still in the L2 cache are counted, although they are not read from device memory again."""
    if tokens == 1:
        return Cost(2 * batch * (rows + columns), batch * (rows + columns) * itemsize)
    tiles = -(-tokens // tile)
    flops = batch * tokens * (tokens + tile) * (rows + columns)
    return Cost(flops, batch * (tiles + 1) * tokens * (rows + columns) * itemsize)


def ghost_norm_cost(batch: int, tokens: int, rows: int, columns: int, itemsize: int, bias: bool) -> Cost:
    """The cost of norms as Opacus 1.6 computes them for three-dimensional inputs: ggT and aaT are written and read, so
    is their product, and with a bias ggT is computed again."""
    if tokens == 1:
        return gram_norm_cost(batch, tokens, rows, columns, itemsize)
    square = batch * tokens * tokens
    inputs = batch * tokens * (rows + columns + (rows if bias else 0))
    flops = 2 * square * (rows + columns + (rows if bias else 0))
    return Cost(flops, (inputs + square * (8 if bias else 6)) * itemsize)


@functools.lru_cache(maxsize=4096)  # every layer asks in every step
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
        rows, columns: of the weight matrix (of one group's, for a grouped convolution).
        itemsize: bytes per element.
        pair_elements: elements of the tensors that are kept as the pair. Default: ``batch tokens (rows + columns)``. A
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
