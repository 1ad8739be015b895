# SPDX-License-Identifier: Apache-2.0
"""Bytes that Opacus 1.6 allocates for a layer, by arithmetic from its shapes. No torch, no profiler.

Letters: s = bytes an element, B = batch, T = product of the middle dimensions (1 if there are none).

A *timeline* is a sequence of signed byte counts, one for each block that the code allocates (+) or frees (-),
in the order of Opacus' source; `peak` is its highest running sum. All figures are requested bytes: round each
block up to 512 for what CUDA's caching allocator hands out.

Blocks of a few bytes that a CPU operator makes for a Python number (`backprops * n`) are left out: they are
gone before a formula's peak.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from tests.oracle.layer import Layer, Parameter, Sampler, multiply_and_sum

ITEMSIZE = {"float64": 8, "float32": 4, "bfloat16": 2}
INDEX = 8  # bytes of an int64 token id


@dataclass(frozen=True)
class Linear(Layer):
    """`nn.Linear(d, p)` on an input of shape (B, *middle, d). A flag is None where there is no bias."""

    d: int
    p: int
    middle: tuple[int, ...] = ()
    weight: bool = True
    bias: bool | None = True

    @property
    def saved_by_autograd(self) -> bool:  # type: ignore[override]
        return self.weight  # addmm keeps its first matrix only for the weight's gradient

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        bias = () if self.bias is None else (Parameter(self.p, self.bias),)
        return (Parameter(self.p * self.d, self.weight), *bias)

    @property
    def positions(self) -> int:
        return math.prod(self.middle)

    @property
    def backprop(self) -> int:
        return self.s * self.batch * self.positions * self.p

    @property
    def captured(self) -> int:
        return self.s * self.batch * self.positions * self.d

    def grad_sampler(self) -> Sampler:
        """einsum nij, then the bias: a sum over the middle, or with no middle the output gradient itself."""
        results = [self.b * self.p * self.d] if self.weight else []
        if self.bias:
            results.append(self.b * self.p if self.middle else 0)
        return Sampler(tuple(results), tuple(results))

    def functorch_sampler(self) -> Sampler | None:
        out, b, weight = self.backprop, self.b, self.b * self.p * self.d
        bias = [] if self.bias is None else [b * self.p]
        # vmap takes addmm apart: the product, 1 * bias, their sum. Beyond three dimensions it is not an addmm.
        scaled = [self.s * self.p] if bias and len(self.middle) < 2 else []
        forward = [out, *scaled, out, *(-size for size in scaled), -out] if bias else [out]
        timeline = [*forward, *multiply_and_sum(out, b), out, weight, *bias, -out, -b, -b]
        return Sampler(tuple(timeline), self.per_sample_results)

    def norm_sampler(self) -> Sampler | None:
        b = self.b
        weight, bias = int(self.weight), int(bool(self.bias))
        if not self.middle:
            # weight: g, a (kept by their names), g * a, its root; bias: g again, its root
            timeline = [b, b, b, b, -b] * weight + [b, b, -b] * bias + [-b, -b] * weight
            return Sampler(tuple(timeline), (b,) * (weight + bias))
        square = b * self.positions**2
        # ggT, aaT, their product's sum, its clamp, the root; ggT and aaT keep their names until the return
        timeline = [square, square, b, b, -b, b] * weight
        # ggT anew while the old one still has the name
        timeline += [square, *([-square] * weight), b, b, -b, b, -b] * bias
        timeline += [-square] * bias if bias else [-square] * weight
        timeline += [-square, -b] * weight
        return Sampler(tuple(timeline), (b,) * (weight + bias))


@dataclass(frozen=True)
class RNNLinear(Linear):
    """The cell of DPLSTM, DPGRU and DPRNN: a 2-D Linear run once each time step. It has no norm sampler."""

    steps: int = 1

    @property
    def calls(self) -> int:  # type: ignore[override]
        return self.steps

    def norm_sampler(self) -> Sampler | None:
        return None


@dataclass(frozen=True)
class Embedding(Layer):
    """`nn.Embedding(V, D)` on ids of shape (B, T), no id twice in a sample (ghost merges repeated ones)."""

    length: int
    entries: int
    dim: int

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        return (Parameter(self.entries * self.dim),)

    @property
    def backprop(self) -> int:
        return self.s * self.batch * self.length * self.dim

    @property
    def captured(self) -> int:
        return INDEX * self.batch * self.length

    def grad_sampler(self) -> Sampler:
        """zeros(B, V, D) and an in-place scatter; the expanded index is a view."""
        return Sampler(self.per_sample_results, self.per_sample_results)

    def functorch_sampler(self) -> Sampler | None:
        out, b, ids = self.backprop, self.b, INDEX * self.batch * self.length
        offsets = INDEX * self.batch  # vmap shifts each sample's ids to rows of its own
        timeline = [out, *multiply_and_sum(out, b), out]
        timeline += [offsets, ids, *self.per_sample_results, -ids, -offsets, -out, -b, -b]
        return Sampler(tuple(timeline), self.per_sample_results)

    def norm_sampler(self) -> Sampler | None:
        """On the CPU. Pairs of (sample, id), their unique rows, the gradients summed over equal pairs, their squares.

        `torch.unique` makes its inverse and counts whether asked or not; CUDA's has other scratch space.
        """
        b, column, arange = self.b, INDEX * self.batch * self.length, INDEX * self.batch
        pairs, merged, sums = 2 * column, self.backprop, self.s * self.batch * self.length
        rows = [arange, column, -arange, pairs]
        unique = [pairs, column, column, pairs, -pairs, -column]
        squares = [merged, merged, -merged, merged, sums, -merged]
        left = [column, pairs, pairs, column, merged, sums, b]  # each has a name until the return
        return Sampler((*rows, *unique, *squares, b, b, *(-size for size in left)), (b,))


@dataclass(frozen=True)
class Norm(Layer):
    """`nn.LayerNorm(D)` or `nn.RMSNorm(D)` (no bias) on (B, *middle, D), with D of two or more.

    D >= 2 makes the mean and rstd of a position smaller than its elements, so they never set the peak.
    """

    dim: int
    middle: tuple[int, ...] = ()
    bias: bool = True

    @property
    def saved_by_autograd(self) -> bool:  # type: ignore[override]
        # LayerNorm keeps its input. RMSNorm on the CPU is made of products: for the weight's gradient autograd keeps
        # x * rstd, and x itself only when x needs a gradient.
        return self.bias

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        return (Parameter(self.dim),) * (1 + self.bias)

    @property
    def backprop(self) -> int:
        return self.s * self.batch * math.prod(self.middle) * self.dim

    @property
    def captured(self) -> int:
        return self.backprop

    def grad_sampler(self) -> Sampler:
        """The normalised input, its product with the output gradient, and the product's sum over the middle."""
        full, one = self.backprop, self.b * self.dim
        if not self.middle:  # nothing to sum: the product is the result, and the bias' is the output gradient
            return Sampler((full, full, -full), (full, *((0,) * self.bias)))
        timeline = [full, full, -full, one, -full] + [one] * self.bias
        return Sampler(tuple(timeline), (one,) * (1 + self.bias))

    def functorch_sampler(self) -> Sampler | None:
        full, one, b = self.backprop, self.b * self.dim, self.b
        each = b * math.prod(self.middle)  # mean, or rstd
        if not self.bias:  # RMSNorm: squares, mean, rstd; x * rstd, kept for backward; that times the weight
            forward = [full, each, each, -each, -full, full, full, -each]
            backward = [full, full, one, -full, -full, -full, -b, -b]
        else:
            forward = [full, each, each]
            backward = [full, one, full, full, -full, full, one, -full, -full, -b, -each, -each, -full, -b]
        return Sampler((*forward, *multiply_and_sum(full, b), *backward), self.per_sample_results)


