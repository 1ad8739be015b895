# SPDX-License-Identifier: Apache-2.0
"""Wraps Opacus' hooks, samplers, functions and optimizers, so that the core knows what each allocation is for.

Opacus' results do not change. A wrapper either pushes a tag for the duration of a call, or retags the blocks that
Opacus has just allocated. `Attachment.detach` undoes everything. Changes are independent: one that does not fit the
installed Opacus or torch is skipped, with a sentence in the profile, and the others are made.
"""

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import nn
from torch.nn.modules.loss import _Loss
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from opacus_memprof.errors import MemprofError
from opacus_memprof.hooks import (
    components,
    diagnosis,
    distributed,
    forward_shapes,
    inputs,
    modules,
    opacus_hooks,
    optimizer,
    owners,
    shapes,
    torch_compile,
)
from opacus_memprof.hooks.vocabulary import (
    AbstractGradSampleHooks,
    DPLossFastGradientClipping,
    DPOptimizer,
    GradSampleHooksNoOp,
    PrivacyEngine,
    is_imported,
)
from opacus_memprof.recording import native
from opacus_memprof.recording.attachment import Attachment, SharedPatch

_attached: "weakref.WeakKeyDictionary[Any, Attachment]" = weakref.WeakKeyDictionary()


def _roots() -> list[nn.Module]:
    return [target for target in list(_attached) if isinstance(target, nn.Module)]


def _patch_opacus(attachment: Attachment) -> None:
    opacus_hooks.wrap_functions(attachment)
    opacus_hooks.observe_ghost_backward(attachment)
    inputs.wrap_dp_loss(attachment)


def _patch_torch(attachment: Attachment) -> None:
    inputs.wrap_inputs(attachment)
    torch_compile.wrap_torch_compile(attachment)
    diagnosis.watch_updates(attachment, partial(_follow_once, attachment))


def _follow_once(attachment: Attachment, optim: Optimizer) -> None:
    if optim not in _attached:
        follow_optimizer(attachment, optim)


def _patch_flash_clip(attachment: Attachment) -> None:
    from opacus_memprof.hooks import flash_clip  # imported only where flash_clip is used

    flash_clip.observe_bookkeeping(attachment)


_torch = SharedPatch(_patch_torch)
_opacus = SharedPatch(_patch_opacus)
_samplers = SharedPatch(opacus_hooks.wrap_samplers, repeat=True)  # a program may register samplers at any time
_flash_clip = SharedPatch(_patch_flash_clip)
_distributed = SharedPatch(distributed.wrap_distributed)
_owner_search = owners.OwnerSearch(_roots)
_owners = SharedPatch(_owner_search.watch)


def follow_model(attachment: Attachment, model: nn.Module | AbstractGradSampleHooks) -> None:
    """Follows a model until `attachment` is detached. It is a plain module, or one that `make_private` has returned.

    Call it after `make_private`, before the forward pass. Following a model again undoes its earlier attachment.
    """
    root = model if isinstance(model, nn.Module) else model._module
    for module in root.modules():
        if module in _attached:
            _attached.pop(module).detach()
    attachment.set_entry(_attached, root, attachment)

    def assign_components(_: Attachment) -> None:
        for name, component in components.components_of(list(modules.named_modules(root))).items():
            native.set_component(native.module_id(name), component)

    recorded: list[bool] = []
    scoped: set[nn.Module] = set()
    parts: dict[str, Callable[[Attachment], object]] = {
        "the model's module names": lambda unit: modules.assign_name_prefix(unit, root),
        "the model's parameters and buffers": lambda unit: modules.tag_parameters_and_buffers(root),
        "the model's gradients": lambda unit: modules.follow_parameters(unit, root),
        "the model's layer shapes": lambda unit: recorded.append(
            shapes.record_model(model, list(modules.named_modules(root)))
        ),
        "the model's components": assign_components,
        "Opacus' hooks of the model": lambda unit: opacus_hooks.wrap_opacus_hooks(unit, root),
        "the model's forward passes": lambda unit: scoped.update(modules.wrap_forwards(unit, root)),
        "torch's functions": _torch.use,
        "DDP and FSDP2": _distributed.use,
        "owners that are not attached": _owners.use,
    }
    if is_imported():
        parts |= {"Opacus' functions": _opacus.use, "Opacus' grad samplers": _samplers.use}
    if isinstance(model, GradSampleHooksNoOp):
        parts["per-sample gradients of the mode no_op"] = lambda unit: optimizer.follow_no_op_model(unit, model)
    if hasattr(model, "bookkeeping"):
        parts["flash_clip"] = _flash_clip.use
    for name, change in parts.items():
        attachment.apply(name, change)
    if any(recorded):
        named = list(modules.named_modules(root))
        attachment.apply(
            "the shapes of forward passes",
            lambda unit: forward_shapes.watch_model(unit, modules.user_model(root), named, scoped),
        )
    search_owners()


