# SPDX-License-Identifier: Apache-2.0
"""A model's modules, parameters and buffers: what they are called, and the hooks that say where its forward is."""

import copyreg
import inspect
import weakref
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from opacus.grad_sample import AbstractGradSampleModule
from torch import nn

from opacus_memprof import _native, tracing
from opacus_memprof.hooks import compiling, observe, shapes
from opacus_memprof.hooks.attach import Attachment
from opacus_memprof.hooks.distributed import DDP_WRAPPERS
from opacus_memprof.hooks.vocabulary import (
    BUFFERS,
    FORWARD,
    GRADIENTS,
    IDLE,
    MODEL_PARAMETERS,
    PER_SAMPLE_GRADIENTS,
)

# What stands around the user's model, and the attribute that it holds it in.
_WRAPPERS = ((AbstractGradSampleModule, "_module"), *DDP_WRAPPERS)

_prefixes: "weakref.WeakKeyDictionary[nn.Module, str]" = weakref.WeakKeyDictionary()  # of the attached models


def keep_names_apart(attachment: Attachment, root: nn.Module) -> None:
    """Where another attached model has a name of this one for another module, this one's are `Class#2.name`."""
    taken = dict(pair for other in list(_prefixes) for pair in named_modules(other))
    own = list(named_modules(root))
    kind = type([module for name, module in own if not name][-1]).__name__  # inside of what stands around it
    prefix, number = "", 1
    while any(name and taken.get(prefix + name, module) is not module for name, module in own):
        number += 1
        prefix = f"{kind}#{number}."
    attachment.keep_entry(_prefixes, root, prefix)


