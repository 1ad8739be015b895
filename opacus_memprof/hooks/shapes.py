# SPDX-License-Identifier: Apache-2.0
"""Notes the shapes of what is trained in `workload`: once for a model, and in a forward pass only where the batch is
larger than any before."""

import math
import weakref
from collections.abc import Callable, Sequence
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
from torch import Tensor, nn
from torch.compiler import is_compiling
from torch.nn.modules.conv import _ConvNd
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from opacus_memprof import _native, workload
from opacus_memprof.errors import MemprofError
from opacus_memprof.hooks.attach import Attachment

# Tensors of a parameter's shape that torch.optim keeps for each, and that its step over lists of tensors makes of all
# of them at once (denominators). Options that keep one more: `_ONE_MORE`.
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
_ONE_MORE = ("amsgrad", "momentum", "centered")

_largest = 0  # elements of the largest batch that was looked at
_looking: "list[RemovableHandle]" = []
_watched: "list[tuple[str, weakref.ref[nn.Module]]]" = []


def model_attached(model: nn.Module | AbstractGradSampleHooks, named: Sequence[tuple[str, nn.Module]]) -> None:
    """A model is followed from now on; `named` are the user's modules with their names. Of several the last one counts,
    but one without Opacus not after one with it."""
    global _largest
    known, mode = workload.current(), _mode(model)
    if known.mode and not mode:
        return
    _largest = 0
    known.mode, known.mean = mode, getattr(model, "loss_reduction", "mean") == "mean"
    known.forwards.clear()
    known.modules = {}
    seen: set[int] = set()
    for name, module in named:
        trained = {
            key: parameter
            for key, parameter in module.named_parameters(recurse=False)
            if parameter.requires_grad and id(parameter) not in seen
        }
        if trained:
            seen.update(map(id, trained.values()))
            known.modules[name] = _module(module, trained)
    known.flash_clip_refusal = partial(_flash_clip_refusal, weakref.ref(named[0][1]))


def _module(module: nn.Module, trained: dict[str, nn.Parameter]) -> workload.Module:
    weight = trained.get("weight")
    shape = weight.shape if weight is not None and weight.dim() > 1 else None
    bias = trained["bias"].numel() if "bias" in trained else 0
    return workload.Module(
        kind=type(module).__name__,
        bytes=sum(parameter.nbytes for parameter in trained.values()),
        weight=sum(parameter.numel() for parameter in trained.values()) - bias,
        bias=bias,
        rows=shape[0] if shape else 0,
        columns=shape[1:].numel() if shape else 0,
        norm_sampler=type(module) in GradSampleHooksFastGradientClipping.NORM_SAMPLERS,
        groups=module.groups if isinstance(module, _ConvNd) else 1,
        taps=math.prod(module.kernel_size) if isinstance(module, _ConvNd) else 1,
    )


def _mode(model: Any) -> str:
    if isinstance(model, GradSampleHooksFastGradientClipping):
        return "ghost" if model.use_ghost_clipping else "fast"
    if isinstance(model, GradSampleHooksNoOp):
        return "no_op"
    if isinstance(model, GradSampleModuleExpandedWeights):
        return "ew"
    if isinstance(model, GradSampleHooks):
        return "functorch" if getattr(model, "force_functorch", False) else "hooks"
    if isinstance(model, AbstractGradSampleHooks):
        return "flash_clip" if hasattr(model, "book") else "other"
    return ""


def _flash_clip_refusal(model: "weakref.ref[nn.Module]") -> str | None:
    from opacus_memprof.clipping.validate import find_layers

    alive = model()
    if alive is None:
        return "the model is gone"
    try:
        find_layers(alive)
    except MemprofError as error:
        return str(error)
    return None


