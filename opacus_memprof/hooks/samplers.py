# SPDX-License-Identifier: Apache-2.0
"""Wraps Opacus' grad samplers and norm samplers: the functions that turn activations and backprops into results.

What a sampler allocates is `temp_matrices` at first. Its results are retagged when it returns, for only then is it
known which blocks they are. A result that is a view of the output's gradient keeps the gradient's category.
"""

from collections.abc import Callable, Mapping
from typing import Any

from opacus.grad_sample import GradSampleHooks, GradSampleHooksFastGradientClipping
from opacus.grad_sample.linear import compute_linear_norm_sample
from torch import Tensor

from opacus_memprof.hooks.observers import on_linear_norm_samples
from opacus_memprof.hooks.vocabulary import NORM_SAMPLES, PER_SAMPLE_GRADIENTS, TEMP_MATRICES
from opacus_memprof.recording import native
from opacus_memprof.recording.attachment import Attachment

Observer = Callable[[Any, Tensor, Mapping[Any, Tensor]], None]


def wrap_sampler(
    sampler: Callable[..., Mapping[Any, Tensor]], category: int, observer: Observer | None = None
) -> native.Sampler:
    """Wraps a sampler `f(layer, activations, backprops) -> {parameter: result}`.

    Args:
        sampler: the function.
        category: the id of its results' category.
        observer: is called with (layer, backprops, results) after the sampler.
    """
    op = native.op_id(getattr(sampler, "__name__", repr(sampler)))
    return native.Sampler(sampler, native.Tag(category=TEMP_MATRICES, op=op), category, observer)


def wrap_samplers(attachment: Attachment) -> None:
    """Wraps every registered sampler that is not wrapped yet. Keys stay, since Opacus asks which types have one."""
    registries = (
        (GradSampleHooks.GRAD_SAMPLERS, PER_SAMPLE_GRADIENTS),
        (GradSampleHooksFastGradientClipping.NORM_SAMPLERS, NORM_SAMPLES),
    )
    for registry, category in registries:
        for module_type, sampler in registry.items():
            if isinstance(sampler, native.Sampler):
                continue
            observer = on_linear_norm_samples if sampler is compute_linear_norm_sample else None
            wrapped = wrap_sampler(sampler, category, observer)
            attachment.replace_item(registry, module_type, wrapped)