@dataclass(frozen=True)
class GroupNorm(Layer):
    """`nn.GroupNorm(groups, C)` on (B, C, *spatial), at least two elements a group."""

    channels: int
    spatial: tuple[int, ...]
    groups: int

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        return (Parameter(self.channels),) * 2

    @property
    def backprop(self) -> int:
        return self.s * self.batch * self.channels * math.prod(self.spatial)

    @property
    def captured(self) -> int:
        return self.backprop

    def grad_sampler(self) -> Sampler:
        """As Norm, but the product keeps its name until the return."""
        full, one = self.backprop, self.b * self.channels
        return Sampler((full, full, -full, one, one, -full), (one, one))

    def functorch_sampler(self) -> Sampler | None:
        """vmap folds the samples into the groups, so that weight and bias are applied outside the operator."""
        full, one, each, b = self.backprop, self.b * self.channels, self.b * self.groups, self.b
        forward = [full, each, each, full, -full, full, -full]
        # sums of dy * x and of dy; then three products and differences of that size, and two sums over the sample
        sums = [full, one, -full, one, one, one, one, one, -one, -one, one, -one]
        backward = [full, *sums, -full, -each, -b, -each, -one, -one, -b]
        return Sampler((*forward, *multiply_and_sum(full, b), *backward), self.per_sample_results)