def follow_optimizer(attachment: Attachment, optim: Optimizer) -> None:
    """Follows an optimizer until `attachment` is detached: one of Opacus' optimizers, or a plain one.

    Follow the model first, because following it names the parameters' modules. Following an optimizer again, even in
    another Opacus wrapper, undoes its earlier attachment.
    """
    original = optim.original_optimizer if isinstance(optim, DPOptimizer) else optim
    if original in _attached:
        _attached.pop(original).detach()
    attachment.set_entry(_attached, original, attachment)
    attachment.apply("the optimizer's methods", lambda unit: optimizer.wrap_methods(unit, optim))
    attachment.apply("the optimizer's update", lambda unit: optimizer.register_step_hooks(unit, original))
    attachment.apply("the optimizer's states", lambda unit: shapes.record_optimizer(optim))
    attachment.apply("owners that are not attached", _owners.use)
    if isinstance(optim, DPOptimizer):
        attachment.apply("whether updates are private", lambda unit: diagnosis.follow_private(unit, optim, _roots()))
    search_owners()


def search_owners() -> None:
    """Finds owners of unattributed blocks among modules and optimizers that are not attached, if there are many."""
    _owner_search.search()


def follow_prepared(attachment: Attachment, prepared: Sequence[Any]) -> None:
    """Follows the result of `make_private` until `attachment` is detached.

    The result is (model, optimizer, data loader), or (model, optimizer, criterion, data loader) with ghost clipping.
    """
    attachment.apply("the model", lambda unit: follow_model(unit, prepared[0]))
    attachment.apply("the optimizer", lambda unit: follow_optimizer(unit, prepared[1]))


def follow_privacy_engines(attachment: Attachment) -> None:
    """Follows the results of every PrivacyEngine's `make_private`, until `attachment` is detached."""
    attachment.apply("DDP and FSDP2", _distributed.use)  # before the program wraps its model in one of them
    opacus_hooks.observe_make_private(attachment, follow_prepared)


def attach_model(model: nn.Module | AbstractGradSampleHooks) -> Attachment:
    """Follows a model until the returned Attachment is detached; see `follow_model`."""
    attachment = Attachment("the model")
    follow_model(attachment, model)
    return attachment


def attach_optimizer(optim: Optimizer) -> Attachment:
    """Follows an optimizer until the returned Attachment is detached; see `follow_optimizer`."""
    attachment = Attachment("the optimizer")
    follow_optimizer(attachment, optim)
    return attachment


def attach_private(prepared: Sequence[Any]) -> Attachment:
    """Follows the result of `make_private` until the returned Attachment is detached; see `follow_prepared`."""
    attachment = Attachment("what make_private has returned")
    follow_prepared(attachment, prepared)
    return attachment


def attach_privacy_engine_class() -> Attachment:
    """Follows every PrivacyEngine until the returned Attachment is detached; see `follow_privacy_engines`."""
    attachment = Attachment("PrivacyEngine.make_private")
    follow_privacy_engines(attachment)
    return attachment


def is_attached(target: nn.Module | Optimizer) -> bool:
    """Returns whether a model or an optimizer is followed, by itself or as part of an attached model."""
    if isinstance(target, Optimizer):
        return (target.original_optimizer if isinstance(target, DPOptimizer) else target) in _attached
    return any(target is module for root in _roots() for module in root.modules())


def is_privacy_engine(target: Any) -> bool:
    """Returns whether `target` is Opacus' PrivacyEngine: the class, a subclass, or an instance."""
    return isinstance(target, PrivacyEngine) or (isinstance(target, type) and issubclass(target, PrivacyEngine))


def change_for(target: Any) -> Callable[[Attachment], None]:
    """Returns the change that follows `target`: a PrivacyEngine (which means all engines), a model or an optimizer.

    A criterion or a data loader needs no change.

    Raises:
        MemprofError: `target` is of another type.
    """
    if isinstance(target, (DataLoader, DPLossFastGradientClipping, _Loss)):
        return lambda attachment: None
    if is_privacy_engine(target):
        return follow_privacy_engines
    if isinstance(target, Optimizer):
        return lambda attachment: follow_optimizer(attachment, target)
    if isinstance(target, (nn.Module, AbstractGradSampleHooks)):
        return lambda attachment: follow_model(attachment, target)
    raise MemprofError(f"cannot attach a {type(target).__name__}: pass a PrivacyEngine, a model or an optimizer")