def named_modules(root: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The user's modules under their fully qualified names; "" is the model itself, `Class#2` a later one of those
    whose names are kept apart.

    Opacus' wrapper is no module of the user's and left out. Its attribute `_module`, and that of DDP, is no part of a
    name: DDP and the model inside have the same.
    """
    prefix = _prefixes.get(root, "")
    unwrapped: dict[str, str] = {}  # the path of what a wrapper holds → the wrapper's name
    for path, module in root.named_modules():
        name = path
        for inside, outer in reversed(unwrapped.items()):
            if f"{path}.".startswith(f"{inside}."):
                name = (outer + path[len(inside) :]).lstrip(".")
                break
        for kind, attribute in _WRAPPERS:
            if isinstance(module, kind):
                unwrapped[f"{path}.{attribute}".lstrip(".")] = name
        if not isinstance(module, AbstractGradSampleModule):
            yield (f"{prefix}{name}" if name else prefix[:-1]), module


class EnterModel:
    """The outermost module's forward pre-hook: a batch comes in."""

    __slots__ = ("_lost", "_sample", "before")

    def __init__(self) -> None:
        self.before = IDLE  # the phase that it interrupts
        self._lost = _native.gradient_hooks_lost()
        self._sample: tuple[weakref.ref[nn.Module], str] | None = None  # where a parameter is

    def __call__(self, root: nn.Module, args: Any, kwargs: Any = None) -> None:  # none if it was removed meanwhile
        if compiling.hooks_idle():
            return
        if self._moved(root):
            tag_residents(root)
        if (lost := _native.gradient_hooks_lost()) != self._lost:
            self._lost = lost
            follow_gradients(root)
        observe.forward_begins()
        self.before = _native.set_phase(FORWARD)
        samples, elements = _native.tag_inputs((args, kwargs))
        if samples >= 0:
            shapes.batch_comes(samples, elements)

    def _moved(self, root: nn.Module) -> bool:
        """Whether the parameters lie elsewhere than when they were last seen, as after `model.to(...)`: one speaks for
        all. It must be asked for anew, for torch does not swap parameters that somebody holds, if only weakly."""
        if self._sample is None:
            for module in root.modules():
                for key, parameter in module._parameters.items():
                    if parameter is not None:
                        self._sample = weakref.ref(module), key
                        return True
            return False
        reference, key = self._sample
        holder = reference()
        parameter = None if holder is None else holder._parameters.get(key)
        if parameter is None:
            self._sample = None
            return self._moved(root)
        return bool(_native.retag(parameter, MODEL_PARAMETERS))


class LeaveModel:
    """The outermost module's forward hook. Autograd has saved what it will: who holds each captured activation?"""

    __slots__ = ("_enter",)

    def __init__(self, enter: EnterModel) -> None:
        self._enter = enter

    def __call__(self, root: nn.Module, args: Any, output: Any) -> None:
        if compiling.hooks_idle():
            return
        _native.settle_all((output,))
        shapes.forward_ends()
        if not torch.is_grad_enabled():  # no backward will end the phase
            _native.set_phase(self._enter.before)


def owned_parameters(root: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """The parameters, each once, with the name of its owner: the first module that has it, but of modules inside one
    another the innermost, where it is used (DPLSTM shows its cells' parameters as its own too)."""
    found: dict[int, tuple[str, nn.Parameter]] = {}
    for name, module in named_modules(root):
        for parameter in module._parameters.values():
            if parameter is None:
                continue
            owner, _ = found.setdefault(id(parameter), (name, parameter))
            if f"{name}.".startswith(f"{owner}." if owner else ""):
                found[id(parameter)] = name, parameter
    yield from found.values()


def tag_residents(root: nn.Module) -> None:
    """Parameters, buffers and whatever the parameters hold already."""
    for name, parameter in owned_parameters(root):
        module_id = _native.module_id(name)
        _native.retag(parameter, MODEL_PARAMETERS, module_id)
        if parameter.grad is not None:
            _native.retag(parameter.grad, GRADIENTS, module_id)
        _native.retag((getattr(parameter, "grad_sample", None),), PER_SAMPLE_GRADIENTS, module_id)
    for name, module in named_modules(root):
        buffers = [buffer for buffer in module._buffers.values() if buffer is not None]
        _native.retag(buffers, BUFFERS, _native.module_id(name))


def hook_parameters(attachment: Attachment, root: nn.Module) -> None:
    """Makes the parameters' owners known, and follows their gradients."""
    follow_gradients(root)
    attachment.on_detach(partial(_unfollow_gradients, weakref.ref(root)))
    keys: list[int] = []
    attachment.on_detach(partial(_forget_owners, keys))
    for name, parameter in owned_parameters(root):
        _native.set_owner(parameter, _native.module_id(name))
        keys.append(id(parameter))


def _forget_owners(keys: list[int]) -> None:
    for key in keys:
        _native.forget_owner(key)


def follow_gradients(root: nn.Module) -> None:
    for name, parameter in owned_parameters(root):
        _native.follow_gradient(parameter, _native.module_id(name))


def _unfollow_gradients(reference: "weakref.ref[nn.Module]") -> None:
    root = reference()
    for parameter in () if root is None else root.parameters():
        _native.unfollow_gradient(parameter)


def hook_modules(attachment: Attachment, root: nn.Module) -> None:
    """Every module of the user's says when its forward begins and ends, also when it raises.

    Not inside what torch compiles, nor under nn.DataParallel, whose replicas share their originals' attributes.
    """
    skipped: set[nn.Module] = set()
    scoped: list[tuple[str, nn.Module]] = []
    for name, module in named_modules(root):
        if module in skipped or compiling.compiled(module) or isinstance(module, nn.DataParallel):
            skipped.update(module.children())
        else:
            scoped.append((name, module))
            _scope_forward(attachment, module, _native.module_id(name))
    shapes.watch(attachment, scoped)
    enter = EnterModel()
    leave = LeaveModel(enter)
    compiling.follow(attachment, root, (enter, leave))
    if not tracing.is_result(root):
        attachment.on_detach(root.register_forward_pre_hook(enter, prepend=True, with_kwargs=True).remove)
        attachment.on_detach(root.register_forward_hook(leave).remove)


def _scope_forward(attachment: Attachment, module: nn.Module, module_id: int) -> None:
    """Stands in for `module.forward`, which costs a fraction of what a pair of forward hooks would."""
    reference = weakref.ref(module)
    before = module.__dict__.get("forward")
    if before is not None:  # somebody patched the instance
        scoped = _native.ScopedForward(before, reference, module_id, False)
    else:
        method = inspect.getattr_static(type(module), "forward")
        if method is nn.Module.forward or not inspect.isfunction(method):
            return  # a container without one, or torch.jit's
        scoped = _native.ScopedForward(method, reference, module_id, True)
    module.__dict__["forward"] = scoped
    attachment.on_detach(partial(_unscope, reference))


def _unscope(reference: "weakref.ref[nn.Module]") -> None:
    if (module := reference()) is not None:
        tracing.unscope(module)


for _hook in (EnterModel, LeaveModel):
    copyreg.pickle(_hook, tracing.reduce_to_nothing)