@dataclass(frozen=True)
class Conv(Layer):
    """`nn.Conv1d` or `nn.Conv2d` on (B, c, *size)."""

    c: int
    o: int
    kernel: tuple[int, ...]
    size: tuple[int, ...]
    stride: int = 1
    padding: int = 0
    dilation: int = 1
    groups: int = 1
    bias: bool = True

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        weight = Parameter(self.o * self.c // self.groups * math.prod(self.kernel))
        return (weight, Parameter(self.o)) if self.bias else (weight,)

    @property
    def output(self) -> tuple[int, ...]:
        return tuple(
            (n + 2 * self.padding - self.dilation * (k - 1) - 1) // self.stride + 1
            for n, k in zip(self.size, self.kernel, strict=True)
        )

    @property
    def backprop(self) -> int:
        return self.s * self.batch * self.o * math.prod(self.output)

    @property
    def captured(self) -> int:
        return self.s * self.batch * self.c * math.prod(self.size)

    def grad_sampler(self) -> Sampler:
        """pad (a copy even at padding 0), unfold, the dense F of all channel pairs, and its diagonal blocks.

        Conv1d is unfolded by im2col, which first makes an output of the input's size. Conv2d's `unfold2d` reshapes a
        strided view, which does not copy when the kernel is 1 x 1 and the stride is 1. With one group F is the result.
        """
        b = self.b
        pad = b * self.c * math.prod(n + 2 * self.padding for n in self.size)
        unfolded = b * self.c * math.prod(self.kernel) * math.prod(self.output)
        view = len(self.kernel) == 2 and math.prod(self.kernel) == 1 and self.stride == 1
        dense = b * self.o * self.c * math.prod(self.kernel)
        weight = dense // self.groups
        im2col = len(self.kernel) == 1
        timeline = [pad] if view else [pad, *[pad] * im2col, unfolded, *[-pad] * im2col, -pad]
        timeline += [dense] if self.groups == 1 else [dense, weight, -dense]
        timeline += [b * self.o] * self.bias
        timeline += [-pad if view else -unfolded]
        return Sampler(tuple(timeline), (weight, b * self.o) if self.bias else (weight,))

    @property
    def expanded_weights_view(self) -> bool:
        """ExpandedWeights' result is a permuted view: below 32 samples and with one group."""
        return self.groups == 1 and self.batch < 32

    def expanded_weights_copies(self) -> tuple[int, ...]:
        weight, *bias = self.per_sample_results
        return (weight * self.expanded_weights_view, *(0 for _ in bias))

    def expanded_weights_results(self, reduction: str) -> tuple[int, ...]:
        """Returns the result of ExpandedWeights' convolution of input and output gradient.

        It is computed below 32 samples and with one group, and may be wider than the kernel: `sum` keeps a narrowed
        view of it, `mean` a copy.
        """
        weight, *bias = self.per_sample_results
        if reduction == "sum" and self.expanded_weights_view:
            wide = math.prod(
                (n + 2 * self.padding - self.stride * (out - 1) - 1) // self.dilation + 1
                for n, out in zip(self.size, self.output, strict=True)
            )
            weight = self.b * self.c * self.o * wide
        return (weight, *bias)


@dataclass(frozen=True)
class SequenceBias(Layer):
    """`SequenceBias(E)`: appends a learned element to a sequence (B, T, E). Its result is a view."""

    length: int
    dim: int

    saved_by_autograd = False  # torch.cat keeps nothing

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        return (Parameter(self.dim),)

    @property
    def backprop(self) -> int:
        return self.s * self.batch * (self.length + 1) * self.dim

    @property
    def captured(self) -> int:
        return self.s * self.batch * self.length * self.dim

    def grad_sampler(self) -> Sampler:
        return Sampler((), (0,))

    def functorch_sampler(self) -> Sampler | None:
        out, b, one = self.backprop, self.b, self.b * self.dim
        return Sampler((out, *multiply_and_sum(out, b), out, one, -out, -b, -b), self.per_sample_results)
