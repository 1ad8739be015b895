# SPDX-License-Identifier: Apache-2.0
"""Recognizes layers by their results on a tiny input: linear maps, scaled embeddings, scales of features.

Libraries have many classes for these: Conv1D and RMSNorm of transformers, linear layers of recurrent cells, LayerNorm
over channels. A class name says nothing about the forward.
"""

from typing import Any, Literal

import torch
from torch import nn
from torch.func import functional_call
from torch.utils._python_dispatch import TorchDispatchMode

from opacus_memprof.clipping.forwards.repetition import repeating
from opacus_memprof.clipping.layers.base import Layer
from opacus_memprof.clipping.layers.embedding import EmbeddingLayer, ScaledEmbeddingLayer
from opacus_memprof.clipping.layers.linear import LinearLayer, TransposedLinearLayer
from opacus_memprof.clipping.layers.normalization import ScaleLayer


def recognize(name: str, module: nn.Module) -> Layer | None:
    """Returns the layer that computes the same as `module`, or None.

    `module` must own all its parameters. The module and the random number generators do not change.
    """
    own = dict(module.named_parameters(recurse=False))
    weight = own.get("weight")
    if weight is None or not own.keys() <= {"weight", "bias"} or len(list(module.parameters())) != len(own):
        return None
    if any(True for _ in module.children()) or weight.numel() == 0:
        return None
    buffers = [(buffer, buffer.clone()) for buffer in module.buffers()]
    try:
        with torch.no_grad(), repeating(), torch.random.fork_rng([weight.device] if weight.is_cuda else []):
            return _recognize(name, module, weight, own.get("bias"))
    except Exception:  # the module may raise anything for an unexpected input
        return None
    finally:
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)


def _recognize(name: str, module: nn.Module, weight: torch.Tensor, bias: torch.Tensor | None) -> Layer | None:
    if isinstance(module, nn.Embedding):
        return _embedding(name, module, weight)
    if weight.dim() == 2:
        return _linear(name, module, weight, bias)
    return _scale(name, module, weight, bias) if weight.dim() == 1 else None


def _embedding(name: str, module: nn.Embedding, weight: torch.Tensor) -> Layer | None:
    ids = torch.randint(0, len(weight), (2, 3), device=weight.device)
    ones = torch.ones((), dtype=weight.dtype, device=weight.device).expand(weight.shape)
    scale = _call(module, ids, weight=ones).flatten()[0]
    if not _agree(_call(module, ids), weight[ids] * scale):
        return None
    return EmbeddingLayer(name, module) if float(scale) == 1 else ScaledEmbeddingLayer(name, module, float(scale))


def _linear(name: str, module: nn.Module, weight: torch.Tensor, bias: torch.Tensor | None) -> Layer | None:
    # With zeros, any two layers agree; on a virtual GPU, large weights are always zeros.
    kind = _kind_of_linear(module, weight, bias, {}) if weight.any() else _kind_by_draws(module)
    return None if kind is None else kind(name, module)


_known_kinds: dict[tuple[Any, ...], type[Layer] | None] = {}


def _kind_by_draws(module: nn.Module) -> type[Layer] | None:
    """Does what `_kind_of_linear` does, with values that are drawn: once for all modules of one form."""
    form = _form(module)
    if form is not None and form in _known_kinds:
        return _known_kinds[form]
    values = {name: torch.randn(p.shape, dtype=p.dtype) for name, p in module.named_parameters(recurse=False)}
    kind = _kind_of_linear(module, values["weight"], values.get("bias"), values)
    if form is not None:
        _known_kinds[form] = kind
    return kind


def _form(module: nn.Module) -> tuple[Any, ...] | None:
    """Returns all that a forward can depend on beside the parameters' values; None if there may be more."""
    base = vars(nn.Module())
    own = {name: value for name, value in vars(module).items() if name not in base}
    if not all(isinstance(value, bool | int | float | str | None) for value in own.values()):
        return None
    if module._forward_hooks or module._forward_pre_hooks or module._buffers:
        return None
    parameters = [(name, tuple(p.shape), p.dtype) for name, p in module.named_parameters(recurse=False)]
    attributes = [(name, type(value), value) for name, value in own.items()]
    return (type(module), type(module).forward, module.training, *parameters, *attributes)


