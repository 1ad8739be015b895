# SPDX-License-Identifier: Apache-2.0
"""Records the shapes of layers, their forward passes and optimizers, in `recording.observations`."""

import math
import sys
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from torch.optim import Optimizer

from opacus_memprof.errors import MemprofError
from opacus_memprof.hooks.vocabulary import (
    AbstractGradSampleHooks,
    DPOptimizer,
    GradSampleHooks,
    GradSampleHooksFastGradientClipping,
    GradSampleHooksNoOp,
    GradSampleModuleExpandedWeights,
    find,
)
from opacus_memprof.profiles.layer_shapes import CaptureShape, LayerShape
from opacus_memprof.recording import native, observations
from opacus_memprof.recording.faults import CallHook

# By optimizer: the number of state tensors of each parameter, and of temporary tensors (such as denominators) that its
# foreach step makes for all parameters at once.
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


def record_model(model: nn.Module | AbstractGradSampleHooks, named: Sequence[tuple[str, nn.Module]]) -> bool:
    """Records the shapes of a model's parameters.

    They replace the shapes of the previous model, but a plain model does not replace one of Opacus'.

    Args:
        model: the model.
        named: the user's modules with their names, the model itself first.

    Returns:
        Whether the shapes were recorded.
    """
    shapes, mode = observations.layer_shapes(), _grad_sample_mode(model)
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
    for name, module in named:
        inside = [each for each in shapes.modules if each == name or each.startswith(f"{name}." if name else "")]
        if _is_sampled_whole(module) and any(shapes.modules[each].sampled_in is None for each in inside):
            shapes.modules |= {each: replace(shapes.modules[each], sampled_in=name) for each in inside}
            frozen = sum(each.numel() for each in module.parameters() if not each.requires_grad)
            shapes.modules[name] = replace(shapes.modules[name], frozen=frozen)
    shapes.flash_clip_refusal = cache(partial(_flash_clip_refusal, weakref.ref(named[0][1])))
    return True


def _is_sampled_whole(module: nn.Module) -> bool:
    """Returns whether Opacus computes per-sample gradients of the module and of all inside of it by functorch.

    It does so where a module of an unknown class has parameters of its own.
    """
    has_own = any(parameter.requires_grad for parameter in module.parameters(recurse=False))
    return has_own and type(module) not in _sampled_types()


def _sampled_types() -> tuple[type, ...]:
    """Returns the classes of modules for which Opacus has samplers, and its own layers made of such modules."""
    if (hooks := find("opacus.grad_sample", "GradSampleHooks")) is None:
        return ()
    layers = sys.modules["opacus.layers"]
    return (*hooks.GRAD_SAMPLERS, layers.DPGRU, layers.DPLSTM, layers.DPRNN)


def _owners(named: Sequence[tuple[str, nn.Module]]) -> dict[nn.Parameter, str]:
    """Returns the name of the module to which each parameter is assigned.

    This is the first module that has it, or a module inside that one. For example, the Linear layers in Opacus'
    recurrent layers use parameters that the outer module has too.
    """
    owners: dict[nn.Parameter, str] = {}
    for name, module in named:
        for parameter in module.parameters(recurse=False):
            owner = owners.get(parameter)
            if owner is None or name.startswith(f"{owner}." if owner else ""):
                owners[parameter] = name
    return owners


def layer_shape_of(module: nn.Module, trained: dict[str, nn.Parameter]) -> LayerShape:
    """Returns the shape of a module whose trained parameters are `trained`."""
    hooks = find("opacus.grad_sample", "GradSampleHooksFastGradientClipping")
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
        norm_sampler=hooks is not None and type(module) in hooks.NORM_SAMPLERS,
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


def after_step() -> None:
    """Asks once, while the model trains, what clipping and smaller batches need: at the end it may be gone.

    That is whether flash_clip could clip it, and whether its loss, which later steps do not look at, mixes samples.
    """
    shapes = observations.layer_shapes()
    if shapes.mode:
        shapes.flash_clip_refusal()
    shapes.mixes_samples()


def record_optimizer(optimizer: Optimizer) -> None:
    """Records how many state tensors and temporaries the optimizer has."""
    original = optimizer.original_optimizer if isinstance(optimizer, DPOptimizer) else optimizer
    shapes, class_name, defaults = observations.layer_shapes(), type(original).__name__, original.defaults
    _, temporaries = _STATES.get(class_name, (0, 0))
    shapes.optimizer = class_name
    shapes.state_tensors = _state_tensors(original)
    foreach = not defaults.get("fused") and defaults.get("foreach") is not False
    shapes.step_temporaries = temporaries if foreach else 0


