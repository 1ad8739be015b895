# SPDX-License-Identifier: Apache-2.0
"""Sets the phases of ghost clipping's `loss.backward()`: a backward pass for the gradient norms, the clipping factors,
and a second backward pass for the clipped gradients."""

from collections.abc import Callable
from typing import Any

from opacus_memprof.hooks.vocabulary import CLIP, CLIPPING_TEMPORARIES, IDLE
from opacus_memprof.recording import native
from opacus_memprof.recording.attachment import Attachment
from opacus_memprof.recording.faults import Observation

_LOSSES = (
    "opacus.utils.fast_gradient_clipping_utils:DPTensorFastGradientClipping",
    "opacus.utils.adaptive_clipping.adaptive_clipping_utils:DPTensorFastGradientAdaptiveClipping",
)
_CLIPPING = (
    "GradSampleHooksFastGradientClipping.get_clipping_coef",
    "GradSampleHooksFastGradientClipping.get_norm_sample",
    "GradSampleHooksFastGradientClippingFSDP.get_norm_sample",
    "GradSampleHooksFastGradientClippingTP.get_norm_sample",
)

_running_backwards = 0  # calls of `backward` that have not returned


def observe_ghost_backward(attachment: Attachment) -> None:
    """Patches the classes, for each loss is a new object."""
    for loss in _LOSSES:
        attachment.observe(f"{loss}.backward", _observe_backward)
    for method in _CLIPPING:
        attachment.observe(f"opacus.grad_sample:{method}", _observe_clipping(method.partition(".")[2]))
    attachment.observe("opacus.grad_sample:GradSampleHooks.disable_hooks", _observe_disable_hooks)


def _observe_backward(loss: Any) -> Observation:
    global _running_backwards
    _running_backwards += 1
    try:
        yield
    finally:
        _running_backwards -= 1
        native.set_second_backward(False)
        native.set_phase(IDLE)


def _observe_clipping(op: str) -> Callable[[Any], Observation]:
    """Sets the phase `clip`, which lasts until the second pass: Opacus rescales the losses in between."""
    tag = native.Tag(category=CLIPPING_TEMPORARIES, op=native.op_id(op))

    def observation(hooks: Any) -> Observation:
        if _running_backwards:
            native.set_phase(CLIP)
        with tag:
            yield

    return observation


def _observe_disable_hooks(hooks: Any) -> Observation:
    """Marks the beginning of the second pass: Opacus disables its hooks right before it."""
    yield
    if _running_backwards:
        native.set_second_backward(True)
