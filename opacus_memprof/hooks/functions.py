# SPDX-License-Identifier: Apache-2.0
"""Functions of Opacus, and of torch's ExpandedWeights, that other modules import by name: each of those modules has
a reference of its own, and all are replaced."""

import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

from opacus.grad_sample import functorch, grad_sample_module, grad_sample_module_fast_gradient_clipping
from opacus.optimizers import ddp_perlayeroptimizer, optimizer
from torch.nn.utils._expanded_weights import expanded_weights_utils

from opacus_memprof import _native
from opacus_memprof.hooks.attach import Attachment
from opacus_memprof.hooks.observe import functorch_sampled
from opacus_memprof.hooks.owners import owner_of
from opacus_memprof.hooks.samplers import Sampler
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
    # Allocates the zeros that the samples are copied into and that become p.grad_sample.
    _replace(attachment, grad_sample_module.create_or_accumulate_grad_sample, _tagged(PER_SAMPLE_GRADIENTS))
    _replace(attachment, grad_sample_module_fast_gradient_clipping.create_norm_sample, _tagged(NORM_SAMPLES))
    _replace(
        attachment,
        functorch.ft_compute_per_sample_gradient,
        lambda f: Sampler(f, PER_SAMPLE_GRADIENTS, functorch_sampled),
    )
    _replace(attachment, optimizer._generate_noise, _tagged(NOISE))
    _replace(attachment, ddp_perlayeroptimizer._clip_and_accumulate_parameter, ClipParameter)
    _replace(attachment, expanded_weights_utils.set_grad_sample_if_exists, ExpandedWeightSample)


class ExpandedWeightSample:
    """`set_grad_sample_if_exists(maybe_expanded_weight, per_sample_grad_fn)`: ExpandedWeights' grad sampler."""

    __slots__ = ("__wrapped__", "_tagged")

    def __init__(self, wrapped: Callable[..., None]) -> None:
        self.__wrapped__ = wrapped
        self._tagged = _tagged(TEMP_MATRICES)(wrapped)

    def __call__(self, maybe_expanded_weight: Any, per_sample_grad_fn: Any) -> None:
        self._tagged(maybe_expanded_weight, per_sample_grad_fn)
        parameter = getattr(maybe_expanded_weight, "orig_weight", None)
        if parameter is not None:
            # Also where it is a view of the output's gradient: it keeps that alive until zero_grad.
            _native.retag(parameter.grad_sample, PER_SAMPLE_GRADIENTS, owner_of(parameter))


class ClipParameter:
    """`_clip_and_accumulate_parameter(p, max_grad_norm)`: clipping of one parameter, in backward."""

    __slots__ = ("__wrapped__", "_tagged")

    def __init__(self, wrapped: Callable[..., None]) -> None:
        self.__wrapped__ = wrapped
        self._tagged = _tagged(CLIPPING_TEMPORARIES)(wrapped)

    def __call__(self, p: Any, max_grad_norm: float) -> None:
        self._tagged(p, max_grad_norm)
        _native.retag(p.summed_grad, SUMMED_GRADIENTS, owner_of(p))


def _tagged(category: int) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    return lambda function: _native.Tag(category=category, op=_native.op_id(function.__name__))(function)


def _replace(
    attachment: Attachment, function: Callable[..., Any], wrap: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> None:
    name, wrapped = function.__name__, wrap(function)
    for module in _importers(name, function):
        attachment.replace_attribute(module, name, wrapped)


def _importers(name: str, function: Callable[..., Any]) -> Iterator[ModuleType]:
    for module_name, module in list(sys.modules.items()):
        inside = module_name.startswith(("opacus.", "torch.nn.utils._expanded_weights."))
        if inside and module.__dict__.get(name) is function:
            yield module
