# SPDX-License-Identifier: Apache-2.0
"""Records the layer shapes of attached models, and the shapes of activations in the forward pass of each batch that is
larger than all before it. They are stored in `recording.layer_shapes`."""

import math
import weakref
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from opacus.grad_sample import (
    AbstractGradSampleHooks,
    GradSampleHooks,
    GradSampleHooksFastGradientClipping,
    GradSampleHooksNoOp,
    GradSampleModuleExpandedWeights,
)
from opacus.optimizers import DPOptimizer
from torch import nn
from torch.compiler import is_compiling
from torch.nn.modules.conv import _ConvNd
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from opacus_memprof.errors import MemprofError
from opacus_memprof.hooks.capture_shape import capture_shape
from opacus_memprof.hooks.fake_forward import FakeForward
from opacus_memprof.profiles.layer_shapes import CaptureShape, LayerShape
from opacus_memprof.recording import layer_shapes, native
from opacus_memprof.recording.attachment import Attachment
from opacus_memprof.recording.faults import Observation, contain

# By optimizer: how many tensors of a parameter's shape it keeps as state of each parameter, and how many temporary ones
# its foreach step makes for all parameters at once (such as denominators).
_STATES = {
    "Adadelta": (2, 2),
    "Adagrad": (1, 1),
    "Adam": (2, 1),
    "AdamW": (2, 1),
    "Adamax": (2, 1),
    "NAdam": (2, 1),
    "RAdam": (2, 2),
    "RMSprop": (1, 1),
    "Rprop": (2, 2),
    "SGD": (0, 0),
}
_STATE_OPTIONS = ("amsgrad", "momentum", "centered")  # each adds one state tensor


@dataclass
class WatchedModel:
    """The model whose shapes are recorded.

    Attributes:
        root: its outermost module.
        modules: those whose forward passes are probed, with their names.
        forward: repeats its largest forward pass on fake tensors.
        largest_batch: elements of the largest batch whose shapes were recorded.
        probe_handles: of the probes of the running forward pass.
    """

    root: "weakref.ref[nn.Module]"
    modules: "list[tuple[str, weakref.ref[nn.Module]]]"
    forward: FakeForward
    largest_batch: int = 0
    probe_handles: list[RemovableHandle] = field(default_factory=list)

    def remove_probes(self) -> None:
        while self.probe_handles:
            self.probe_handles.pop().remove()


_watched: WatchedModel | None = None


def record_model(model: nn.Module | AbstractGradSampleHooks, named: Sequence[tuple[str, nn.Module]]) -> bool:
    """Records the shapes of a model's parameters.

    They replace those of the model before, but a plain model does not replace one of Opacus'.

    Args:
        model: the model.
        named: the user's modules with their names, the model itself first.

    Returns:
        Whether the shapes were recorded.
    """
    shapes, mode = layer_shapes.current(), _grad_sample_mode(model)
    if shapes.mode and not mode:
        return False
    shapes.mode, shapes.mean_loss = mode, getattr(model, "loss_reduction", "mean") == "mean"
    shapes.forwards.clear()
    shapes.modules = {}
    owners = _owners(named)
    for name, module in named:
        own = {key: each for key, each in module.named_parameters(recurse=False) if each.requires_grad}
        trained = {key: parameter for key, parameter in own.items() if owners[parameter] == name}
        tied_to = owners[own["weight"]] if "weight" in own else name
        if tied_to == name:
            if trained:
                shapes.modules[name] = layer_shape_of(module, trained)
        elif not tied_to.startswith(f"{name}."):
            shape = layer_shape_of(module, {**trained, "weight": own["weight"]})
            size = sum(parameter.nbytes for parameter in trained.values())
            weight = shape.weight - own["weight"].numel()
            shapes.modules[name] = replace(shape, bytes=size, weight=weight, tied_to=tied_to)
    shapes.flash_clip_refusal = partial(_flash_clip_refusal, weakref.ref(named[0][1]))
    return True


def _owners(named: Sequence[tuple[str, nn.Module]]) -> dict[nn.Parameter, str]:
    """The name of the module that each parameter counts for: the first that has it, or a module inside of that, as with
    Opacus' recurrent layers, whose Linear layers compute with parameters that the outer module has too."""
    owners: dict[nn.Parameter, str] = {}
    for name, module in named:
        for parameter in module.parameters(recurse=False):
            owner = owners.get(parameter)
            if owner is None or name.startswith(f"{owner}." if owner else ""):
                owners[parameter] = name
    return owners


def layer_shape_of(module: nn.Module, trained: dict[str, nn.Parameter]) -> LayerShape:
    """The shape of a module whose trained parameters are `trained`."""
    weight = trained.get("weight")
    shape = weight.shape if weight is not None and weight.dim() > 1 else None
    bias = trained["bias"].numel() if "bias" in trained else 0
    return LayerShape(
        kind=type(module).__name__,
        bytes=sum(parameter.nbytes for parameter in trained.values()),
        weight=sum(parameter.numel() for parameter in trained.values()) - bias,
        bias=bias,
        rows=shape[0] if shape else 0,
        columns=shape[1:].numel() if shape else 0,
        norm_sampler=type(module) in GradSampleHooksFastGradientClipping.NORM_SAMPLERS,
        groups=module.groups if isinstance(module, _ConvNd) else 1,
        kernel_positions=math.prod(module.kernel_size) if isinstance(module, _ConvNd) else 1,
    )


