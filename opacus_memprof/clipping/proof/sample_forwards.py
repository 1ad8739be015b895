# SPDX-License-Identifier: Apache-2.0
"""Runs a model on a few samples of its arguments, and observes its layers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from opacus_memprof.clipping.forwards.state import ModuleState, RandomState, restoring_state
from opacus_memprof.clipping.layer_hooks import LayerHooks, Running
from opacus_memprof.clipping.layers import GenericLayer, Layer
from opacus_memprof.clipping.proof.batches import graph_nodes, tensors_in, variables
from opacus_memprof.clipping.proof.model_state import only_saved_tensors_hooks

SAMPLES = ((0, 1, 2), (0, 9, 2), (3, 4, 5, 6), (8, 7))
"""The samples of each forward. Indices beyond the batch stand for samples that are made from others."""
SIZE = len(SAMPLES[0])
"""The size of the first two forwards, in which values are observed; in the other forwards only shapes are."""


@dataclass
class SampleForward:
    """The data of one forward: summaries of output tensors, calls of layers, and parameters used outside of layers.

    The parameters are given by id; `draws` is whether random numbers were drawn.
    """

    outputs: list[Any]
    observations: list[Observation]
    used_parameters: set[int]
    draws: bool


class SampleForwards:
    """Forwards of a model on a few samples.

    Args:
        model: the module that was called: the model, or a part of it.
        hooks: the hooks of the layers.
        args, kwargs: the arguments of the module.
        run_model: runs the module's forward with the hooks of users, without its entry hooks.
    """

    def __init__(
        self,
        model: nn.Module,
        hooks: LayerHooks,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        run_model: Callable[[tuple[Any, ...], dict[str, Any]], Any],
    ) -> None:
        self.model, self.hooks, self.run_model = model, hooks, run_model
        self.leaves, self.structure = tree_flatten((args, kwargs))
        self.batch = hooks.batch
        self.samples: Sequence[tuple[int, ...]] = SAMPLES
        tensors = [leaf for leaf in self.leaves if isinstance(leaf, torch.Tensor)]
        self.random = RandomState.now(tensors[0].device)

    def run_samples(self, samples: Sequence[int], begin: Callable[[list[Any]], None]) -> None:
        """Runs the model on some samples. `begin` is called with the leaves of the arguments."""
        leaves = self.leaves_of(samples)
        args, kwargs = tree_unflatten(leaves, self.structure)
        with self._observing(samples, False), self.random.restored(), restoring_state(self.model), torch.enable_grad():
            begin(leaves)
            self.run_model(args, kwargs)

    def forward(self, samples: Sequence[int], observe: bool = False) -> SampleForward:
        """Returns a forward that ran with an autograd graph, but without the graph's saved tensors.

        A graph is needed because a model may return other outputs without gradients.
        """
        try:
            with only_saved_tensors_hooks((_drop, _refuse)):
                return self._run_forward(samples, observe)
        except Exception:  # the model computes gradients in its forward, and needs the tensors that were dropped
            return self._run_forward(samples, observe)

    def _run_forward(self, samples: Sequence[int], observe: bool) -> SampleForward:
        args, kwargs = tree_unflatten([self.select(leaf, samples) for leaf in self.leaves], self.structure)
        observing = self._observing(samples, observe)
        with (
            observing as observed,
            self.random.restored(),
            restoring_state(self.model),
            torch.enable_grad(),
        ):
            output = self.run_model(args, kwargs)
            draws = self.random.has_moved()
        leaves = tensors_in(output)
        used = used_parameters(leaves)
        return SampleForward(summaries(leaves, len(samples) != SIZE), observed, used, draws)

    def leaves_of(self, samples: Sequence[int]) -> list[Any]:
        """Returns the leaves of the arguments for some samples, sorted by the sample of the batch they are made from.

        See `select` for samples beyond the batch.
        """
        ordered = sorted(samples, key=lambda n: n % self.batch)
        return [self.select(leaf, ordered) for leaf in self.leaves]

    def select(self, leaf: Any, samples: Sequence[int]) -> Any:
        """Returns some samples of an input.

        A sample beyond the batch is made from one in it: sample n is sample n % B, rolled along its last dimension, or
        along its first one if it has several rows of integers. These may mean something together, as in a box.
        """
        if not isinstance(leaf, torch.Tensor) or leaf.dim() == 0 or len(leaf) != self.batch:
            return leaf
        rows = [leaf.detach()[n % self.batch] for n in samples]
        along = 0 if leaf.dim() > 2 and leaf.shape[1] > 1 and not leaf.is_floating_point() else -1
        return torch.stack(
            [x.roll(n // self.batch, along) if x.dim() else x for x, n in zip(rows, samples, strict=True)]
        )

    @contextmanager
    def _observing(self, samples: Sequence[int], observe: bool) -> Iterator[list[Observation]]:
        observations: list[Observation] = []
        shapes_only = len(samples) != SIZE

        def add(layer: Layer, inputs: list[Any], structure: Any, outputs: list[Any], began: Running) -> None:
            draws = began.random is not None and began.random.has_moved()
            state = began.state if began.state is not None and began.state.has_changed() else None
            is_repeated = isinstance(layer, GenericLayer) and tuple(samples) == self.samples[0]
            values = (_detached(inputs), _detached(outputs)) if is_repeated else None
            x, y = summaries(inputs, shapes_only), summaries(outputs, shapes_only)
            observations.append(Observation(layer, x, y, structure, began.random, draws, state, values))

        self.hooks.batch, self.hooks.is_probing = len(samples), True
        self.hooks.observe = add if observe else None
        try:
            yield observations
        finally:
            self.hooks.batch, self.hooks.is_probing, self.hooks.observe = self.batch, False, None


def _detached(leaves: list[Any]) -> list[Any]:
    return [leaf.detach() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]


def _drop(tensor: torch.Tensor) -> None:
    """Packs a saved tensor by dropping it, because no backward will run."""


def _refuse(packed: None) -> torch.Tensor:
    raise RuntimeError("a probe's forward has no saved tensors")


_BLOCK = 32  # elements
# The first signs of the Thue-Morse sequence: sums with them change when adjacent elements are swapped, or grow equally.
_SIGNS = [1 - 2 * (n.bit_count() % 2) for n in range(_BLOCK)]


@dataclass(frozen=True)
class TensorSummary:
    """A tensor's shape, and enough of its values to detect rows in which another tensor differs.

    Attributes:
        meta: a tensor of the same shape and dtype without data.
        sums: signed sums of blocks of adjacent elements in the last dimensions: [d0, d1, blocks] for [d0, d1, ...], and
            [d0, blocks] for [d0, d1]. Smaller tensors are kept as they are. Empty if only the shape is needed.
        moderate: where a sum is not finite, sums that leave extreme numbers out, and the counts of these numbers.
    """

    meta: torch.Tensor
    sums: torch.Tensor
    moderate: torch.Tensor | None = None

    @classmethod
    def from_tensor(cls, x: torch.Tensor, shape_only: bool = False) -> TensorSummary:
        """Returns the summary of `x`."""
        x = x.detach()
        return cls(x.to("meta"), *((x.new_empty(0), None) if shape_only else _block_sums(x)))

    def beside(self, other: TensorSummary) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns what can be compared of this summary and another one.

        Where one sample's infinities are in one of two tensors only, the other samples' own sums are finite in both.
        """
        if self.moderate is None or other.moderate is None:
            return self.sums, other.sums
        return self.moderate, other.moderate


