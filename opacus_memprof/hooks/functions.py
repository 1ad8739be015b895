# SPDX-License-Identifier: Apache-2.0
"""Functions of Opacus, and of torch's ExpandedWeights, that other modules import by name: each of those modules has
a reference of its own, and all are replaced."""

import functools
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from opacus.grad_sample import functorch, grad_sample_module_fast_gradient_clipping
from opacus.optimizers import ddp_perlayeroptimizer, optimizer
from torch.nn.utils._expanded_weights import expanded_weights_utils

from opacus_memprof import _native
from opacus_memprof.hooks.attach import Attachment
from opacus_memprof.hooks.observe import functorch_sampled
from opacus_memprof.hooks.samplers import sampler
from opacus_memprof.hooks.vocabulary import (
    CLIPPING_TEMPORARIES,
    NOISE,
    NORM_SAMPLES,
    PER_SAMPLE_GRADIENTS,
    SUMMED_GRADIENTS,
    TEMP_MATRICES,
)


def wrap_functions(attachment: Attachment) -> None:
    """Replaces each function wherever it was imported."""
    replace = functools.partial(_replace, attachment, _importers())
    replace(grad_sample_module_fast_gradient_clipping.create_norm_sample, _tagged(NORM_SAMPLES))
    replace(
        functorch.ft_compute_per_sample_gradient,
        lambda f: sampler(f, PER_SAMPLE_GRADIENTS, functorch_sampled),
    )
    # It draws for one parameter at a time, whose clipped sum is the reference.
    replace(optimizer._generate_noise, lambda f: _tag(f, NOISE)(f, module_of="reference"))
    # Clipping of one parameter, in backward.
    replace(
        ddp_perlayeroptimizer._clip_and_accumulate_parameter,
        lambda f: _native.ParameterFunction(f, _tag(f, CLIPPING_TEMPORARIES), "summed_grad", SUMMED_GRADIENTS, None),
    )
    # ExpandedWeights' grad sampler: its first argument may be a parameter's ExpandedWeight.
    replace(
        expanded_weights_utils.set_grad_sample_if_exists,
        lambda f: _native.ParameterFunction(
            f, _tag(f, TEMP_MATRICES), "grad_sample", PER_SAMPLE_GRADIENTS, "orig_weight"
        ),
    )


def _tag(function: Callable[..., Any], category: int) -> _native.Tag:
    return _native.Tag(category=category, op=_native.op_id(function.__name__))


def _tagged(category: int) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    return lambda function: _tag(function, category)(function)


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
    """All that may have imported one of the functions: looking through thousands of modules takes a millisecond."""
    ours = ("opacus.", "torch.nn.utils._expanded_weights.")
    return [module for name, module in list(sys.modules.items()) if name.startswith(ours)]