def _grad_sample_mode(model: Any) -> str:
    if isinstance(model, GradSampleHooksFastGradientClipping):
        return "ghost" if model.use_ghost_clipping else "fast"
    if isinstance(model, GradSampleHooksNoOp):
        return "no_op"
    if isinstance(model, GradSampleModuleExpandedWeights):
        return "ew"
    if isinstance(model, GradSampleHooks):
        return "functorch" if getattr(model, "force_functorch", False) else "hooks"
    if isinstance(model, AbstractGradSampleHooks):
        return "flash_clip" if hasattr(model, "bookkeeping") else "other"
    return ""


def _flash_clip_refusal(model: "weakref.ref[nn.Module]") -> str | None:
    from opacus_memprof.clipping.layers.registry import check_model

    alive = model()
    if alive is None:
        return "the model is gone"
    try:
        check_model(alive)
    except MemprofError as error:
        return str(error)
    return None


def record_optimizer(optimizer: Optimizer) -> None:
    """Records how many state tensors and temporaries the optimizer has."""
    original = optimizer.original_optimizer if isinstance(optimizer, DPOptimizer) else optimizer
    shapes, class_name, defaults = layer_shapes.current(), type(original).__name__, original.defaults
    states, temporaries = _STATES.get(class_name, (0, 0))
    shapes.optimizer = class_name
    shapes.state_tensors = states + sum(bool(defaults.get(option)) for option in _STATE_OPTIONS)
    foreach = not defaults.get("fused") and defaults.get("foreach") is not False
    shapes.step_temporaries = temporaries if foreach else 0


def observe_zero_grad(optimizer: Optimizer) -> Observation:
    """Records whether zero_grad keeps gradients that exist."""
    shapes = layer_shapes.current()
    parameter = None
    if shapes.keeps_gradients is None:
        of_optimizer = (parameter for group in optimizer.param_groups for parameter in group["params"])
        parameter = next((each for each in of_optimizer if each.grad is not None), None)
    yield
    if parameter is not None:
        shapes.keeps_gradients = parameter.grad is not None


def watch_model(
    attachment: Attachment, root: nn.Module, named: Sequence[tuple[str, nn.Module]], probed: Collection[nn.Module]
) -> None:
    """Probes the forward passes of the model whose shapes were recorded last, until it is detached.

    Args:
        attachment: of the model.
        root: the outermost module.
        named: the user's modules with their names, the model itself first.
        probed: the modules whose forward can be probed.
    """
    global _watched
    if _watched is not None:
        _watched.remove_probes()
    shapes = layer_shapes.current()
    modules = [(name, weakref.ref(module)) for name, module in named if name in shapes.modules and module in probed]
    _watched = WatchedModel(weakref.ref(root), modules, FakeForward(named))
    attachment.on_detach(partial(_unwatch, _watched))
    shapes.whole_forward = partial(_watched.forward.run, shapes.modules, captures=bool(shapes.mode))


def _unwatch(model: WatchedModel) -> None:
    global _watched
    model.remove_probes()
    if _watched is model:
        _watched = None


def unwatch_modules(removed: set[nn.Module]) -> None:
    """Stops probing these modules, which are about to be compiled."""
    if _watched is not None:
        _watched.modules[:] = [(name, reference) for name, reference in _watched.modules if reference() not in removed]


def on_batch(root: nn.Module, samples: int, elements: int, inputs: tuple[Any, Any], captures_outstanding: bool) -> None:
    """Records the batch of a forward pass that begins, and probes the modules if it is the largest batch so far. Other
    models than the one that is watched are left out.

    Args:
        root: the model's outermost module.
        samples: the first dimension of the model's first input.
        elements: of all inputs.
        inputs: positional and keyword arguments.
        captures_outstanding: no backward has released Opacus' captures of an earlier forward pass.
    """
    model, shapes = _watched, layer_shapes.current()
    if model is None or model.root() is not root:
        return
    batches = shapes.batches
    if not captures_outstanding:
        shapes.released = max(shapes.released, len(shapes.unreleased))
        shapes.unreleased.clear()
    if torch.is_grad_enabled():
        shapes.unreleased.append(samples)
    if not batches or batches[-1][1] != samples:
        batches.append((native.step()[0], samples))
    model.remove_probes()  # the previous forward pass may have raised
    if elements > model.largest_batch:
        model.largest_batch = elements
        model.forward.record_inputs(inputs)
        alive = [(name, reference()) for name, reference in model.modules]
        model.probe_handles[:] = [
            module.register_forward_hook(ShapeProbe(name)) for name, module in alive if module is not None
        ]


def remove_probes(root: nn.Module) -> None:
    """Removes the probes of this model's forward pass, which has ended."""
    if _watched is not None and _watched.root() is root:
        _watched.remove_probes()


class ShapeProbe:
    """A forward hook that records a module's CaptureShape. It is there for one pass, as it would slow every other."""

    __slots__ = ("_name", "_seen")

    def __init__(self, name: str) -> None:
        self._name = name
        self._seen: CaptureShape | None = None

    @contain("recording the shapes of a forward pass")
    def __call__(self, module: nn.Module, inputs: Any, output: Any) -> None:
        if not is_compiling() and (shape := capture_shape(module, inputs, output)) is not None:
            self._seen = shape if self._seen is None else self._seen.with_call(shape)
            layer_shapes.current().forwards[self._name] = self._seen
