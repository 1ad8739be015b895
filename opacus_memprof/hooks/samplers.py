# SPDX-License-Identifier: Apache-2.0
"""Opacus' grad samplers and norm samplers: the functions that turn activations and backprops into results.

What a sampler allocates is born as `temp_matrices`, and what it returns is retagged on return: only then is it
known which blocks those are. A result that is a view of the output's gradient keeps the gradient's category.
"""

from collections.abc import Callable, Mapping
from typing import Any

from opacus.grad_sample import GradSampleHooks, GradSampleHooksFastGradientClipping
from opacus.grad_sample.linear import compute_linear_norm_sample
from torch import Tensor

from opacus_memprof import _native
from opacus_memprof.hooks.attach import Attachment
from opacus_memprof.hooks.observe import linear_norms_sampled
from opacus_memprof.hooks.vocabulary import NORM_SAMPLES, PER_SAMPLE_GRADIENTS, TEMP_MATRICES

Observe = Callable[[Any, Tensor, Mapping[Any, Tensor]], None]


def sampler(
    wrapped: Callable[..., Mapping[Any, Tensor]], category: int, observe: Observe | None = None
) -> _native.Sampler:
    """A sampler `f(layer, activations, backprops) -> {parameter: result}`; `category` is that of its results.
    `observe(layer, backprops, results)` looks at what it was given and has returned."""
    op = _native.op_id(getattr(wrapped, "__name__", repr(wrapped)))
    return _native.Sampler(wrapped, _native.Tag(category=TEMP_MATRICES, op=op), category, observe)


def wrap_samplers(attachment: Attachment) -> None:
    """Wraps every registered sampler that is not wrapped yet. Keys stay, since Opacus asks which types have one."""
    registries = (
        (GradSampleHooks.GRAD_SAMPLERS, PER_SAMPLE_GRADIENTS),
        (GradSampleHooksFastGradientClipping.NORM_SAMPLERS, NORM_SAMPLES),
    )
    for registry, category in registries:
        for module_type, function in registry.items():
            if isinstance(function, _native.Sampler):
                continue
            observe = linear_norms_sampled if function is compute_linear_norm_sample else None
            attachment.replace_item(registry, module_type, sampler(function, category, observe))
