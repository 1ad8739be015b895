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

_BORN_INSIDE = (TEMP_MATRICES,)


class Sampler:
    """A sampler `f(layer, activations, backprops) -> {parameter: result}`; `category` is that of its results.
    `observe(layer, backprops, results)` looks at what it was given and has returned."""

    __slots__ = ("__wrapped__", "_category", "_observe", "_tagged")

    def __init__(
        self,
        wrapped: Callable[..., Mapping[Any, Tensor]],
        category: int,
        observe: Callable[[Any, Tensor, Mapping[Any, Tensor]], None] | None = None,
    ) -> None:
        self.__wrapped__ = wrapped
        self._category = category
        self._observe = observe
        tag = _native.Tag(category=TEMP_MATRICES, op=_native.op_id(getattr(wrapped, "__name__", repr(wrapped))))
        self._tagged: Callable[..., Mapping[Any, Tensor]] = tag(wrapped)

    def __call__(self, layer: Any, activations: Any, backprops: Any) -> Mapping[Any, Tensor]:
        samples = self._tagged(layer, activations, backprops)
        _native.retag_if(samples.values(), _BORN_INSIDE, self._category)
        if self._observe is not None:
            self._observe(layer, backprops, samples)
        return samples


def wrap_samplers(attachment: Attachment) -> None:
    """Wraps every registered sampler. Keys stay, since Opacus asks which types have one."""
    registries = (
        (GradSampleHooks.GRAD_SAMPLERS, PER_SAMPLE_GRADIENTS),
        (GradSampleHooksFastGradientClipping.NORM_SAMPLERS, NORM_SAMPLES),
    )
    for registry, category in registries:
        for module_type, sampler in registry.items():
            observe = linear_norms_sampled if sampler is compute_linear_norm_sample else None
            attachment.replace_item(registry, module_type, Sampler(sampler, category, observe))
