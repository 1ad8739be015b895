# SPDX-License-Identifier: Apache-2.0
"""Attributes the tensors that grad_sample_mode="flash_clip" keeps from a layer's backward to the optimizer's step.

optimizer.py follows clipping and noise in the step, which is that of an Opacus optimizer.
"""

import functools
from typing import Any

from opacus_memprof.clipping.bookkeeping import Bookkeeping
from opacus_memprof.hooks.vocabulary import FORWARD, TEMP_MATRICES
from opacus_memprof.profiles.profile import PROOF_OP
from opacus_memprof.recording import native
from opacus_memprof.recording.attachment import Attachment
from opacus_memprof.recording.faults import CallHook

_OP = native.op_id("flash_clip")
_TAG = native.Tag(category=TEMP_MATRICES, op=_OP)
_PROOF = native.Tag(phase=FORWARD, op=native.op_id(PROOF_OP))
_COPIES = native.Tag(category=native.category_id("inputs"), op=_OP)
# A layer's input. Autograd releases it right after the layer's backward; then only flash_clip holds it.
_CATEGORIES = {
    name: native.category_id("activation_hooks_opacus_only" if name == "activation_hooks" else name)
    for name in ("activation_hooks", "backprop_copies", "norm_samples", "per_sample_gradients", "summed_gradients")
}
_GRADIENTS = native.Tag(category=_CATEGORIES["backprop_copies"], op=_OP)
_RETAGGED_FROM = tuple(
    native.category_id(name) for name in ("forward_undecided", "backward_temporaries", "temp_matrices")
)


def observe_bookkeeping(attachment: Attachment) -> None:
    """Patches the class Bookkeeping: each flash_clip model has an instance, and a copy of a model has another."""
    attachment.observe("opacus_memprof.clipping.bookkeeping:Bookkeeping.add", _observe_add)
    attachment.observe("opacus_memprof.clipping.bookkeeping:BackwardPass.squared_norms", _observe_norms)
    attachment.observe("opacus_memprof.clipping.proof.probe:Probe._choose_ways", _observe_trial)
    for name in ("prove", "recheck"):
        attachment.observe(f"opacus_memprof.clipping.proof.situations:Situations.{name}", _observe_proof)
    for name in ("_run", "note_read"):
        attachment.observe(f"opacus_memprof.clipping.module.other_samples:OtherSamples.{name}", _observe_other_samples)
    attachment.observe("opacus_memprof.clipping.module.calls:ExplainedSteps.check", _observe_comparison)
    attachment.observe("opacus_memprof.clipping.proof.explanation:copied", _observe_copies)
    attachment.observe("opacus_memprof.clipping.proof.explanation:RecordedForward.add", _observe_gradients)


def _observe_add(bookkeeping: Bookkeeping, layer: Any, *args: Any) -> CallHook:
    module = native.owner_of(next(iter(layer.trainable())))
    with _tag(module):
        yield
    for category, tensor in bookkeeping.kept_tensors_of(layer):
        native.retag_if(tensor, _RETAGGED_FROM, _CATEGORIES[category], module)


def _observe_trial(*_: Any) -> CallHook:
    """Observes trials: in the first step, flash_clip tries how a module's forward can be repeated."""
    with _TAG:
        yield


def _observe_other_samples(*_: Any) -> CallHook:
    """Observes what is computed beside the program, for other samples, and copies of numbers that the program reads.

    Some of it stays until the next call.
    """
    with _TAG:
        yield


def _observe_proof(_: Any, *arguments: Any) -> CallHook:
    """Observes a proof, which runs forward and backward passes before the forward that it checks. It keeps nothing."""
    native.tag_inputs((arguments, {}))
    with _PROOF:
        yield


def _observe_comparison(_: Any, *__: Any) -> CallHook:
    """Observes the comparison of a step's gradients with plain autograd's, which repeats forwards inside the step."""
    previous_phase = native.set_phase(FORWARD)
    try:
        with _PROOF:
            yield
    finally:
        native.set_phase(previous_phase)


def _observe_copies(*_: Any) -> CallHook:
    """Observes copies of the batch, with which a step is compared later."""
    with _COPIES:
        yield


def _observe_gradients(*_: Any) -> CallHook:
    """Observes gradients of the outputs, with which a step is compared later."""
    with _GRADIENTS:
        yield


def _observe_norms(*_: Any) -> CallHook:
    """Observes norms that were deferred to the step."""
    with _TAG:
        _, norms, _ = yield
    native.retag_if(norms, _RETAGGED_FROM, _CATEGORIES["norm_samples"])


@functools.cache
def _tag(module: int) -> native.Tag:
    return native.Tag(category=TEMP_MATRICES, module=module, op=_OP)
