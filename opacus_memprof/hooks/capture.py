# SPDX-License-Identifier: Apache-2.0
"""Opacus' two module hooks: the one that captures activations in forward, and the one that uses them in backward.

Capturing allocates nothing: Opacus keeps detached views, which pins storages that others made. The core is told
which storages these are, so that it can say who else holds them. What the backward hook allocates before its sampler
(samplers.py) is the scaled copy of the output's gradient; after it, the zeros that the samples are copied into and that
become `p.grad_sample`.
"""

from torch import nn

from opacus_memprof import _native
from opacus_memprof.hooks import observe
from opacus_memprof.hooks.attach import Attachment
from opacus_memprof.hooks.vocabulary import BACKPROP_COPIES, PER_SAMPLE_GRADIENTS

# A tag for each parameter would cost a call into the interpreter each.
_SAMPLED = _native.Tag(category=PER_SAMPLE_GRADIENTS, op=_native.op_id("create_or_accumulate_grad_sample"))


def wrap_opacus_hooks(attachment: Attachment, module: nn.Module, name: str, opacus_hooks: set[int]) -> None:
    """Wraps the hooks of the module `name` whose ids are among `opacus_hooks`."""
    module_id = _native.module_id(name)
    forward, backward = module._forward_hooks, module._backward_hooks
    for key in opacus_hooks & forward.keys():
        attachment.replace_hook(
            forward, key, _native.CaptureActivations(forward[key], module_id, observe.captured_again)
        )
    before = _native.Tag(category=BACKPROP_COPIES, module=module_id, op=_native.op_id("capture_backprops_hook"))
    for key in opacus_hooks & backward.keys():
        attachment.replace_hook(backward, key, _native.CaptureBackprops(backward[key], module_id, before, _SAMPLED))
