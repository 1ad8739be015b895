# SPDX-License-Identifier: Apache-2.0
"""Finds out where layers have the samples of a batch, by running the model on a few samples.

Four forwards: of three samples X; of Y, which is X but for its second sample; and of five and four other samples. A
dimension that grows with their number has the samples, and what differs between X and Y in the rows of other samples
shows that samples mix. Tensors that do not grow are shared by all samples, such as positions. Layers whose tensors fit
in no arrangement are repeated as a part of the module around them. Shapes alone would not do: a row of positions can be
as long as the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from opacus_memprof.clipping.arrangement import CANDIDATES, Arrangement
from opacus_memprof.clipping.layer_hooks import LayerHooks, Layout, Observation
from opacus_memprof.clipping.layers import GenericLayer, Layer
from opacus_memprof.clipping.repetition import WAYS, Call, RandomState, Repetition, close
from opacus_memprof.clipping.units import Units
from opacus_memprof.errors import MemprofError

_SAMPLES = ((0, 1, 2), (0, 9, 2), (3, 4, 5, 6, 7), (8, 7, 6, 5))
_SIZE, _CHANGED = 3, 1  # of the first two forwards: their size, and the sample that differs
_OTHER_SIZES = (5, 4)


class CannotRunError(Exception):
    """The model cannot run on some samples of what it was called with."""


class _UnsuitableError(Exception):
    """A tensor in which the samples are nowhere in particular."""


class Probe:
    """A probe of a model.

    Args:
        model: the model.
        units: its layers; changed where a layer has to be repeated with what is around it.
        hooks: of the layers.
        args, kwargs: what the model was called with.
        run_model: runs the model's forward between the hooks of the model itself, and none else of it.
        attach: called after ``units`` has changed.
    """

    def __init__(
        self,
        model: nn.Module,
        units: Units,
        hooks: LayerHooks,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        run_model: Callable[[tuple[Any, ...], dict[str, Any]], Any],
        attach: Callable[[], None],
    ) -> None:
        self.model, self.units, self.hooks, self.run_model, self.attach = model, units, hooks, run_model, attach
        self.leaves, self.structure = tree_flatten((args, kwargs))
        self.batch = hooks.batch
        tensors = [leaf for leaf in self.leaves if isinstance(leaf, torch.Tensor)]
        self.random = RandomState.now(tensors[0].device)

    def layouts(self) -> dict[Layer, Layout]:
        """The layouts of all layers that run.

        Raises:
            MemprofError: samples mix, or a forward cannot be repeated.
            CannotRunError: the model cannot run on other samples.
        """
        try:
            plain = self._forward(_SAMPLES[0])[0]
        except Exception as error:
            raise CannotRunError from error
        layouts: dict[Layer, Layout] = {}
        for _ in range(2 * len(self.units.layers()) + 64):
            layouts, unsuitable = self._layouts(
                {layer: w for layer, w in layouts.items() if _is_shared(layer, w)}, plain
            )
            if not unsuitable:
                return layouts
            for layer in unsuitable:
                if layer.trainable():
                    self._repeat_more(layer)
            layouts = {layer: w for layer, w in layouts.items() if layer not in unsuitable}
            self.attach()
        raise MemprofError("flash_clip found no way to tell the samples of this model apart.")

    def _repeat_more(self, layer: Layer) -> None:
        if layer.module is self.model and isinstance(layer, GenericLayer):
            raise MemprofError(
                "the samples of the batch influence one another in the model's forward, or the first dimension of its "
                "inputs and outputs is not the batch: per-sample gradients do not exist. Use layers that treat "
                "samples separately, and return outputs whose first dimension is the batch."
            )
        self.units.repeat_parent(layer)

    def _layouts(self, shared: dict[Layer, Layout], plain: list[Any]) -> tuple[dict[Layer, Layout], list[Layer]]:
        """The layouts, and the layers that need what is around them. ``shared`` are layouts of layers whose outputs are
        expanded over the batch already."""
        self.hooks.layouts = dict(shared)
        try:
            with torch.enable_grad():
                forwards = [self._forward(_SAMPLES[0], observe=True)]
            forwards += [self._forward(samples, observe=True) for samples in _SAMPLES[1:]]
        except Exception:
            if not shared:
                raise
            return shared, self._breaking(shared, plain)
        outputs, observations = [each[0] for each in forwards], [each[1] for each in forwards]
        if not _same(outputs[0], plain):
            return shared, self._breaking(shared, plain)
        found, unsuitable = self._match(observations)
        if unsuitable:
            return found, unsuitable
        unsuitable = self._used_elsewhere(outputs[0])
        self._check_outputs(outputs)
        if not unsuitable:
            unsuitable = self._choose_ways(observations[0], found)
        new = [layer for layer, w in found.items() if _is_shared(layer, w) and layer not in shared]
        if new and not unsuitable:  # their outputs will be expanded: once more, with that
            return self._layouts({layer: w for layer, w in found.items() if _is_shared(layer, w)}, plain)
        return found, unsuitable

    def _match(self, forwards: list[list[Observation]]) -> tuple[dict[Layer, Layout], list[Layer]]:
        """The layouts by layer, and the layers whose tensors fit in none."""
        found: dict[Layer, Layout] = {}
        unsuitable: list[Layer] = []
        for layer in dict.fromkeys(each.layer for observations in forwards for each in observations):
            calls = [[each for each in observations if each.layer is layer] for observations in forwards]
            layer.is_shared |= max(map(len, calls)) > 1
            try:
                found[layer] = self._layout_of_calls(layer, calls)
            except _UnsuitableError:
                unsuitable.append(layer)
                continue
            if isinstance(layer, GenericLayer) or layer.any_arrangement:
                continue
            if any(len(each.leaves[0]) != _SIZE for each in calls[0]):
                found.pop(layer)
                self.units.repeat_module(layer)
                unsuitable.append(layer)  # which has no parameters any more
        return found, unsuitable

    def _layout_of_calls(self, layer: Layer, calls: list[list[Observation]]) -> Layout:
        if len({len(each) for each in calls}) > 1:
            raise _UnsuitableError
        first, *others = (self._layout(layer, each) for each in zip(*calls, strict=True))
        if any(layout != first for layout in others):
            raise _UnsuitableError
        return first

    def _layout(self, layer: Layer, calls: tuple[Observation, ...]) -> Layout:
        if len({len(each.leaves) for each in calls}) > 1 or len({len(each.outputs) for each in calls}) > 1:
            raise _UnsuitableError
        inputs = [self._where(leaves) for leaves in zip(*(each.leaves for each in calls), strict=True)]
        outputs = {
            i: self._where(leaves)
            for i, leaves in enumerate(zip(*(each.outputs for each in calls), strict=True))
            if isinstance(leaves[0], torch.Tensor) and leaves[0].is_floating_point()
        }
        if not isinstance(layer, GenericLayer) and inputs[0] != outputs[0]:
            raise _UnsuitableError
        return Layout(inputs, outputs)

    def _where(self, leaves: Sequence[Any]) -> Arrangement | None:
        """Where the samples are in a tensor, given what it was in each forward."""
        if not all(isinstance(leaf, torch.Tensor) for leaf in leaves):
            return None
        x, y, *others = (leaf.detach() for leaf in leaves)
        if all(x.shape == other.shape for other in others):
            if x.shape != y.shape or not close(y, x):
                raise _UnsuitableError
            return None
        for where in CANDIDATES:
            if _fits(where, x, y, others):
                return where
        raise _UnsuitableError

    def _check_outputs(self, outputs: list[list[Any]]) -> None:
        """Raises MemprofError if samples mix in an output that has them."""
        for leaves in zip(*outputs, strict=False):
            if isinstance(leaves[0], torch.Tensor) and leaves[0].shape != leaves[2].shape:
                try:
                    self._where(leaves)
                except _UnsuitableError:
                    raise MemprofError(
                        f"an output of the model of shape {tuple(leaves[0].shape)} mixes the {_SIZE} samples of a "
                        "batch: per-sample gradients do not exist."
                    ) from None

    def _used_elsewhere(self, outputs: list[Any]) -> list[Layer]:
        """The layers with parameters that the model's outputs depend on outside of the layers' forwards."""
        reached: set[int] = set()
        seen: set[Any] = set()
        nodes = [out.grad_fn for out in outputs if isinstance(out, torch.Tensor) and out.grad_fn is not None]
        while nodes:
            node = nodes.pop()
            if node in seen:
                continue
            seen.add(node)
            if hasattr(node, "variable"):
                reached.add(id(node.variable))
            nodes += [n for n, _ in node.next_functions if n is not None]
        return [layer for layer in self.units.layers() if any(id(p) in reached for p in layer.trainable())]

    def _choose_ways(self, observations: list[Observation], layouts: dict[Layer, Layout]) -> list[Layer]:
        """Chooses how each GenericLayer is repeated. Returns those that no way repeats."""
        failed: list[Layer] = []
        for layer, layout in layouts.items():
            if not isinstance(layer, GenericLayer):
                continue
            calls = [self._call(each, layout) for each in observations if each.layer is layer]
            parameters = {name: layer.module.get_parameter(name) for name in layer.names}
            for way in WAYS:
                repetition = Repetition(layer.module, parameters, way)
                with self.random.restored():  # and moved on: a loop from the same numbers may draw the same ones
                    torch.rand(5)
                    torch.rand(5, device=layer.device())
                    matches = all(repetition.matches(call, outputs) for call, outputs in calls)
                if matches:
                    layer.way = way
                    break
            else:
                if layer.module is self.model:
                    raise MemprofError(
                        f"the forward of {layer.describe()} gives other outputs when it is repeated with the same "
                        "inputs and random numbers, so that its per-sample gradients cannot be found. Freeze "
                        f"{', '.join(layer.names)}."
                    )
                failed.append(layer)
        return failed

    def _call(self, each: Observation, layout: Layout) -> tuple[Call, list[torch.Tensor]]:
        outputs = [each.outputs[i].detach() for i in layout.outputs]
        call = Call(
            _SIZE,
            [leaf.detach() if isinstance(leaf, torch.Tensor) else leaf for leaf in each.leaves],
            each.structure,
            layout.inputs,
            layout.outputs,
            each.random,
            each.autocast,
        )
        call.leave_caches_out()
        return call, outputs

    def _breaking(self, shared: dict[Layer, Layout], plain: list[Any]) -> list[Layer]:
        """Of the layers whose outputs are expanded over the batch, those without which the model runs as before."""
        found = []
        for layer, layout in shared.items():
            self.hooks.layouts = {layer: layout}
            try:
                broken = not _same(self._forward(_SAMPLES[0], observe=True)[0], plain)
            except Exception:
                broken = True
            if broken:
                found.append(layer)
        return found or list(shared)

    # --- forwards of a few samples ---
    def _forward(self, samples: Sequence[int], observe: bool = False) -> tuple[list[Any], list[Observation]]:
        """The leaves of the model's output, and what the layers saw."""
        args, kwargs = tree_unflatten([self._select(leaf, samples) for leaf in self.leaves], self.structure)
        grad = torch.is_grad_enabled() and observe and tuple(samples) == _SAMPLES[0]
        observing = self._observing(len(samples), observe)
        with observing as observed, self.random.restored(), self._restoring_buffers(), torch.set_grad_enabled(grad):
            output = self.run_model(args, kwargs) if observe else self.model.forward(*args, **kwargs)
        return tree_flatten(output)[0], observed

    def _select(self, leaf: Any, samples: Sequence[int]) -> Any:
        """Some samples of an input. Beyond the batch, these are its samples rolled along their last dimension."""
        if not isinstance(leaf, torch.Tensor) or leaf.dim() == 0 or len(leaf) != self.batch:
            return leaf
        rows = [leaf.detach()[n % self.batch] for n in samples]
        return torch.stack([x.roll(n // self.batch, -1) if x.dim() else x for x, n in zip(rows, samples, strict=True)])

    @contextmanager
    def _observing(self, size: int, observe: bool) -> Any:
        observations: list[Observation] = []
        self.hooks.batch, self.hooks.is_probing, self.hooks.shapes_only = size, True, size != _SIZE
        self.hooks.observations = observations if observe else None
        try:
            yield observations
        finally:
            self.hooks.batch, self.hooks.is_probing, self.hooks.observations = self.batch, False, None

    @contextmanager
    def _restoring_buffers(self) -> Any:
        buffers = [(buffer, buffer.clone()) for buffer in self.model.buffers()]
        try:
            yield
        finally:
            with torch.no_grad():
                for buffer, value in buffers:
                    if not torch.equal(buffer, value):
                        buffer.copy_(value)


def _fits(where: Arrangement, x: torch.Tensor, y: torch.Tensor, others: list[torch.Tensor]) -> bool:
    """Whether the samples are ``where`` in all tensors, and differ between ``x`` and ``y`` where these do."""
    rows = where.rows(x, _SIZE)
    if rows is None or x.shape != y.shape:
        return False
    a, b = where.by_sample(x, _SIZE), where.by_sample(y, _SIZE)
    for other, size in zip(others, _OTHER_SIZES, strict=True):
        if where.rows(other, size) != rows or where.by_sample(other, size).shape[1:] != a.shape[1:]:
            return False
    return all(close(b[n], a[n]) for n in range(_SIZE) if n != _CHANGED)


def _is_shared(layer: Layer, layout: Layout) -> bool:
    """Whether outputs of the layer are expanded over the batch."""
    return any(where is None for where in layout.outputs.values())


def _same(actual: list[Any], expected: list[Any]) -> bool:
    tensors = [(a, e) for a, e in zip(actual, expected, strict=False) if isinstance(e, torch.Tensor)]
    return all(isinstance(a, torch.Tensor) and close(a.detach(), e.detach()) for a, e in tensors)
