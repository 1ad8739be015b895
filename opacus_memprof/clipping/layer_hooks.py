# SPDX-License-Identifier: Apache-2.0
"""Hooks before and after the forward of each layer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from opacus_memprof.clipping.bookkeeping import Bookkeeping
from opacus_memprof.clipping.bookkeeping.autograd_functions import CallTap, GradientTap, receive_gradient
from opacus_memprof.clipping.forwards.checkpoints import end_freezing_in_checkpoints, freeze_in_checkpoints
from opacus_memprof.clipping.forwards.repetition import Call, Surroundings, is_repeating
from opacus_memprof.clipping.forwards.state import PLAIN, Arrangement, ModuleState, RandomState, expand_over_batch
from opacus_memprof.clipping.kernels.native import hash_of_shapes, tap_gradient
from opacus_memprof.clipping.layers import GenericLayer, Layer
from opacus_memprof.errors import MemprofError


@dataclass
class Layout:
    """The batch dimension of a layer's inputs and outputs; None for tensors that all samples share.

    Attributes:
        inputs: one for each leaf of the arguments; a single one if the layer is not a GenericLayer.
        outputs: by the index of the leaf.
    """

    inputs: list[Arrangement | None]
    outputs: dict[int, Arrangement | None]


@dataclass(slots=True)
class Running:
    """A layer whose forward is running.

    Attributes:
        frozen: the parameters that are frozen during the forward.
        random: the initial state of the random number generators, for a GenericLayer that may need it.
        state: the initial state of the module, for a GenericLayer that changes it.
        kept_bytes: of a PlainLayer on CUDA, what its backward keeps for inputs and outputs with the hash `shapes`.
    """

    frozen: list[nn.Parameter]
    random: RandomState | None = None
    state: ModuleState | None = None
    shapes: int = 0
    kept_bytes: int = 0


@dataclass
class LayerHooks:
    """Taps the outputs of layers.

    Attributes:
        bookkeeping: receives inputs and output gradients from backward.
        batch: the number of samples of the model's last forward.
        for_compiled_autograd: whether the backward of that forward may be compiled.
        layouts: the batch dimensions of layers that have been probed.
        plain: the PlainLayers, by module.
        observe: called for each call of a layer while a probe observes: with the layer, the leaves of its arguments,
            their structure, the leaves of its output and its initial state. None if no probe observes.
        is_probing: whether a probe runs.
        is_off: whether layers are ignored, in any thread: backward may run in another one.
        forward: the number of the forward that runs, or of the last one; its backward reports it.
        trace: the layers in the order in which that forward has called them; None for layers that no proof covers.
        called: the layers that any forward, one of a proof included, has called.
        kept_bytes: CUDA memory that backward will keep for the deferred weights of the layers that have run since this
            was set to 0.
        running: the layers whose forward is running.
        receive: what backward calls at the output of a layer.
        is_repeating: whether this thread repeats a forward.
    """

    receive: ClassVar[Callable[..., None]] = staticmethod(receive_gradient)
    is_repeating: ClassVar[Callable[[], bool]] = staticmethod(is_repeating)

    bookkeeping: Bookkeeping
    batch: int = 0
    for_compiled_autograd: bool = False
    layouts: dict[Layer, Layout] = field(default_factory=dict)
    plain: dict[nn.Module, PlainLayer] = field(default_factory=dict)
    observe: Callable[[Layer, list[Any], Any, list[Any], Running], None] | None = None
    is_probing: bool = False
    is_off: bool = False
    forward: int = 0
    trace: list[Layer | None] = field(default_factory=list)
    called: set[Layer | None] = field(default_factory=set)
    kept_bytes: int = 0
    running: dict[Layer, Running] = field(default_factory=dict)
    _anchors: dict[torch.device, torch.Tensor] = field(default_factory=dict)

    @contextmanager
    def off(self) -> Iterator[None]:
        """Ignores layers inside the context."""
        before, self.is_off = self.is_off, True
        try:
            yield
        finally:
            self.is_off = before

    def before(
        self, layer: Layer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Freezes the layer's parameters. Returns new (args, kwargs) if autocast casts the input."""
        if self.is_probing:
            _refuse_functional_calls(layer)
        running = self.running[layer] = Running(_freeze(layer))
        if isinstance(layer, GenericLayer):
            if layer.way == "whole" or self.observe is not None:
                running.random = RandomState.now(layer.device())
            if layer.changes_state or self.observe is not None:
                running.state = ModuleState(layer.module)
            freeze_in_checkpoints(running.frozen)
            return None
        key, x = first_input(layer, args, kwargs)
        layout = self.layouts.get(layer)
        if self.observe is None and (layout is None or layout.inputs[0] is not None):
            layer.check_input(x)
        cast = layer.cast(x)
        if cast is x:
            return None
        return ((cast, *args[1:]), kwargs) if key is None else (args, {**kwargs, key: cast})

    def after(self, layer: Layer, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        """Makes the parameters trainable again, and taps the output.

        Also called if the forward raises; `output` is then None. Returns None if the output stays as it is.

        Raises:
            MemprofError: an input does not have the samples of the batch.
        """
        running = self.running.pop(layer, None)
        if running is None:
            return None
        if isinstance(layer, GenericLayer):
            end_freezing_in_checkpoints()
        for parameter in running.frozen:
            parameter.requires_grad = True
        if output is None:
            return None
        self.trace.append(layer)
        if isinstance(layer, GenericLayer):
            return self._after_generic(layer, args, kwargs, output, running)
        _, x = first_input(layer, args, kwargs)
        if not isinstance(output, torch.Tensor):
            return None
        layout = self.layouts.get(layer)
        if self.observe is not None:
            others = [other for other in (*args, *kwargs.values()) if other is not x and other is not None]
            self.observe(layer, [x, *others], None, [output], running)
            is_shared = layout is not None and layout.inputs[0] is None
            return self._with_graph(expand_over_batch(output, self.batch) if is_shared else output)
        if len(args) + len(kwargs) > 1 and any(o is not None and o is not x for o in (*args, *kwargs.values())):
            self.trace.append(None)  # this layer has been frozen until now; a proof will include it
        where = layout.inputs[0] if layout else PLAIN
        if where is None:
            output, x = expand_over_batch(output, self.batch), expand_over_batch(x, self.batch)
        if not torch.is_grad_enabled():
            return output
        if where is None or (where.dim == 0 and output.shape[0] == self.batch):
            where = None
        elif where.rows(output, self.batch) is None:
            raise MemprofError(
                f"{layer.describe()} saw an input of shape {tuple(x.shape)}, which does not have the {self.batch} "
                "samples of the batch where earlier batches had them: leave check='sometimes' on, and run the model in "
                "one thread at a time."
            )
        if output.is_cuda:
            running.shapes, running.kept_bytes = hash_of_shapes(x, output), layer.kept_bytes(x, output)
            self.kept_bytes += running.kept_bytes
        return self.tap(layer, x, output, where)

    def tap(self, layer: Layer, x: torch.Tensor, output: torch.Tensor, where: Arrangement | None) -> torch.Tensor:
        """Returns the layer's output with an autograd node that passes its gradient on.

        `where` is None if input and output have one row for each sample, in the first dimension.
        """
        anchor = None if output.requires_grad else self.anchor(output.device)
        saved_input = x if layer.is_trainable("weight") else None
        call = (layer, self.bookkeeping, where, self.batch, self.forward)
        if self.for_compiled_autograd:
            constant = None if saved_input is None else saved_input.detach()  # it gets no gradient
            tapped: torch.Tensor = GradientTap.apply(output, anchor, constant, call)
            return tapped
        return tap_gradient(output, anchor, saved_input, self.receive, call)

    def _after_generic(
        self, layer: GenericLayer, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any, running: Running
    ) -> Any:
        leaves, structure = tree_flatten((args, kwargs))
        found, output_structure = tree_flatten(output)
        if self.observe is not None:
            self.observe(layer, leaves, structure, found, running)
            found = [self._with_graph(each) if _is_float(each) else each for each in found]
        layout = self.layouts.get(layer)
        if layout is None and self.observe is not None:
            return tree_unflatten(found, output_structure)
        if layout is None or len(layout.inputs) != len(leaves):
            layout = self._guess(layer, leaves, found)
        floats = [i for i in layout.outputs if i < len(found) and _is_float(found[i])]
        for i in floats:
            if layout.outputs[i] is None:
                found[i] = expand_over_batch(found[i], self.batch)
        if self.observe is None and torch.is_grad_enabled() and floats:
            call = Call(
                self.batch,
                leaves,
                structure,
                layout.inputs,
                {i: layout.outputs[i] for i in floats},
                running.random,
                Surroundings.now(layer.device().type),
                running.state,
            )
            call.leave_caches_out()
            outputs = [found[i] for i in floats]
            has_graph = any(each.requires_grad for each in outputs)
            anchor = None if has_graph else self.anchor(outputs[0].device)
            tapped = CallTap.apply(
                layer, self.bookkeeping, call, self.forward, len(outputs), anchor, *outputs, *call.detached_tensors()
            )
            for i, leaf in zip(floats, tapped, strict=True):
                found[i] = leaf
        return tree_unflatten(found, output_structure)

    def _guess(self, layer: Layer, leaves: list[Any], outputs: list[Any]) -> Layout:
        """Returns a layout from the shapes alone, for calls that no probe has seen.

        These are empty batches, and other paths through the model.

        Raises:
            MemprofError: an output has no batch dimension.
        """

        def where(x: Any) -> Arrangement | None:
            is_batch = isinstance(x, torch.Tensor) and x.dim() > 0 and PLAIN.rows(x, self.batch) is not None
            return PLAIN if is_batch else None

        found = {i: where(x) for i, x in enumerate(outputs) if _is_float(x)}
        if None in found.values():
            raise MemprofError(
                f"{layer.describe()} was called in another way than before, and an output has no batch of {self.batch} "
                "as its first dimension: call the model in the same way in every step."
            )
        return Layout([where(x) for x in leaves], found)

    def _with_graph(self, output: torch.Tensor) -> torch.Tensor:
        """Returns an output that requires grad, as one with a tap does: a program may add a hook to it."""
        return output if output.requires_grad or not torch.is_grad_enabled() else output + self.anchor(output.device)

    def anchor(self, device: torch.device) -> torch.Tensor:
        """Returns a scalar that makes an output require grad when neither the input nor the frozen parameters do."""
        if device not in self._anchors:
            self._anchors[device] = torch.zeros((), device=device, requires_grad=True)
        return self._anchors[device]

    def renew_anchors(self) -> None:
        """Makes new anchors for a capture in a CUDA graph.

        Autograd's node of an anchor lives as long as any graph with it, and belongs to the stream on which the first
        one was made. A backward that is captured must not wait for another stream.
        """
        self._anchors = {
            device: torch.zeros_like(anchor, requires_grad=True) for device, anchor in self._anchors.items()
        }


@dataclass(slots=True)
class PlainLayer:
    """A layer whose first input and output have one row for each sample, as in most layers.

    Where it gets one input, ModuleHook does in C++ what `LayerHooks.before` and `LayerHooks.after` do: in Python, that
    would take the host longer than the kernels of a small layer.

    Attributes:
        layer: the layer.
        least_dimensions: the least number of dimensions of its input.
        running: its entry in `LayerHooks.running` while ModuleHook runs it.
    """

    layer: Layer
    least_dimensions: int
    running: Running


def plain_layers(
    at: Mapping[nn.Module, Sequence[Layer]], layouts: Mapping[Layer, Layout]
) -> dict[nn.Module, PlainLayer]:
    """Returns the PlainLayers of a model by module. `layouts` has the batch dimensions of other layers."""

    def is_plain(layer: Layer) -> bool:
        if isinstance(layer, GenericLayer):  # which may have no input
            return False
        where = layouts[layer].inputs[0] if layer in layouts else PLAIN
        return where is not None and where.dim == 0

    plain = {m: layers[0] for m, layers in at.items() if len(layers) == 1 and is_plain(layers[0])}
    return {m: PlainLayer(layer, layer.min_dimensions(), Running([])) for m, layer in plain.items()}


def first_input(layer: Layer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[str | None, Any]:
    """Returns the keyword of the layer's input, or None if it is positional, and the input."""
    if args:
        return None, args[0]
    for key, value in kwargs.items():
        if isinstance(value, torch.Tensor):
            return key, value
    return None, layer.check_input(None)


def _refuse_functional_calls(layer: Layer) -> None:
    """Raises MemprofError if the layer runs in a transform of torch.func, or with parameters that are not its own."""
    if torch._C._functorch.peek_interpreter_stack() is not None:
        raise MemprofError(
            f"{layer.describe()} is called in a transform of torch.func (vmap, grad, jvp, ...), inside of which "
            "flash_clip does not see the gradients of its output: call the layer outside of it, or freeze the layer."
        )
    if any(parameter is not None and not parameter.is_leaf for parameter in layer.module._parameters.values()):
        raise MemprofError(
            f"{layer.describe()} is called with other tensors instead of its parameters (torch.func.functional_call), "
            "whose gradients flash_clip does not form: call torch.nn.functional with these tensors in the forward of "
            "the module that has the parameters, or freeze it."
        )


def _freeze(layer: Layer) -> list[nn.Parameter]:
    """Sets requires_grad=False on the layer's parameters while it runs, and returns them."""
    frozen = layer.running_parameters()
    for parameter in frozen:
        parameter.requires_grad = False
    return frozen


def _is_float(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and (x.is_floating_point() or x.is_complex())