def optimizer_attached(optimizer: Optimizer) -> None:
    original = optimizer.original_optimizer if isinstance(optimizer, DPOptimizer) else optimizer
    known, kind, defaults = workload.current(), type(original).__name__, original.defaults
    states, temporaries = _STATES.get(kind, (0, 0))
    known.optimizer = kind
    known.states = states + sum(bool(defaults.get(option)) for option in _ONE_MORE)
    lists = not defaults.get("fused") and defaults.get("foreach") is not False
    known.temporaries = temporaries if lists else 0


def gradients_zeroed(optimizer: Optimizer, run: Callable[[], Any]) -> Any:
    """Runs zero_grad, and sees whether it leaves gradients that were there."""
    known = workload.current()
    if known.keeps_gradients is not None:
        return run()
    first = next((p for group in optimizer.param_groups for p in group["params"] if p.grad is not None), None)
    result = run()
    if first is not None:
        known.keeps_gradients = first.grad is not None
    return result


def watch(attachment: Attachment, named: Sequence[tuple[str, nn.Module]]) -> None:
    """Forward passes of these modules may be looked at."""
    modules = workload.current().modules
    _watched[:] = [(name, weakref.ref(module)) for name, module in named if name in modules]
    attachment.on_detach(forward_ends)
    attachment.on_detach(_watched.clear)


def unwatch(gone: set[nn.Module]) -> None:
    """Forward passes of these modules are looked at no more: they are compiled."""
    _watched[:] = [(name, reference) for name, reference in _watched if reference() not in gone]


def batch_comes(samples: int, elements: int) -> None:
    """A forward pass of the outermost model begins."""
    global _largest
    batches = workload.current().batches
    if not batches or batches[-1][1] != samples:
        batches.append((_native.step()[0], samples))
    if _looking:  # the forward before has failed
        forward_ends()
    if elements > _largest:
        _largest = elements
        alive = [(name, reference()) for name, reference in _watched]
        _looking[:] = [module.register_forward_hook(_Look(name)) for name, module in alive if module is not None]


def forward_ends() -> None:
    while _looking:
        _looking.pop().remove()


class _Look:
    """A forward hook for one pass: hooks that stay would cost every pass."""

    __slots__ = ("_name",)

    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, module: nn.Module, inputs: Any, output: Any) -> None:
        if is_compiling():
            return
        taken = [tensor for tensor in inputs if isinstance(tensor, Tensor) and tensor.dim()]
        if not taken or not isinstance(output, Tensor) or not output.numel():
            return
        samples = taken[0].shape[0]
        channels = output.shape[1 if isinstance(module, _ConvNd) else -1] if output.dim() > 1 else 1
        workload.current().forwards[self._name] = workload.Forward(
            samples=samples,
            tokens=max(output.numel() // max(samples * channels, 1), 1),
            input_bytes=sum(tensor.nbytes for tensor in taken),
            output_bytes=output.nbytes,
            width=output.element_size(),
            from_leaf=not any(tensor.requires_grad for tensor in taken),
            relaid=isinstance(module, _ConvNd) and _relaid(module, output),
        )


def _relaid(module: _ConvNd, output: Tensor) -> bool:
    """Whether the library copies operands and results of this convolution into a layout of its own: cuDNN where it uses
    tensor cores, which want channels innermost, and oneDNN, which wants them in blocks. Not where they are innermost
    already. A kernel of one position is a matrix product, and cuDNN has kernels for single channels."""
    point = max(module.kernel_size) == 1
    if not output.is_contiguous() or output.dtype == torch.float64:
        return False
    if not output.is_cuda:
        return bool(torch._C._get_mkldnn_enabled()) and not (point and max(module.stride) == 1)
    if point or module.groups == module.in_channels > 1 or not torch.backends.cudnn.enabled:
        return False
    return output.dtype != torch.float32 or _tf32()


def _tf32() -> bool:
    precision = getattr(getattr(torch.backends.cudnn, "conv", None), "fp32_precision", "none")
    if precision != "none":
        return bool(precision == "tf32")
    try:
        return bool(torch.backends.cudnn.allow_tf32)
    except RuntimeError:  # what torch says where both of its settings are in use
        return True
