# SPDX-License-Identifier: Apache-2.0
"""Runs a model on a few samples of its arguments, and observes its layers."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from opacus_memprof.clipping.forwards.module_state import restoring_state
from opacus_memprof.clipping.forwards.random_state import RandomState
from opacus_memprof.clipping.layer_hooks import LayerHooks, Running
from opacus_memprof.clipping.layers import GenericLayer, Layer
from opacus_memprof.clipping.proof.observation import Observation, summaries, used_parameters
from opacus_memprof.clipping.proof.outputs import tensors_in

SAMPLES = ((0, 1, 2), (0, 9, 2), (3, 4, 5, 6), (8, 7))
"""The samples of each forward. Indices beyond the batch stand for samples that are made from others."""
SIZE = len(SAMPLES[0])
"""The size of the first two forwards, in which values are observed; in the other forwards only shapes are."""


@dataclass
class SampleForward:
    """The data of one forward: summaries of output tensors, calls of layers, and parameters used outside of layers.

    The parameters are given by id.
    """

    outputs: list[Any]
    observations: list[Observation]
    used_parameters: set[int]


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
            with torch.autograd.graph.saved_tensors_hooks(_drop, _refuse):
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
        leaves = tensors_in(output)
        used = used_parameters(leaves)
        return SampleForward(summaries(leaves, len(samples) != SIZE), observed, used)

    def leaves_of(self, samples: Sequence[int]) -> list[Any]:
        """Returns the leaves of the arguments for some samples. Samples that others are made from come first."""
        ordered = sorted(samples, key=lambda n: n % self.batch)
        return [self.select(leaf, ordered) for leaf in self.leaves]

    def select(self, leaf: Any, samples: Sequence[int]) -> Any:
        """Returns some samples of an input. Samples beyond the batch are others, rolled along their last dimension."""
        if not isinstance(leaf, torch.Tensor) or leaf.dim() == 0 or len(leaf) != self.batch:
            return leaf
        rows = [leaf.detach()[n % self.batch] for n in samples]
        return torch.stack([x.roll(n // self.batch, -1) if x.dim() else x for x, n in zip(rows, samples, strict=True)])

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
