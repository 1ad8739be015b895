# SPDX-License-Identifier: Apache-2.0
"""Finds the position of a batch's samples in the tensors of layers, by running the model on a few samples.

Four forwards run: on three samples X; on Y, which equals X except for its second sample; and on four and two other
samples. A dimension that grows with the number of samples is the batch. A difference between X and Y in the rows of
other samples shows that samples mix. Tensors that do not grow are shared by all samples, such as positions. Layers
whose tensors fit no arrangement are repeated as a part of the enclosing module. Shapes alone would not be enough:
positions can be as long as the batch.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from opacus_memprof.clipping.forwards.repetition import WAYS, Call, Repetition, Surroundings, close
from opacus_memprof.clipping.forwards.state import CANDIDATES, Arrangement, restoring_state
from opacus_memprof.clipping.layer_hooks import LayerHooks, Layout
from opacus_memprof.clipping.layers import GenericLayer, Layer
from opacus_memprof.clipping.layers.registry import LayerRegistry, refuse_repetition
from opacus_memprof.clipping.proof.batches import HIGHEST, LOWEST, MIDDLE, FixedDraws
from opacus_memprof.clipping.proof.model_state import WriteGuard
from opacus_memprof.clipping.proof.sample_forwards import (
    SAMPLES,
    SIZE,
    Observation,
    SampleForward,
    SampleForwards,
    TensorSummary,
)
from opacus_memprof.errors import MemprofError

_CHANGED = 1  # the sample that differs between the first two forwards
_OTHER_SIZES = (4, 2)

CANNOT_REPEAT = (
    "the model gave another output when it was run again with the same inputs, random numbers and state, so that its "
    "clipping cannot be proved: let what it computes depend on its arguments and attributes, and on torch's, NumPy's "
    "or Python's random numbers, but on nothing that changes by itself, such as a global counter or a generator of "
    "its own."
)


class CannotRunError(Exception):
    """The model cannot run on a subset of the samples."""


class _UnsuitableError(Exception):
    """A tensor has no batch dimension."""


class Probe(SampleForwards):
    """A probe of a model.

    Args:
        model: the module that was called: the model, or a part of it.
        registry: the layers; changed where a layer must be repeated with its enclosing module.
        hooks: the hooks of the layers.
        args, kwargs: the arguments of the model.
        run_model: runs the model's forward without the model's own hooks.
        attach: called after `registry` has changed.

    Attributes:
        refuses_writes: whether a forward that writes to parameters is refused. FSDP2's own forward does.
        arrangements: the position of samples in the output's tensors; None for tensors that all samples share.
        computed_in: the coarsest dtype in which the model computes with its inputs; None if that is not known.
    """

    def __init__(
        self,
        model: nn.Module,
        registry: LayerRegistry,
        hooks: LayerHooks,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        run_model: Callable[[tuple[Any, ...], dict[str, Any]], Any],
        attach: Callable[[], None],
    ) -> None:
        super().__init__(model, hooks, args, kwargs, run_model)
        self.registry, self.attach = registry, attach
        self.arrangements: list[Arrangement | None] = []
        self.refuses_writes = False
        self.computed_in: torch.dtype | None = None
        self._inside = set(model.modules())

    def layouts(self) -> dict[Layer, Layout]:
        """Returns the layouts of all layers that run.

        Raises:
            MemprofError: samples mix, or a forward cannot be repeated.
            CannotRunError: the model cannot run on other samples.
        """
        plain = self._first_outputs()
        layouts: dict[Layer, Layout] = {}
        for _ in range(2 * len(self.registry.layers()) + 64):
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
        raise MemprofError("flash_clip found no batch dimension in the tensors of this model.")

    def _first_outputs(self) -> list[Any]:
        """Returns the outputs of the first samples after the model has run on all samples of the probe."""
        # A model may need its samples in order, such as sorted by length.
        in_order = ((0, 1, 2), (0, self.batch + 1, 2), (0, 1, 2, 3), (0, 1))
        guard = WriteGuard(self.model) if self.refuses_writes else nullcontext()
        for self.samples in (SAMPLES, in_order):
            try:
                with guard:
                    first = self.forward(self.samples[0]).outputs
                for samples in self.samples[1:]:
                    self.forward(samples)
                return first
            except MemprofError:
                raise
            except Exception as error:
                if self.samples is in_order:
                    raise CannotRunError from error
        raise AssertionError

    def repeat_more(self, layer: Layer, moves: bool, reason: str) -> None:
        """Repeats a larger module for the layer's parameters.

        Args:
            layer: the layer.
            moves: whether its rows may belong to other samples than their positions say, so that repeating the layer's
                own module is not enough.
            reason: the observation, as the end of a sentence that begins with the layer.

        Raises:
            MemprofError: the called module would have to be repeated, but is repeated already.
        """
        if not moves and not isinstance(layer, GenericLayer):
            self.registry.repeat_module(layer)
        else:
            self._repeat_more(layer, reason)
        self.attach()

    def repeat_at(self, module: nn.Module, inside: set[nn.Module]) -> bool:
        """Repeats a module for the parameters of some modules in it. Returns whether this changes anything."""
        found = [layer for layer in self.registry.layers() if layer.module in inside and layer.trainable()]
        for layer in found:
            if layer.trainable():
                self.registry.repeat_at(layer, module)
        if found:
            self.attach()
        return bool(found)

    def _repeat_more(self, layer: Layer, reason: str = "") -> None:
        if self.registry.is_sharded:
            refuse_repetition(layer, reason or "Its samples influence one another, or are not in one dimension.")
        if layer.module not in self._inside:
            raise MemprofError(
                f"parameters of {layer.describe()} are used in a part of the model that was called separately; call "
                "the model as a whole."
            )
        if layer.module is not self.model:
            parent = self.registry.parent_of(layer)
            self.registry.repeat_at(layer, parent if parent in self._inside else self.model)
        elif not isinstance(layer, GenericLayer):
            self.registry.repeat_module(layer)
        else:
            raise MemprofError(
                "the samples of the batch influence one another in the model's forward, or the first dimension of its "
                "inputs and outputs is not the batch: per-sample gradients do not exist. Use layers that treat "
                "samples separately, and return outputs whose first dimension is the batch."
                + (f" {reason}" if reason else "")
            )

    def _layouts(self, shared: dict[Layer, Layout], plain: list[Any]) -> tuple[dict[Layer, Layout], list[Layer]]:
        """Returns the layouts, and the layers that must be repeated with their enclosing modules.

        `shared` has the layouts of layers whose outputs are already expanded over the batch.

        Raises:
            MemprofError: the model gives another output each time.
            CannotRunError: the model cannot run while its layers are followed.
        """
        self.hooks.layouts = dict(shared)
        try:
            forwards = [self.forward(samples, observe=True) for samples in self.samples]
        except Exception as error:
            if not shared and isinstance(error, MemprofError):
                raise
            if not shared:  # such as a hook on a tensor that has no gradient while the layers are frozen
                raise CannotRunError from error
            return shared, self._breaking(shared, plain)
        if not _same(forwards[0].outputs, plain):
            if not shared:
                raise MemprofError(CANNOT_REPEAT)
            return shared, self._breaking(shared, plain)
        found, unsuitable = self._match([each.observations for each in forwards])
        if unsuitable and forwards[0].draws and _calls_differ(forwards):
            found, unsuitable = self._match_with_fixed_draws(forwards)
        if unsuitable:
            if any(layer.module is self.model and isinstance(layer, GenericLayer) for layer in unsuitable):
                self._find_outputs(_comparing([each.outputs for each in forwards]))  # nothing larger can be repeated
            return found, unsuitable
        used = forwards[0].used_parameters
        layers = self.registry.layers()
        unsuitable = [layer for layer in layers if any(id(p) in used for p in layer.seen_parameters())]
        self.arrangements = self._find_outputs([each.outputs for each in forwards])
        if not unsuitable:
            unsuitable = self._choose_ways(forwards[0].observations, found)
        new = [layer for layer, w in found.items() if _is_shared(layer, w) and layer not in shared]
        if new and not unsuitable:  # their outputs will be expanded: try again with that
            return self._layouts({layer: w for layer, w in found.items() if _is_shared(layer, w)}, plain)
        return found, unsuitable

    def _match_with_fixed_draws(self, forwards: list[SampleForward]) -> tuple[dict[Layer, Layout], list[Layer]]:
        """Does what `_match` does, with the same random numbers whatever the number of samples.

        Otherwise a layer that is left out at random would be called in some of the forwards only: dropout before it
        draws as many numbers as there are samples. With low or with high numbers, nearly all layers are called.
        """
        found: dict[Layer, Layout] = {}
        unsuitable: list[Layer] = []
        for share in (HIGHEST, LOWEST, MIDDLE):
            with FixedDraws(share):
                fixed = [self.forward(samples, observe=True) for samples in self.samples]
            more, wrong = self._match([each.observations for each in fixed])
            for layer, layout in more.items():  # a model may return the outputs of the layers that it has called
                if layer not in found or len(layout.outputs) > len(found[layer].outputs):
                    found[layer] = layout
            unsuitable += wrong
        return {layer: w for layer, w in found.items() if layer not in unsuitable}, unsuitable

    def _match(self, forwards: list[list[Observation]]) -> tuple[dict[Layer, Layout], list[Layer]]:
        """Returns the layouts by layer, and the layers whose tensors fit no layout."""
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
            if isinstance(layer, GenericLayer):
                continue
            if any(len(each.inputs) > 1 for of_forward in calls for each in of_forward):
                found.pop(layer)
                self.registry.repeat_module(layer)  # a gate or an option is another input of the layer
                unsuitable.append(layer)
                continue
            if layer.any_arrangement:
                continue
            if any(len(each.inputs[0].meta) != SIZE for each in calls[0]):
                found.pop(layer)
                self.registry.repeat_module(layer)
                unsuitable.append(layer)  # it has no parameters any more
        return found, unsuitable

    def _layout_of_calls(self, layer: Layer, calls: list[list[Observation]]) -> Layout:
        if len({len(each) for each in calls}) > 1:
            raise _UnsuitableError
        first, *others = (self._layout(layer, each) for each in zip(*calls, strict=True))
        if any(layout != first for layout in others):
            raise _UnsuitableError
        return first

    def _layout(self, layer: Layer, calls: tuple[Observation, ...]) -> Layout:
        if len({len(each.inputs) for each in calls}) > 1 or len({len(each.outputs) for each in calls}) > 1:
            raise _UnsuitableError
        inputs = [self._where(leaves) for leaves in zip(*(each.inputs for each in calls), strict=True)]
        outputs = {
            i: self._where(leaves)
            for i, leaves in enumerate(zip(*(each.outputs for each in calls), strict=True))
            if isinstance(leaves[0], TensorSummary) and not _is_integral(leaves[0].meta)
        }
        if not isinstance(layer, GenericLayer) and inputs[0] != outputs[0]:
            raise _UnsuitableError
        return Layout(inputs, outputs)

    def _where(self, leaves: Sequence[Any]) -> Arrangement | None:
        """Returns the position of samples in a tensor, from its summaries in each forward."""
        if not all(isinstance(leaf, TensorSummary) for leaf in leaves):
            return None
        x, y, *others = leaves
        if all(x.meta.shape == other.meta.shape for other in others):
            if x.meta.shape != y.meta.shape or not close(*y.beside(x)):
                raise _UnsuitableError
            return None
        for where in CANDIDATES:
            if _fits(where, x, y, others):
                return where
        raise _UnsuitableError

    def _find_outputs(self, outputs: list[list[Any]]) -> list[Arrangement | None]:
        """Returns the position of samples in the output's tensors.

        Raises:
            MemprofError: an output mixes samples.
        """
        found: list[Arrangement | None] = []
        for leaves in zip(*outputs, strict=False):
            if leaves[0].meta.shape == leaves[2].meta.shape:
                found.append(None)
                continue
            try:
                found.append(self._where(leaves))
            except _UnsuitableError:
                raise MemprofError(
                    f"an output of the model of shape {tuple(leaves[0].meta.shape)} mixes the {SIZE} samples of a "
                    "batch: per-sample gradients do not exist. Return what it is computed from, with the batch first."
                ) from None
        return found

    def _choose_ways(self, observations: list[Observation], layouts: dict[Layer, Layout]) -> list[Layer]:
        """Chooses how each GenericLayer is repeated, and returns the layers that cannot be repeated in any way."""
        failed: list[Layer] = []
        for layer, layout in layouts.items():
            if not isinstance(layer, GenericLayer):
                continue
            calls = [self._call(each, layout) for each in observations if each.layer is layer]
            layer.changes_state = any(call.state is not None for call, _ in calls)
            parameters = {name: layer.module.get_parameter(name) for name in layer.names}
            draws = any(call.draws for call, _ in calls) or not calls
            for way in ("whole",) if draws else WAYS:
                repetition = Repetition(layer.module, parameters, way)
                # Random numbers move on: a loop from the same ones may draw the same ones.
                with self.random.restored(), restoring_state(self.model):
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
        assert each.values is not None
        leaves, outputs = each.values
        call = Call(
            SIZE,
            leaves,
            each.structure,
            layout.inputs,
            {i: where for i, where in layout.outputs.items() if i < len(outputs)},
            each.random,
            Surroundings.now(each.layer.device().type),
        )
        call.leave_caches_out()
        call.draws, call.state = each.draws, each.state
        return call, [outputs[i] for i in call.outputs]

    def _breaking(self, shared: dict[Layer, Layout], plain: list[Any]) -> list[Layer]:
        """Returns the layers whose expanded outputs change the result of the model."""
        found = []
        for layer, layout in shared.items():
            self.hooks.layouts = {layer: layout}
            try:
                broken = not _same(self.forward(self.samples[0], observe=True).outputs, plain)
            except Exception:
                broken = True
            if broken:
                found.append(layer)
        return found or list(shared)


def _fits(where: Arrangement, x: TensorSummary, y: TensorSummary, others: list[TensorSummary]) -> bool:
    """Returns whether the samples are at `where` in all tensors, and `x` and `y` differ only in the changed sample."""
    rows = where.rows(x.meta, SIZE)
    if rows is None or x.meta.shape != y.meta.shape:
        return False
    shape = where.by_sample(x.meta, SIZE).shape[1:]
    for other, size in zip(others, _OTHER_SIZES, strict=True):
        if where.rows(other.meta, size) != rows or where.by_sample(other.meta, size).shape[1:] != shape:
            return False
    a, b = (where.by_sample(sums, SIZE) for sums in x.beside(y))
    return all(close(b[n], a[n]) for n in range(SIZE) if n != _CHANGED)


def _comparing(outputs: list[list[Any]]) -> list[list[Any]]:
    """Returns those outputs of each forward that have one number for each pair of samples, [B, B]."""
    sizes = (SIZE, SIZE, *_OTHER_SIZES)
    found = [
        leaves
        for leaves in zip(*outputs, strict=False)
        if all(tuple(x.meta.shape) == (n, n) for x, n in zip(leaves, sizes, strict=True))
    ]
    return [list(leaves) for leaves in zip(*found, strict=True)]


def _calls_differ(forwards: list[SampleForward]) -> bool:
    """Returns whether forwards have called layers another number of times."""
    first, *others = (Counter(each.layer for each in forward.observations) for forward in forwards)
    return any(counts != first for counts in others)


def _is_integral(x: torch.Tensor) -> bool:
    return not (x.is_floating_point() or x.is_complex())


def _is_shared(layer: Layer, layout: Layout) -> bool:
    """Returns whether outputs of the layer are expanded over the batch."""
    return any(where is None for where in layout.outputs.values())


def _same(actual: list[Any], expected: list[Any]) -> bool:
    tensors = [(a, e) for a, e in zip(actual, expected, strict=False) if isinstance(e, TensorSummary)]
    return all(
        isinstance(a, TensorSummary) and a.meta.shape == e.meta.shape and close(*a.beside(e)) for a, e in tensors
    )
