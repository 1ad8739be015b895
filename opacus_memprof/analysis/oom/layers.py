# SPDX-License-Identifier: Apache-2.0
"""Bytes that Opacus' hooks take for one layer and `n` samples, from its shapes alone.

s is the bytes of an element of the output's gradients, T the tokens of a sample, p and d the rows and columns of the
weight, w all trained elements. Source: the samplers of Opacus 1.6 (opacus/grad_sample), read line by line.
"""

import math
from dataclasses import dataclass

from opacus_memprof.workload import Forward, Module

NORMS = ("LayerNorm", "RMSNorm", "GroupNorm", "InstanceNorm1d", "InstanceNorm2d", "InstanceNorm3d")


def reduction(outputs: int, rows: int, processors: int) -> int:
    """What torch's sum of `rows` rows takes on a GPU with so many multiprocessors: partial sums of all blocks of
    threads, as ATen/native/cuda/Reduce.cuh launches them: four outputs a thread, 128 threads a block, 2048 a
    multiprocessor, 16 to 256 values a thread."""
    width = min(1 << max((outputs // 4).bit_length() - 1, 0), 32)
    values, grid, most = math.ceil(rows * width / 128), math.ceil(outputs / (4 * width)), 16 * processors
    if values < 256 or grid > most:
        return 0
    blocks = max(min(math.ceil(most / grid), math.ceil(values / 16)), math.ceil(values / 256))
    return 4 * outputs * 4 * width * blocks


@dataclass(frozen=True)
class Layer:
    """A module, its forward pass, and `activations`: what of all samples lives from its forward to its backward, of
    which `largest` is one block. That includes what operations without parameters around it have saved. `passing`: of
    the gradient that lives through its backward, to be added to where a residual branch began."""

    name: str
    module: Module
    forward: Forward
    activations: int
    largest: int = 0
    passing: int = 0

    @property
    def elements(self) -> int:
        return self.module.weight + self.module.bias

    @property
    def convolves(self) -> bool:
        return self.module.kind.startswith("Conv") and self.module.columns > 0

    def of(self, size: int, n: int) -> int:
        """What `size` bytes of the forward's samples are for n of them."""
        return size * n // max(self.forward.samples, 1)

    def gradients(self, n: int) -> int:
        """Per-sample gradients: s·n·w."""
        return self.forward.width * n * self.elements

    def flowing(self, n: int, mean: bool) -> int:
        """The gradients of output and input, what passes by, and for a mean loss the scaled copy of the first."""
        output, given = self.of(self.forward.output_bytes, n), self.of(self.forward.input_bytes, n)
        given = 0 if self.forward.from_leaf else given
        return output * (2 if mean else 1) + given + self.of(self.passing, n)

    def relayout(self, n: int) -> int:
        """What a convolution's backward takes besides the gradients of its output and input, if its library computes in
        a layout of its own: it copies the first into it, and the second from it, and the weight. On an H200 cuDNN's
        workspace was that to within 1 KiB (benchmarks/convolution_workspace.py)."""
        if not self.forward.relaid:
            return 0
        return (
            self.of(self.forward.input_bytes + self.forward.output_bytes, n) + self.forward.width * self.module.weight
        )

    def sums(self, n: int, processors: int, *, by_sample: bool) -> int:
        """What summing the gradients of a Linear's output over tokens takes on a GPU, for the bias; over samples too
        where autograd does it."""
        if self.module.kind != "Linear" or not self.module.bias:
            return 0
        rows, tokens = self.module.bias, self.forward.tokens
        return reduction(n * rows, tokens, processors) if by_sample else reduction(rows, n * tokens, processors)

    def sampler(self, n: int) -> int:
        """The most that making per-sample gradients takes, they themselves included: s·n·w twice, for the sampler's
        result is copied into zeros; or what a convolution unfolds; or a norm's normalised copies."""
        twice = 2 * self.gradients(n)
        forward = self.forward
        if self.convolves:
            unfolded = forward.width * n * forward.tokens * self.module.columns * self.module.groups
            dense = self.gradients(n) * self.module.groups  # of all pairs of groups, of which the diagonal is taken
            made = dense + self.gradients(n) if self.module.groups > 1 else dense
            return max(self.of(forward.input_bytes, n) + unfolded, unfolded + made, twice)
        if self.module.kind in NORMS:
            return max(2 * self.of(forward.output_bytes, n), twice)
        return twice

    def ghost(self, n: int) -> int:
        """The most that norms take in ghost clipping: a Linear of T > 1 tokens makes matrices of T·T, s·n·T² each, two
        for the weight and with them one for the bias. Layers without a norm sampler make per-sample gradients."""
        forward, module = self.forward, self.module
        if not module.norm_sampler:
            return self.sampler(n)
        if module.kind == "Embedding":
            return 48 * n * forward.tokens + 2 * self.of(forward.output_bytes, n)
        squares = 2 * bool(module.weight) + bool(module.bias)
        return forward.width * n * forward.tokens**2 * squares if forward.tokens > 1 else 0

    def cast(self, n: int) -> int:
        """Clipping casts per-sample gradients to the parameter's type, where theirs is narrower."""
        wide = self.module.bytes // max(self.elements, 1)
        return wide * n * self.module.weight if self.forward.width < wide else 0
