# SPDX-License-Identifier: Apache-2.0
"""Wraps Opacus' two module hooks: the forward hook that captures activations, and the backward hook that uses them.

Capturing allocates nothing: Opacus keeps detached views of tensors that others made, which keeps their storages alive.
The core is told which storages these are, so that it can tell whether autograd holds them too. What the backward hook
allocates before it calls its grad sampler (samplers.py) is the scaled copy of the output's gradient; after the call, it
is the zeros that the samples are copied into and that become `p.grad_sample`.
"""

from torch import nn

from opacus_memprof.hooks import modules, observers
from opacus_memprof.hooks.vocabulary import BACKPROP_COPIES, PER_SAMPLE_GRADIENTS
from opacus_memprof.recording import native
from opacus_memprof.recording.attachment import Attachment

# One tag for all parameters: a tag for each would cost a call into the interpreter for each.
_AFTER_SAMPLER = native.Tag(category=PER_SAMPLE_GRADIENTS, op=native.op_id("create_or_accumulate_grad_sample"))


def wrap_opacus_hooks(attachment: Attachment, root: nn.Module) -> None:
    """Wraps the hooks that Opacus has registered on the modules of a model."""
    hook_ids = {handle.id for module in root.modules() for handle in vars(module).get("autograd_grad_sample_hooks", ())}
    for name, module in modules.named_modules(root):
        _wrap_hooks(attachment, module, name, hook_ids)


def _wrap_hooks(attachment: Attachment, module: nn.Module, name: str, opacus_hooks: set[int]) -> None:
    module_id = native.module_id(name)
    forward, backward = module._forward_hooks, module._backward_hooks
    for key in opacus_hooks & forward.keys():
        attachment.replace_hook(
            forward, key, native.CaptureActivations(forward[key], module_id, observers.on_recapture)
        )
    before_sampler = native.Tag(category=BACKPROP_COPIES, module=module_id, op=native.op_id("capture_backprops_hook"))
    for key in opacus_hooks & backward.keys():
        attachment.replace_hook(
            backward, key, native.CaptureBackprops(backward[key], module_id, before_sampler, _AFTER_SAMPLER)
        )
