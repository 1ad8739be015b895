# SPDX-License-Identifier: Apache-2.0
"""What every formula is made of: timelines, parameters, samplers, and a layer with Opacus' hooks. No torch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate


def peak(timeline: Iterable[int]) -> int:
    """Highest running sum of a timeline, in bytes above where it starts."""
    return max(accumulate(timeline, initial=0))


def multiply_and_sum(out: int, b: int) -> list[int]:
    """functorch's loss from the layer's output: the product with the output gradient, its sum, and backward's ones."""
    return [out, b, -out, -out, b]


@dataclass(frozen=True)
class Parameter:
    """One parameter of a layer: its number of elements, and whether it is trained."""

    numel: int
    trainable: bool = True


@dataclass(frozen=True)
class Sampler:
    """One call of a grad or norm sampler.

    `timeline` runs from entry to return, with the results still alive. `results` are the bytes that each trained
    parameter's result owns: 0 where it is a view of the output gradient.
    """

    timeline: tuple[int, ...]
    results: tuple[int, ...]


@dataclass(frozen=True)
class Layer:
    """A module with Opacus' hooks. Subclasses state shapes; `calls` is how often a forward runs it (time steps)."""

    batch: int
    s: int

    calls = 1
    saved_by_autograd = True  # autograd keeps the captured input as well

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        """Parameters in the order of `module.parameters()`."""
        raise NotImplementedError

    @property
    def backprop(self) -> int:
        """Bytes of the output gradient of one call."""
        raise NotImplementedError

    @property
    def captured(self) -> int:
        """Bytes of the storage of one captured input."""
        raise NotImplementedError

    def grad_sampler(self) -> Sampler:
        """The layer's entry in GRAD_SAMPLERS."""
        raise NotImplementedError

    def norm_sampler(self) -> Sampler | None:
        """The layer's entry in NORM_SAMPLERS; None where ghost clipping takes the norm of a per-sample gradient."""
        return None

    def functorch_sampler(self) -> Sampler | None:
        """`ft_compute_per_sample_gradient`: forward, product with the output gradient, sum, and backward under vmap.

        Computes the gradients of frozen parameters as well. None where an operator takes scratch space of its own.
        """
        return None

    def expanded_weights_results(self, reduction: str) -> tuple[int, ...]:
        """Storages of `grad_sample` under ExpandedWeights, whose functions keep what they computed."""
        return self.per_sample_results

    def expanded_weights_copies(self) -> tuple[int, ...]:
        """Bytes that reshaping each `grad_sample` under ExpandedWeights copies: 0 unless it is a permuted view."""
        return (0,) * len(self.trained)

    @property
    def b(self) -> int:
        """Bytes of one element for each sample."""
        return self.s * self.batch

    @property
    def trained(self) -> tuple[int, ...]:
        return tuple(p.numel for p in self.parameters if p.trainable)

    @property
    def per_sample_results(self) -> tuple[int, ...]:
        """sB|p| for each trained parameter p."""
        return tuple(self.b * numel for numel in self.trained)
