# SPDX-License-Identifier: Apache-2.0
"""Sets the phases of ghost clipping's `loss.backward()`: a backward pass for the gradient norms, the clipping factors,
and a second backward pass for the clipped gradients."""

import functools
from collections.abc import Callable
from typing import Any

from opacus.grad_sample import (
    GradSampleHooks,
    GradSampleHooksFastGradientClipping,
    GradSampleHooksFastGradientClippingFSDP,
    GradSampleHooksFastGradientClippingTP,
)
from opacus.utils.adaptive_clipping.adaptive_clipping_utils import DPTensorFastGradientAdaptiveClipping
from opacus.utils.fast_gradient_clipping_utils import DPTensorFastGradientClipping

from opacus_memprof.hooks.attachment import Attachment
from opacus_memprof.hooks.vocabulary import CLIP, CLIPPING_TEMPORARIES, IDLE
from opacus_memprof.recording import native

_running_backwards = 0  # calls of `backward` that have not returned


def wrap_ghost_backward(attachment: Attachment) -> None:
    """Patches the classes, for each loss is a new object."""
    for loss in (DPTensorFastGradientClipping, DPTensorFastGradientAdaptiveClipping):
        attachment.replace_attribute(loss, "backward", _wrap_backward(loss.backward))
    for cls, name in (
        (GradSampleHooksFastGradientClipping, "get_clipping_coef"),
        (GradSampleHooksFastGradientClipping, "get_norm_sample"),
        (GradSampleHooksFastGradientClippingFSDP, "get_norm_sample"),
        (GradSampleHooksFastGradientClippingTP, "get_norm_sample"),
    ):
        attachment.replace_attribute(cls, name, _wrap_clipping(cls.__dict__[name]))
    attachment.replace_attribute(GradSampleHooks, "disable_hooks", _wrap_disable_hooks(GradSampleHooks.disable_hooks))


def _wrap_backward(backward: Callable[[Any], None]) -> Callable[[Any], None]:
    @functools.wraps(backward)
    def wrapper(self: Any) -> None:
        global _running_backwards
        _running_backwards += 1
        try:
            backward(self)
        finally:
            _running_backwards -= 1
            native.set_second_backward(False)
            native.set_phase(IDLE)

    return wrapper


def _wrap_clipping(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Sets the phase `clip`, which lasts until the second pass: Opacus rescales the losses in between."""
    tagged = native.Tag(category=CLIPPING_TEMPORARIES, op=native.op_id(function.__name__))(function)

    @functools.wraps(function)
    def wrapper(self: Any) -> Any:
        if _running_backwards:
            native.set_phase(CLIP)
        return tagged(self)

    return wrapper


def _wrap_disable_hooks(disable_hooks: Callable[[Any], None]) -> Callable[[Any], None]:
    """Marks the beginning of the second pass: Opacus disables its hooks right before it."""

    @functools.wraps(disable_hooks)
    def wrapper(self: Any) -> None:
        disable_hooks(self)
        if _running_backwards:
            native.set_second_backward(True)

    return wrapper
