# SPDX-License-Identifier: Apache-2.0
"""Tells the core what Opacus is doing: wraps its hooks, samplers, functions and optimizers, and undoes that again.

Nothing that Opacus computes changes. A wrapper pushes a tag for the length of a call, or gives blocks that Opacus has
just made their category.
"""

import weakref
from collections.abc import Sequence
from typing import Any

from opacus.grad_sample import AbstractGradSampleHooks, GradSampleHooksNoOp
from opacus.optimizers import DPOptimizer
from torch import nn
from torch.optim import Optimizer

from opacus_memprof.hooks import (
    capture,
    compiling,
    distributed,
    functions,
    ghost,
    inputs,
    modules,
    optimizer,
    privacy_engine,
    samplers,
    shapes,
)
from opacus_memprof.hooks.attach import Attachment, Shared

__all__ = ["Attachment", "attach_model", "attach_optimizer", "attach_privacy_engine_class", "attach_private"]

_attached: "weakref.WeakKeyDictionary[Any, Attachment]" = weakref.WeakKeyDictionary()


def _patch_opacus(attachment: Attachment) -> None:
    functions.wrap_functions(attachment)
    ghost.wrap_two_passes(attachment)
    inputs.follow_batches(attachment)
    compiling.follow_compile(attachment)


def _patch_flash_clip(attachment: Attachment) -> None:
    from opacus_memprof.hooks import flash_clip  # only who uses it pays for its import

    flash_clip.follow_book(attachment)


_opacus = Shared(_patch_opacus)
_samplers = Shared(samplers.wrap_samplers, repeat=True)  # a program may register its own at any time
_flash_clip = Shared(_patch_flash_clip)
_distributed = Shared(distributed.wrap_distributed)


def attach_model(model: nn.Module | AbstractGradSampleHooks) -> Attachment:
    """Follows a model: what `make_private` returned, in any mode, or a plain module.

    Attach after `make_private`, before the forward pass. Attaching again starts anew: the earlier attachment is undone.
    """
    root = model if isinstance(model, nn.Module) else model._module
    for module in root.modules():
        if module in _attached:
            _attached.pop(module).detach()
    attachment = Attachment()
    with attachment.undone_on_error():
        modules.keep_names_apart(attachment, root)
        modules.tag_residents(root)
        modules.hook_parameters(attachment, root)
        shapes.model_attached(model, list(modules.named_modules(root)))
        opacus_hooks = {
            handle.id for module in root.modules() for handle in vars(module).get("autograd_grad_sample_hooks", ())
        }
        for name, module in modules.named_modules(root):
            capture.wrap_opacus_hooks(attachment, module, name, opacus_hooks)
        modules.hook_modules(attachment, root)
        if isinstance(model, GradSampleHooksNoOp):
            optimizer.sampled_by_hand.add(model)
            attachment.on_detach(optimizer.sampled_by_hand.clear)
        _opacus.use(attachment)
        _samplers.use(attachment)
        _distributed.use(attachment)
        if hasattr(model, "book"):
            _flash_clip.use(attachment)
    _attached[root] = attachment
    return attachment


def attach_optimizer(optim: Optimizer) -> Attachment:
    """Follows an optimizer: Opacus' of any kind, or a plain one. Attach the model first: it names the parameters'
    modules. Attaching again, also of another wrapper of the same optimizer, undoes the earlier attachment."""
    original = optim.original_optimizer if isinstance(optim, DPOptimizer) else optim
    if original in _attached:
        _attached.pop(original).detach()
    attachment = Attachment()
    with attachment.undone_on_error():
        optimizer.stand_in_for_methods(attachment, optim)
        optimizer.hook_steps(attachment, original)
        shapes.optimizer_attached(optim)
    _attached[original] = attachment
    return attachment


def attach_private(prepared: Sequence[Any]) -> Attachment:
    """Follows what `make_private` returned: model, optimizer, with ghost clipping the criterion, data loader."""
    attachment = Attachment()
    with attachment.undone_on_error():
        attachment.on_detach(attach_model(prepared[0]).detach)
        attachment.on_detach(attach_optimizer(prepared[1]).detach)
    return attachment


def attach_privacy_engine_class() -> Attachment:
    """From now on, whatever any PrivacyEngine's `make_private` returns is followed, until this is detached."""
    attachment = Attachment()
    _distributed.use(attachment)  # from before the script wraps its model
    privacy_engine.wrap_make_private(attachment, attach_private)
    return attachment
