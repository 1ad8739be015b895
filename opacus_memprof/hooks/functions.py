# SPDX-License-Identifier: Apache-2.0
"""Wraps functions of Opacus, and of torch's ExpandedWeights, that other modules import by name: each of those modules
refers to the function directly, so it is replaced in all of them."""

import functools
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from opacus.grad_sample import functorch, grad_sample_module_fast_gradient_clipping
from opacus.optimizers import ddp_perlayeroptimizer, optimizer
from torch.nn.utils._expanded_weights import expanded_weights_utils

from opacus_memprof.hooks.attachment import Attachment
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


def wrap_functions(attachment: Attachment) -> None:
    """Replaces each function in every module that has imported it."""
    replace = functools.partial(_replace, attachment, _importers())
    replace(grad_sample_module_fast_gradient_clipping.create_norm_sample, lambda f: _tag(f, NORM_SAMPLES)(f))
    replace(
        functorch.ft_compute_per_sample_gradient,
        lambda f: wrap_sampler(f, PER_SAMPLE_GRADIENTS, on_functorch_samples),
    )
    # Opacus calls it for one parameter at a time, and passes the parameter's clipped sum as `reference`.
    replace(optimizer._generate_noise, lambda f: _tag(f, NOISE)(f, module_of="reference"))
    # Clips one parameter's gradients during the backward pass.
    replace(
        ddp_perlayeroptimizer._clip_and_accumulate_parameter,
        lambda f: native.ParameterFunction(f, _tag(f, CLIPPING_TEMPORARIES), "summed_grad", SUMMED_GRADIENTS, None),
    )
    # The grad sampler of ExpandedWeights; its first argument may be a parameter's ExpandedWeight.
    replace(
        expanded_weights_utils.set_grad_sample_if_exists,
        lambda f: native.ParameterFunction(
            f, _tag(f, TEMP_MATRICES), "grad_sample", PER_SAMPLE_GRADIENTS, "orig_weight"
        ),
    )


def _tag(function: Callable[..., Any], category: int) -> native.Tag:
    return native.Tag(category=category, op=native.op_id(function.__name__))


def _replace(
    attachment: Attachment,
    importers: list[ModuleType],
    function: Callable[..., Any],
    wrap: Callable[[Callable[..., Any]], Callable[..., Any]],
) -> None:
    name, wrapped = function.__name__, wrap(function)
    for module in importers:
        if module.__dict__.get(name) is function:
            attachment.replace_attribute(module, name, wrapped)


def _importers() -> list[ModuleType]:
    """The loaded modules that may have imported one of the functions. Going through thousands takes a millisecond."""
    packages = ("opacus.", "torch.nn.utils._expanded_weights.")
    return [module for name, module in list(sys.modules.items()) if name.startswith(packages)]