@dataclass
class Observation:
    """One call of a layer in a probe.

    Attributes:
        inputs: the leaves of the arguments, with summaries instead of tensors.
        outputs: the leaves of the output, with summaries instead of tensors.
        structure: the structure of the arguments; None if the layer is not a GenericLayer.
        random: the initial state of the random number generators, for a GenericLayer.
        draws: whether a GenericLayer has drawn random numbers.
        state: the initial state of the module, for a GenericLayer whose forward changes it.
        values: the leaves of arguments and output themselves, if the call will be repeated.
    """

    layer: Layer
    inputs: list[Any]
    outputs: list[Any]
    structure: Any
    random: RandomState | None
    draws: bool
    state: ModuleState | None
    values: tuple[list[Any], list[Any]] | None


def summaries(leaves: list[Any], shape_only: bool = False) -> list[Any]:
    """Returns the leaves, with summaries instead of tensors."""
    return [TensorSummary.from_tensor(leaf, shape_only) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]


def used_parameters(leaves: list[Any]) -> set[int]:
    """Returns the ids of the parameters in the autograd graphs of the tensors among `leaves`."""
    nodes = graph_nodes(leaf for leaf in leaves if isinstance(leaf, torch.Tensor))
    return set(map(id, variables(nodes)))


def _block_sums(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    if x.is_complex():
        x = torch.view_as_real(x)
    if x.dim() < 2 or (x.dim() == 2 and x.shape[1] <= _BLOCK):
        return x.clone(), None
    rows = x.flatten(2) if x.dim() > 2 else x
    whole = rows.shape[-1] // _BLOCK * _BLOCK
    blocks, rest = rows[..., :whole].reshape(*rows.shape[:-1], whole // _BLOCK, _BLOCK), rows[..., whole:].unsqueeze(-2)
    sums = torch.cat([_signed_sums(blocks), _signed_sums(rest)], -1)
    if not x.is_floating_point() or sums.isfinite().all():
        return sums, None
    return sums, torch.cat([*_sums_without_large(blocks), *_sums_without_large(rest)], -1)


def _signed_sums(blocks: torch.Tensor) -> torch.Tensor:
    """Returns signed sums, [..., n, b] -> [..., n], without a temporary as large as `blocks`."""
    if not blocks.is_floating_point():
        return blocks.sum(-1, dtype=torch.int64)
    if blocks.dtype.itemsize == 1:
        blocks = blocks.float()
    with torch.autocast(blocks.device.type, enabled=False):
        return blocks @ torch.tensor(_SIGNS[: blocks.shape[-1]], dtype=blocks.dtype, device=blocks.device)


def _sums_without_large(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns sums that ignore extreme numbers, and the counts of these numbers.

    Extreme are infinities and the lowest number of the dtype, as in masks.
    """
    is_large = ~(blocks.abs() < 1e4)
    return _signed_sums(blocks.masked_fill(is_large, 0)), is_large.sum(-1).to(blocks.dtype)
