# SPDX-License-Identifier: Apache-2.0
"""Names a model's modules, tags its parameters and buffers, and hooks its forward passes."""

import copyreg
import inspect
import weakref
from collections.abc import Collection, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from opacus_memprof.hooks import forward_shapes, observers, torch_compile
from opacus_memprof.hooks.distributed import DDP_WRAPPERS
from opacus_memprof.hooks.vocabulary import (
    BUFFERS,
    FORWARD,
    GRADIENTS,
    IDLE,
    MODEL_PARAMETERS,
    PER_SAMPLE_GRADIENTS,
    AbstractGradSampleModule,
)
from opacus_memprof.recording import native, observations
from opacus_memprof.recording.attachment import Attachment, is_compile_result, reduce_to_noop, remove_scoped_forward
from opacus_memprof.recording.faults import contain

# The classes that wrap the user's model, and the attribute with the model. torch.compile's class is not among them: its
# import takes seconds.
_WRAPPERS = (
    (AbstractGradSampleModule, "_module"),
    *DDP_WRAPPERS,
    (nn.DataParallel, "module"),
    (AveragedModel, "module"),
)
_COMPILED = "_orig_mod"

_prefixes: "weakref.WeakKeyDictionary[nn.Module, str]" = weakref.WeakKeyDictionary()  # by attached model


def assign_name_prefix(attachment: Attachment, root: nn.Module, omitted: Collection[nn.Module] = ()) -> None:
    """Prefixes a model's module names by `Class#2.` if another attached model uses one for a different module.

    Args:
        attachment: of the prefix.
        root: the model.
        omitted: its modules whose names are not needed.
    """
    used: dict[str, set[nn.Module]] = {}  # a wrapper and the model inside have the same name
    for other in list(_prefixes):
        if other is not root:  # which may have a prefix already, by a search for owners
            for name, module in named_modules(other):
                used.setdefault(name, set()).add(module)
    named = [(name, module) for name, module in _names(root) if module not in omitted]
    outermost = [module for name, module in _names(root) if not name]
    class_name = type(outermost[-1]).__name__  # without DDP around it
    prefix, number = "", 1
    while any(name and module not in used.get(prefix + name, {module}) for name, module in named):
        number += 1
        prefix = f"{class_name}#{number}."
    attachment.set_entry(_prefixes, root, prefix)
    observations.record("model_named", native.module_id(prefix[:-1]), 0, step=native.step()[0])


