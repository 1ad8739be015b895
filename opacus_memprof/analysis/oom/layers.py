# SPDX-License-Identifier: Apache-2.0
"""Bytes that Opacus' hooks take for one layer and `n` samples, from its shapes alone.

s is the bytes of an element of the output's gradients, T the tokens of a sample, p and d the rows and columns of the
weight, w all trained elements. Source: the samplers of Opacus 1.6 (opacus/grad_sample), read line by line.
"""

from dataclasses import dataclass

from opacus_memprof.clipping import cost
from opacus_memprof.workload import Forward, Module

_NORMS = ("LayerNorm", "RMSNorm", "GroupNorm", "InstanceNorm1d", "InstanceNorm2d", "InstanceNorm3d")


@dataclass(frozen=True)
class Layer:
    """A module, its forward pass, and `activations`: what of all samples lives from its forward to its backward, of
    which `largest` is one block. That includes what operations without parameters around it have saved."""

    name: str
    module: Module
    forward: Forward
    activations: int
    largest: int = 0

    @property
    def elements(self) -> int:
        return self.module.weight + self.module.bias

    def of(self, size: int, n: int) -> int:
        """What `size` bytes of the forward's samples are for n of them."""
        return size * n // max(self.forward.samples, 1)

    def gradients(self, n: int) -> int:
        """Per-sample gradients: s·n·w."""
        return self.forward.width * n * self.elements

    def flowing(self, n: int, mean: bool) -> int:
        """The gradients of output and input, and for a mean loss the scaled copy of the first."""
        output, given = self.of(self.forward.output_bytes, n), self.of(self.forward.input_bytes, n)
        return output * (2 if mean else 1) + (0 if self.forward.from_leaf else given)

    def sampler(self, n: int) -> int:
        """The most that making per-sample gradients takes, they themselves included: s·n·w twice, for the sampler's
        result is copied into zeros; or what a convolution unfolds; or a norm's normalised copies."""
        twice = 2 * self.gradients(n)
        forward = self.forward
        if self.module.kind.startswith("Conv") and self.module.columns:
            unfolded = forward.width * n * forward.tokens * self.module.columns
            return max(self.of(forward.input_bytes, n) + unfolded, unfolded + self.gradients(n), twice)
        if self.module.kind in _NORMS:
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

    def flash_kept(self, n: int) -> int:
        """What flash_clip keeps until the clipping factors are known (clipping.cost)."""
        forward, module = self.forward, self.module
        if not module.rows or module.kind == "Embedding":
            return self.of(forward.output_bytes, n)
        return self._choice(n).kept_bytes + forward.width * n * module.bias

    def flash_work(self, n: int) -> int:
        """Temporaries of flash_clip's norms: products of tokens by tokens, or gradients that are not kept."""
        forward, module = self.forward, self.module
        if module.kind.startswith("Conv") or module.kind in _NORMS:
            return self.sampler(n)
        if not module.rows or module.kind == "Embedding" or forward.tokens == 1:
            return 0
        choice = self._choice(n)
        if choice.keep == "gradient":
            return 0
        return forward.width * n * forward.tokens**2 if choice.norm == "gram" else self.gradients(n)

    def _choice(self, n: int) -> cost.Choice:
        forward, module = self.forward, self.module
        return cost.choose(n, forward.tokens, module.rows, module.columns, forward.width, bias=bool(module.bias))