def _state_tensors(optimizer: Optimizer) -> int:
    states, _ = _STATES.get(type(optimizer).__name__, (0, 0))
    return states + sum(bool(optimizer.defaults.get(option)) for option in _STATE_OPTIONS)


def coming_states(optimizers: Iterable[Optimizer], model: nn.Module) -> tuple[int, int]:
    """Returns the bytes of what optimizers of other models than this one will have after their first step.

    Returns:
        The bytes of the states that they will make, and of gradients that there will be.
    """
    own = set(map(id, model.parameters()))
    others = [
        (optimizer, parameter)
        for optimizer in optimizers
        for group in optimizer.param_groups
        for parameter in group["params"]
        if parameter.requires_grad and id(parameter) not in own and not optimizer.state.get(parameter)
    ]
    states = sum(_state_tensors(optimizer) * parameter.nbytes for optimizer, parameter in others)
    has_stepped = native.step()[0] > 0  # also optimizers that keep no states
    coming = {parameter for optimizer, parameter in others if not (optimizer.state or has_stepped)}
    return states, sum(parameter.nbytes for parameter in coming if parameter.grad is None)


def observe_zero_grad(optimizer: Optimizer) -> CallHook:
    """Records whether zero_grad keeps gradients that exist."""
    shapes = observations.layer_shapes()
    parameter = None
    if shapes.keeps_gradients is None:
        of_optimizer = (parameter for group in optimizer.param_groups for parameter in group["params"])
        parameter = next((each for each in of_optimizer if each.grad is not None), None)
    yield
    if parameter is not None:
        shapes.keeps_gradients = parameter.grad is not None


def capture_shape(module: nn.Module, inputs: Any, output: Any) -> CaptureShape | None:
    """Returns the shape of a module's input and output; None if they are not tensors."""
    tensors = [value for value in inputs if isinstance(value, Tensor) and value.dim()]
    if not tensors or not isinstance(output, Tensor) or not output.numel():
        return None
    samples = tensors[0].shape[0]
    channels = output.shape[1 if isinstance(module, _ConvNd) else -1] if output.dim() > 1 else 1
    base = tensors[0]._base if tensors[0].requires_grad else None
    return CaptureShape(
        samples=samples,
        tokens=max(output.numel() // max(samples * channels, 1), 1),
        input_bytes=sum(tensor.nbytes for tensor in tensors),
        output_bytes=output.nbytes,
        element_bytes=output.element_size(),
        from_leaf=not any(tensor.requires_grad for tensor in tensors),
        layout_copied=isinstance(module, _ConvNd) and needs_layout_copy(module, output),
        is_bfloat16=output.dtype == torch.bfloat16,
        input_element_bytes=tensors[0].element_size(),
        viewed_bytes=0 if base is None else base.nbytes,
        viewed_id=0 if base is None else id(base),
    )


def needs_layout_copy(module: _ConvNd, output: Tensor) -> bool:
    """Returns whether a library copies what a convolution computes with: see `copies_layout`."""
    return copies_layout(module.weight, module.stride, module.groups, output)


def copies_layout(weight: Tensor, stride: Sequence[int], groups: int, output: Tensor) -> bool:
    """Returns whether cuDNN or oneDNN copies this convolution's operands and results into another memory layout.

    cuDNN copies them if it uses tensor cores, which need channels last. oneDNN copies them because it blocks channels.
    Tensors that are channels-last already are not copied. A 1x1 convolution is a matmul, and for depthwise convolutions
    cuDNN has kernels that need no copies.
    """
    is_1x1 = max(weight.shape[2:]) == 1
    if not output.is_contiguous() or output.dtype == torch.float64:
        return False
    if not output.is_cuda:
        return bool(torch._C._get_mkldnn_enabled()) and not (is_1x1 and max(stride) == 1)
    is_depthwise = groups > 1 and weight.shape[1] == 1
    if is_1x1 or is_depthwise or not torch.backends.cudnn.enabled:
        return False
    return output.dtype != torch.float32 or _convolutions_use_tf32()


def _convolutions_use_tf32() -> bool:
    precision = getattr(getattr(torch.backends.cudnn, "conv", None), "fp32_precision", "none")
    if precision != "none":
        return bool(precision == "tf32")
    try:
        return bool(torch.backends.cudnn.allow_tf32)
    except RuntimeError:  # torch raises it if the old and the new setting contradict each other
        return True