def _kind_of_linear(
    module: nn.Module, weight: torch.Tensor, bias: torch.Tensor | None, values: dict[str, torch.Tensor]
) -> type[Layer] | None:
    """Returns the linear layer that computes what a module computes with `values` in place of its parameters."""
    candidates: list[tuple[type[Layer], torch.Tensor]] = [(LinearLayer, weight.mT), (TransposedLinearLayer, weight)]
    for kind, matrix in candidates:
        x = torch.randn(2, 3, len(matrix), dtype=weight.dtype, device=weight.device)
        try:
            expected = x @ matrix if bias is None else x @ matrix + bias
            found = _call(module, x, **values)
        except RuntimeError:
            continue
        if _agree(found, expected):
            return kind
    return None


def _scale(name: str, module: nn.Module, weight: torch.Tensor, bias: torch.Tensor | None) -> Layer | None:
    axes: tuple[Literal[-1, 1], ...] = (-1, 1)
    for axis in axes:
        shape = (2, 3, 1, len(weight)) if axis == -1 else (2, len(weight), 3, 4)
        x = torch.randn(shape, dtype=weight.dtype, device=weight.device)
        try:
            unit = _unit(module, x, axis, weight, bias)
        except RuntimeError:
            continue
        if unit is not None:
            return ScaleLayer(name, module, axis, unit)
    return None


def _unit(
    module: nn.Module, x: torch.Tensor, axis: int, weight: torch.Tensor, bias: torch.Tensor | None
) -> float | None:
    """Returns the weight for which the module's output, without a bias, is c(x); None if there is no such weight."""
    zeros = {} if bias is None else {"bias": torch.zeros_like(bias)}
    shift = _call(module, x, weight=torch.zeros_like(weight), **zeros)
    scaled = _call(module, x, weight=torch.ones_like(weight), **zeros)
    if shift.shape != x.shape or not scaled.any() or not _one_by_one(module, x):
        return None
    c = scaled - shift
    values = {"weight": torch.randn_like(weight)} | ({} if bias is None else {"bias": torch.randn_like(bias)})
    view = [1] * x.dim()
    view[axis] = -1
    expected = shift + c * values["weight"].view(view)
    expected = expected if bias is None else expected + values["bias"].view(view)
    if not _agree(_call(module, x, **values), expected):
        return None
    if not shift.any():
        return 1.0
    return 0.0 if _agree(shift, c) else None


def _one_by_one(module: nn.Module, x: torch.Tensor) -> bool:
    """Returns whether samples are processed independently."""
    return _agree(_call(module, x[:1]), _call(module, x)[:1])


def _agree(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    """Returns whether two outputs agree. Many layers compute in float32, whatever their parameters' dtype."""
    precision = 8 * torch.finfo(actual.dtype).eps if actual.dtype.itemsize < 4 else 1e-5
    scale = float(expected.abs().max())
    return actual.shape == expected.shape and torch.allclose(actual, expected, rtol=precision, atol=precision * scale)


_SMOOTH = frozenset(
    [
        "view",
        "_unsafe_view",
        "reshape",
        "t",
        "transpose",
        "permute",
        "unsqueeze",
        "squeeze",
        "expand",
        "clone",
        "detach",
        "alias",
        "slice",
        "select",
        "split",
        "chunk",
        "addmm",
        "mm",
        "bmm",
        "baddbmm",
        "matmul",
        "linear",
        "add",
        "add_",
        "sub",
        "sub_",
        "rsub",
        "mul",
        "mul_",
        "div",
        "div_",
        "neg",
        "pow",
        "pow_",
        "square",
        "mean",
        "sum",
        "var",
        "var_mean",
        "std",
        "rsqrt",
        "rsqrt_",
        "sqrt",
        "sqrt_",
        "reciprocal",
        "_to_copy",
        "native_layer_norm",
        "native_group_norm",
        "native_batch_norm",
        "rms_norm",
        "_fused_rms_norm",
        "embedding",
        "ones",
        "ones_like",
        "zeros",
        "zeros_like",
        "empty",
        "empty_like",
        "full",
        "lift_fresh",
        "copy_",
        "norm",
        "linalg_vector_norm",
    ]
)


class _OnlySmooth(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Raises TypeError for operations other than products, sums, powers and means.

    A result of these operations on a few random numbers holds for all numbers, because no clamp, comparison or
    condition depends on the values.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ not in _SMOOTH:
            raise TypeError(func)
        return func(*args, **(kwargs or {}))


def _call(module: nn.Module, x: torch.Tensor, **values: torch.Tensor) -> torch.Tensor:
    with _OnlySmooth():  # type: ignore[no-untyped-call]
        output: Any = functional_call(module, values, (x,))
    if not isinstance(output, torch.Tensor):
        raise TypeError
    return output