def named_modules(root: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yields the user's modules with their fully qualified names.

    The model itself is "", or `Class#2` if it has a prefix (`assign_name_prefix`). Opacus' wrapper is omitted, because
    it is not one of the user's modules. The wrappers' attributes, such as DDP's `module` and `_orig_mod` of a compiled
    module, do not appear in names: DDP and the model inside have the same name.
    """
    prefix = _prefixes.get(root, "")
    for name, module in _names(root):
        yield (f"{prefix}{name}" if name else prefix[:-1]), module


def _names(root: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yields what `named_modules` yields, without a prefix."""
    unwrapped: dict[str, str] = {}  # the path of a wrapped model → the wrapper's name
    for path, module in root.named_modules():
        name = path
        for inside, outer in reversed(unwrapped.items()):
            if f"{path}.".startswith(f"{inside}."):
                name = (outer + path[len(inside) :]).lstrip(".")
                break
        for kind, attribute in _WRAPPERS:
            if isinstance(module, kind):
                unwrapped[f"{path}.{attribute}".lstrip(".")] = name
        if _COMPILED in module._modules:
            unwrapped[f"{path}.{_COMPILED}".lstrip(".")] = name
        if not isinstance(module, AbstractGradSampleModule):
            yield name, module


def user_model(root: nn.Module) -> nn.Module:
    """Returns the model inside of Opacus' wrapper: a program may drop the wrapper and call the model itself."""
    return root._module if isinstance(root, AbstractGradSampleModule) else root


class ModelForwardPreHook:
    """The outermost module's forward pre-hook: sets the phase and tags the inputs.

    Args:
        wrapper: the hook of Opacus' wrapper, if this is the hook of the module inside. A program may call that itself:
            Lightning does, for it has no other model than its own. It does nothing while the wrapper calls the module.
    """

    __slots__ = ("_first_parameter", "_hooks_lost", "_is_running", "_wrapper", "previous_phase")

    def __init__(self, wrapper: "ModelForwardPreHook | None" = None) -> None:
        self.previous_phase = IDLE
        self._is_running = False
        self._wrapper = wrapper
        self._hooks_lost = native.gradient_hooks_lost()
        self._first_parameter: tuple[weakref.ref[nn.Module], str] | None = None  # its module, and its name there

    @property
    def is_called_by_wrapper(self) -> bool:
        return self._wrapper is not None and self._wrapper._is_running

    def end(self) -> None:
        """Ends the forward pass."""
        self._is_running = False

    # torch passes no kwargs if the hook was removed during this call.
    @contain("following the beginning of a forward pass")
    def __call__(self, root: nn.Module, args: Any, kwargs: Any = None) -> None:
        if torch_compile.hooks_suspended() or self.is_called_by_wrapper:
            return
        self._is_running = True
        if self._parameters_moved(root):
            tag_parameters_and_buffers(root)
        if (lost := native.gradient_hooks_lost()) != self._hooks_lost:
            self._hooks_lost = lost
            follow_gradients(root)
        captures_outstanding = observers.on_forward_begin()
        self.previous_phase = native.set_phase(FORWARD)
        forward_shapes.observe_transforms(root)
        samples, elements = native.tag_inputs((args, kwargs))
        if samples < 0:  # a batch whose gradient is asked for, as of adversarial examples
            leaves = [each for each in native.tensors_in((args, kwargs)) if each.is_leaf and each.dim()]
            samples = leaves[0].shape[0] if leaves else samples
            elements = sum(each.numel() for each in leaves)
        if samples >= 0:
            forward_shapes.on_batch(user_model(root), samples, elements, (args, kwargs or {}), captures_outstanding)

    def _parameters_moved(self, root: nn.Module) -> bool:
        """Returns whether the first parameter's block has changed since the last forward, as after `model.to(...)`.

        The other parameters are assumed to have moved with it. The parameter is looked up by name every time, because
        even a weak reference to it would keep torch from swapping it.
        """
        if self._first_parameter is None:
            for module in root.modules():
                for key, parameter in module._parameters.items():
                    if parameter is not None:
                        self._first_parameter = weakref.ref(module), key
                        return True
            return False
        reference, key = self._first_parameter
        holder = reference()
        parameter = None if holder is None else holder._parameters.get(key)
        if parameter is None:
            self._first_parameter = None
            return self._parameters_moved(root)
        return bool(native.retag(parameter, MODEL_PARAMETERS))


class ModelForwardHook:
    """The outermost module's forward hook, which settles captured activations.

    Autograd has saved its tensors by now: either only Opacus holds a captured activation, or autograd does too.
    """

    __slots__ = ("_pre_hook",)

    def __init__(self, pre_hook: ModelForwardPreHook) -> None:
        self._pre_hook = pre_hook

    @contain("following the end of a forward pass")
    def __call__(self, root: nn.Module, args: Any, output: Any) -> None:
        if torch_compile.hooks_suspended() or self._pre_hook.is_called_by_wrapper:
            return
        self._pre_hook.end()
        native.settle_all((output,))
        forward_shapes.on_output(user_model(root), output)
        if not torch.is_grad_enabled():  # no backward pass will end the phase
            native.set_phase(self._pre_hook.previous_phase)


def owned_parameters(root: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yields each parameter once, with the name of the module that owns it.

    The owner is the first module that has the parameter. If nested modules have it, it is the innermost, which uses it
    (DPLSTM registers its cells' parameters as its own too).
    """
    found: dict[int, tuple[str, nn.Parameter]] = {}
    for name, module in named_modules(root):
        for parameter in module._parameters.values():
            if parameter is None:
                continue
            owner, _ = found.setdefault(id(parameter), (name, parameter))
            if f"{name}.".startswith(f"{owner}." if owner else ""):
                found[id(parameter)] = name, parameter
    yield from found.values()


def tag_parameters_and_buffers(root: nn.Module) -> None:
    """Tags parameters, buffers, and existing gradients and per-sample gradients."""
    for name, parameter in owned_parameters(root):
        module_id = native.module_id(name)
        native.retag(parameter, MODEL_PARAMETERS, module_id)
        if parameter.grad is not None:
            native.retag(parameter.grad, GRADIENTS, module_id)
        native.retag((getattr(parameter, "grad_sample", None),), PER_SAMPLE_GRADIENTS, module_id)
    for name, module in named_modules(root):
        buffers = [buffer for buffer in module._buffers.values() if buffer is not None]
        native.retag(buffers, BUFFERS, native.module_id(name))


def follow_parameters(attachment: Attachment, root: nn.Module) -> None:
    """Records which module owns each parameter, and follows the parameters' gradients."""
    attachment.on_detach(partial(_unfollow_gradients, weakref.ref(root)))
    follow_gradients(root)
    keys: list[int] = []
    attachment.on_detach(partial(_remove_owners, keys))
    for name, parameter in owned_parameters(root):
        keys.append(id(parameter))
        native.set_owner(parameter, native.module_id(name))


def _remove_owners(keys: list[int]) -> None:
    for key in keys:
        native.remove_owner(key)


def follow_gradients(root: nn.Module) -> None:
    """Makes the core retag each gradient whenever autograd has accumulated into it."""
    for name, parameter in owned_parameters(root):
        native.follow_gradient(parameter, native.module_id(name))


def _unfollow_gradients(reference: "weakref.ref[nn.Module]") -> None:
    root = reference()
    for parameter in () if root is None else root.parameters():
        native.unfollow_gradient(parameter)


def wrap_forwards(attachment: Attachment, root: nn.Module) -> set[nn.Module]:
    """Wraps the forward of each of the user's modules in a tag, and hooks the outermost module.

    Two kinds are omitted: modules inside compiled ones, and modules under nn.DataParallel, whose replicas share the
    attributes of the original modules.

    Returns:
        The wrapped modules.
    """
    skipped: set[nn.Module] = set()
    scoped: set[nn.Module] = set()
    for name, module in named_modules(root):
        if module in skipped or torch_compile.is_compiled(module) or isinstance(module, nn.DataParallel):
            skipped.update(module.children())
        else:
            scoped.add(module)
            _wrap_forward(attachment, module, native.module_id(name))
    pre_hook = ModelForwardPreHook()
    hook = ModelForwardHook(pre_hook)
    torch_compile.follow(attachment, root, (pre_hook, hook))
    if not is_compile_result(root):
        _hook_calls(attachment, root, pre_hook, hook)
        inside = user_model(root)
        # flash_clip repeats the forward of the module inside, and is not asked to clip where a program calls that.
        if inside is not root and not hasattr(root, "bookkeeping") and not is_compile_result(inside):
            pre_hook = ModelForwardPreHook(pre_hook)
            _hook_calls(attachment, inside, pre_hook, ModelForwardHook(pre_hook))
    return scoped


def _hook_calls(
    attachment: Attachment, module: nn.Module, pre_hook: ModelForwardPreHook, hook: "ModelForwardHook"
) -> None:
    attachment.on_detach(module.register_forward_pre_hook(pre_hook, prepend=True, with_kwargs=True).remove)
    attachment.on_detach(module.register_forward_hook(hook).remove)


def _wrap_forward(attachment: Attachment, module: nn.Module, module_id: int) -> None:
    """Replaces `module.forward` by a wrapper, which costs a fraction of a pair of forward hooks."""
    reference = weakref.ref(module)
    patched = module.__dict__.get("forward")
    if patched is not None:  # the program has patched this instance
        scoped = native.ScopedForward(patched, reference, module_id, False)
    else:
        method = inspect.getattr_static(type(module), "forward")
        if method is nn.Module.forward or not inspect.isfunction(method):
            return  # a container without a forward, or a module of torch.jit
        scoped = native.ScopedForward(method, reference, module_id, True)
    attachment.on_detach(partial(_unwrap_forward, reference))
    module.__dict__["forward"] = scoped


def _unwrap_forward(reference: "weakref.ref[nn.Module]") -> None:
    if (module := reference()) is not None:
        remove_scoped_forward(module)


for _hook in (ModelForwardPreHook, ModelForwardHook):
    copyreg.pickle(_hook, reduce_to_noop)
