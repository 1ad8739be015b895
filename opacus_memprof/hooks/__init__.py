# SPDX-License-Identifier: Apache-2.0
"""Wraps Opacus' hooks, samplers, functions and optimizers, so that the core knows what each allocation is for.

Nothing that Opacus computes changes. A wrapper either pushes a tag for the duration of a call, or retags the blocks
that Opacus has just allocated. `Attachment.detach` undoes everything.
"""

import weakref
from collections.abc import Sequence
from typing import Any

from opacus.grad_sample import AbstractGradSampleHooks, GradSampleHooksNoOp
from opacus.optimizers import DPOptimizer
from torch import nn
from torch.optim import Optimizer

from opacus_memprof.hooks import (
    components,
    distributed,
    functions,
    ghost,
    inputs,
    modules,
    opacus_hooks,
    optimizer,
    privacy_engine,
    samplers,
    shapes,
    torch_compile,
)
from opacus_memprof.hooks.attachment import Attachment, SharedPatch
from opacus_memprof.recording import native

__all__ = [
    "Attachment",
    "attach_model",
    "attach_optimizer",
    "attach_privacy_engine_class",
    "attach_private",
    "is_attached",
]

_attached: "weakref.WeakKeyDictionary[Any, Attachment]" = weakref.WeakKeyDictionary()


def _patch_opacus(attachment: Attachment) -> None:
    functions.wrap_functions(attachment)
    ghost.wrap_ghost_backward(attachment)
    inputs.wrap_inputs(attachment)
    torch_compile.wrap_torch_compile(attachment)


def _patch_flash_clip(attachment: Attachment) -> None:
    from opacus_memprof.hooks import flash_clip  # imported only where flash_clip is used

    flash_clip.wrap_bookkeeping(attachment)


_opacus = SharedPatch(_patch_opacus)
_samplers = SharedPatch(samplers.wrap_samplers, repeat=True)  # a program may register samplers at any time
_flash_clip = SharedPatch(_patch_flash_clip)
_distributed = SharedPatch(distributed.wrap_distributed)


def attach_model(model: nn.Module | AbstractGradSampleHooks) -> Attachment:
    """Follows a model: what `make_private` returned, in any mode, or a plain module.

    Call it after `make_private`, before the forward pass. Attaching a model again undoes its earlier attachment.
    """
    root = model if isinstance(model, nn.Module) else model._module
    for module in root.modules():
        if module in _attached:
            _attached.pop(module).detach()
    attachment = Attachment()
    with attachment.detach_on_error():
        modules.assign_name_prefix(attachment, root)
        modules.tag_parameters_and_buffers(root)
        modules.follow_parameters(attachment, root)
        named = list(modules.named_modules(root))
        is_recorded = shapes.record_model(model, named)
        for name, component in components.components_of(named).items():
            native.set_component(native.module_id(name), component)
        hook_ids = {
            handle.id for module in root.modules() for handle in vars(module).get("autograd_grad_sample_hooks", ())
        }
        for name, module in named:
            opacus_hooks.wrap_opacus_hooks(attachment, module, name, hook_ids)
        scoped = modules.wrap_forwards(attachment, root)
        if is_recorded:
            shapes.watch_model(attachment, root, named, scoped)
        if isinstance(model, GradSampleHooksNoOp):
            optimizer.follow_no_op_model(attachment, model)
        _opacus.use(attachment)
        _samplers.use(attachment)
        _distributed.use(attachment)
        if hasattr(model, "bookkeeping"):
            _flash_clip.use(attachment)
        attachment.set_entry(_attached, root, attachment)
    return attachment


def attach_optimizer(optim: Optimizer) -> Attachment:
    """Follows an optimizer: any of Opacus' optimizers, or a plain one.

    Attach the model first, because that is what names the parameters' modules. Attaching an optimizer again, also in
    another Opacus wrapper, undoes its earlier attachment.
    """
    original = optim.original_optimizer if isinstance(optim, DPOptimizer) else optim
    if original in _attached:
        _attached.pop(original).detach()
    attachment = Attachment()
    with attachment.detach_on_error():
        optimizer.wrap_methods(attachment, optim)
        optimizer.register_step_hooks(attachment, original)
        shapes.record_optimizer(optim)
        attachment.set_entry(_attached, original, attachment)
    return attachment


def is_attached(target: nn.Module | Optimizer) -> bool:
    """Whether a model or an optimizer is followed, be it inside of what was attached."""
    if isinstance(target, Optimizer):
        return (target.original_optimizer if isinstance(target, DPOptimizer) else target) in _attached
    roots = [root for root in _attached if isinstance(root, nn.Module)]
    return any(target is module for root in roots for module in root.modules())


def attach_private(prepared: Sequence[Any]) -> Attachment:
    """Follows what `make_private` returned: (model, optimizer, data loader), or (model, optimizer, criterion, data
    loader) with ghost clipping."""
    attachment = Attachment()
    with attachment.detach_on_error():
        attachment.on_detach(attach_model(prepared[0]).detach)
        attachment.on_detach(attach_optimizer(prepared[1]).detach)
    return attachment


def attach_privacy_engine_class() -> Attachment:
    """Follows whatever any PrivacyEngine's `make_private` returns from now on, until this is detached."""
    attachment = Attachment()
    _distributed.use(attachment)  # before the script wraps its model in DDP or FSDP2
    privacy_engine.wrap_make_private(attachment, attach_private)
    return attachment
