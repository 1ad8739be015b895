# SPDX-License-Identifier: Apache-2.0
"""Wraps functions of Opacus, and of torch's ExpandedWeights, that other modules import by name: each of those modules
refers to the function directly, so it is replaced in all of them."""

import importlib
import sys
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

from opacus_memprof.hooks.observers import on_functorch_samples
from opacus_memprof.hooks.samplers import wrap_sampler
from opacus_memprof.hooks.vocabulary import (
    CLIPPING_TEMPORARIES,
    NOISE,
    NORM_SAMPLES,
    PER_SAMPLE_GRADIENTS,
    SUMMED_GRADIENTS,
    TEMP_MATRICES,
)
from opacus_memprof.recording import native
from opacus_memprof.recording.attachment import Attachment

Function = Callable[..., Any]


def wrap_functions(attachment: Attachment) -> None:
    """Replaces each function in every module that has imported it."""
    importers = _importers()
    for path, wrap in _WRAPPERS.items():
        attachment.apply(path, partial(_replace, importers, path, wrap))


def _wrap_norm_sample(function: Function) -> Function:
    return _tag(function, NORM_SAMPLES)(function)


def _wrap_functorch(function: Function) -> Function:
    return wrap_sampler(function, PER_SAMPLE_GRADIENTS, on_functorch_samples)


def _wrap_noise(function: Function) -> Function:
    """Opacus calls it for one parameter at a time, and passes the parameter's clipped sum as `reference`."""
    return _tag(function, NOISE)(function, module_of="reference")


def _wrap_added_noise(function: Function) -> Function:
    """flash_clip's noise that a kernel draws where it adds it takes no memory, but for the kernel's table of sums."""
    return _tag(function, NOISE)(function)


def _wrap_noise_of_many(function: Function) -> Function:
    """flash_clip passes many clipped sums at once: each is passed by itself here, for its noise to have its module."""

    def draw_one(*args: Any, reference: Any) -> Any:
        return function([reference], *args)[0]

    draw_one.__name__ = function.__name__  # the operation in the profile
    draw_tagged = _wrap_noise(draw_one)
    return lambda references, *args: [draw_tagged(*args, reference=reference) for reference in references]


def _wrap_clipping(function: Function) -> Function:
    """Clips one parameter's gradients during the backward pass."""
    tag = _tag(function, CLIPPING_TEMPORARIES)
    return native.ParameterFunction(function, tag, "summed_grad", SUMMED_GRADIENTS, None)


def _wrap_expanded_weights(function: Function) -> Function:
    """The grad sampler of ExpandedWeights; its first argument may be a parameter's ExpandedWeight."""
    tag = _tag(function, TEMP_MATRICES)
    return native.ParameterFunction(function, tag, "grad_sample", PER_SAMPLE_GRADIENTS, "orig_weight")


_WRAPPERS: dict[str, Callable[[Function], Function]] = {
    "opacus.grad_sample.grad_sample_module_fast_gradient_clipping:create_norm_sample": _wrap_norm_sample,
    "opacus.grad_sample.functorch:ft_compute_per_sample_gradient": _wrap_functorch,
    "opacus.optimizers.optimizer:_generate_noise": _wrap_noise,
    "opacus_memprof.clipping.kernels.gaussian:add_noise": _wrap_added_noise,
    "opacus_memprof.clipping.kernels.gaussian:draw_noise": _wrap_noise_of_many,
    "opacus.optimizers.ddp_perlayeroptimizer:_clip_and_accumulate_parameter": _wrap_clipping,
    "torch.nn.utils._expanded_weights.expanded_weights_utils:set_grad_sample_if_exists": _wrap_expanded_weights,
}


def _tag(function: Function, category: int) -> native.Tag:
    return native.Tag(category=category, op=native.op_id(function.__name__))


def _replace(
    importers: list[ModuleType], path: str, wrap: Callable[[Function], Function], attachment: Attachment
) -> None:
    module, _, name = path.partition(":")
    function = getattr(importlib.import_module(module), name)
    wrapped = wrap(function)
    for importer in importers:
        if vars(importer).get(name) is function:
            attachment.replace_attribute(importer, name, wrapped)


def _importers() -> list[ModuleType]:
    """The loaded modules that may have imported one of the functions. Going through thousands takes a millisecond."""
    packages = ("opacus.", "opacus_memprof.clipping.kernels.gaussian", "torch.nn.utils._expanded_weights.")
    return [module for name, module in list(sys.modules.items()) if name.startswith(packages)]
