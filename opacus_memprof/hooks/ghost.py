# SPDX-License-Identifier: Apache-2.0
"""Ghost clipping's `loss.backward()`: one pass for the norms, the clipping factors, one pass for the gradients."""

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

from opacus_memprof import _native
from opacus_memprof.hooks.attach import Attachment
from opacus_memprof.hooks.vocabulary import CLIP, CLIPPING_TEMPORARIES, IDLE

_running = 0  # calls of `backward` that have not returned


def wrap_two_passes(attachment: Attachment) -> None:
    """On the classes: each loss is an object of its own."""
    for loss in (DPTensorFastGradientClipping, DPTensorFastGradientAdaptiveClipping):
        attachment.replace_attribute(loss, "backward", _both_passes(loss.backward))
    for cls, name in (
        (GradSampleHooksFastGradientClipping, "get_clipping_coef"),
        (GradSampleHooksFastGradientClipping, "get_norm_sample"),
        (GradSampleHooksFastGradientClippingFSDP, "get_norm_sample"),
        (GradSampleHooksFastGradientClippingTP, "get_norm_sample"),
    ):
        attachment.replace_attribute(cls, name, _clipping(cls.__dict__[name]))
    attachment.replace_attribute(GradSampleHooks, "disable_hooks", _second_begins(GradSampleHooks.disable_hooks))


def _both_passes(backward: Callable[[Any], None]) -> Callable[[Any], None]:
    @functools.wraps(backward)
    def wrapper(self: Any) -> None:
        global _running
        _running += 1
        try:
            backward(self)
        finally:
            _running -= 1
            _native.set_second_backward(False)
            _native.set_phase(IDLE)

    return wrapper


def _clipping(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """The clip phase lasts until the second pass: the loss that it starts from is rescaled in between."""
    tagged = _native.Tag(category=CLIPPING_TEMPORARIES, op=_native.op_id(function.__name__))(function)

    @functools.wraps(function)
    def wrapper(self: Any) -> Any:
        if _running:
            _native.set_phase(CLIP)
        return tagged(self)

    return wrapper


def _second_begins(disable_hooks: Callable[[Any], None]) -> Callable[[Any], None]:
    """Opacus disables its hooks for the second pass, right before it."""

    @functools.wraps(disable_hooks)
    def wrapper(self: Any) -> None:
        disable_hooks(self)
        if _running:
            _native.set_second_backward(True)

    return wrapper
