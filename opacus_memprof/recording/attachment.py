# SPDX-License-Identifier: Apache-2.0
"""Attachment: the changes that the profiler has made to a program, and how each is undone.

Nothing here holds a strong reference to a model, an optimizer or a tensor. The profiler must not keep objects alive
that the program drops. Hooks are also removed from modules that torch.compile and torch.jit.script trace.
"""

import contextlib
import importlib
import inspect
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, MutableMapping
from functools import partial, reduce
from types import ModuleType
from typing import Any

import torch
from torch import nn

from opacus_memprof.errors import MemprofError
from opacus_memprof.recording import faults, native
from opacus_memprof.recording.faults import CallHook, observe
from opacus_memprof.versions import installed_version

Wrapper = native.CaptureActivations | native.CaptureBackprops
_HOOKS = ("_forward_pre_hooks", "_forward_hooks")


class Attachment:
    """The changes that one call of `attach` made; `detach` undoes them. Dropping the object does not undo them.

    Args:
        name: the changed object, for the sentence about a change that could not be undone.
    """

    def __init__(self, name: str = "a change") -> None:
        self._name = name
        self._undo: list[Callable[[], object]] = []

    def on_detach(self, undo: Callable[[], object]) -> None:
        """Registers `undo` to be called by `detach`, in reverse order.

        It must have only weak references to the changed objects. It is registered before the change is made, so it must
        do nothing if the change was not made.
        """
        self._undo.append(undo)

    def detach(self) -> None:
        """Restores everything that was changed. A second call does nothing. Never raises.

        An undo that fails is tried once more after all others; if it fails again, the profile has a sentence on it.
        """
        failed = []
        while self._undo:
            undo = self._undo.pop()
            try:
                undo()
            except Exception:
                failed.append(undo)
        for undo in failed:
            with faults.contain(f"undoing {self._name}"):
                undo()

    def apply(self, name: str, change: "Callable[[Attachment], object]") -> None:
        """Makes one change, completely or not at all.

        Args:
            name: a name of the change. If it fails, for example because Opacus or torch lacks the changed object, the
                profile has a sentence with this name, and other changes are still made.
            change: makes the change, and registers with its argument how it is undone.

        Raises:
            MemprofError: the change has raised it.
        """
        unit = Attachment(name)
        self.on_detach(unit.detach)
        try:
            change(unit)
        except BaseException as error:
            unit.detach()
            if isinstance(error, MemprofError) or not isinstance(error, Exception):
                raise
            faults.record(
                f"{name} could not be followed ({faults.describe(error)}; Opacus {installed_version('opacus')}, torch "
                f"{torch.__version__}): what depends on it may be unattributed"
            )

    def observe(self, path: str, observation: Callable[..., faults.CallHook]) -> None:
        """Observes the function at `path`, "package.module:Class.method", as one change."""
        self.apply(path, lambda unit: unit.wrap(path, lambda function: faults.observe(function, observation)))

    def wrap(self, path: str, wrap: Callable[[Any], Any]) -> None:
        """Replaces the function at `path`, "package.module:Class.method", by `wrap(function)`.

        Raises:
            ImportError, AttributeError, KeyError: the function does not exist, or its class inherits it.
        """
        module, _, attributes = path.partition(":")
        *owners, name = attributes.split(".")
        owner = reduce(getattr, owners, importlib.import_module(module))
        self.replace_attribute(owner, name, wrap(vars(owner)[name]))

    def set_entry(self, entries: "weakref.WeakKeyDictionary[Any, Any]", key: Any, value: Any) -> None:
        """Sets `entries[key]` until detach, or until the key is garbage-collected."""
        self.on_detach(partial(_remove_entry, entries, weakref.ref(key)))
        entries[key] = value

    def replace_attribute(self, owner: type | ModuleType, name: str, value: Any) -> None:
        """Replaces an attribute of a class or a Python module, both of which outlive every attachment."""
        original = vars(owner)[name]

        def restore() -> None:
            if vars(owner).get(name) is value:  # otherwise another patch has wrapped ours and still calls it
                setattr(owner, name, original)

        self.on_detach(restore)
        setattr(owner, name, value)

    def replace_item(self, registry: dict[Any, Any], key: Any, value: Any) -> None:
        """Replaces an item of a class-level registry, keeping the order of its keys."""
        original = registry[key]

        def restore() -> None:
            if registry.get(key) is value:
                registry[key] = original

        self.on_detach(restore)
        registry[key] = value

    def replace_hook(self, hooks: MutableMapping[int, Any], key: int, wrapper: Wrapper) -> None:
        """Replaces one hook of an `nn.Module` by the wrapper around it."""
        self.on_detach(partial(_restore_hook, weakref.ref(hooks), key, type(wrapper)))
        hooks[key] = wrapper


def _remove_entry(entries: "weakref.WeakKeyDictionary[Any, Any]", reference: "weakref.ref[Any]") -> None:
    if (key := reference()) is not None:
        entries.pop(key, None)


def _restore_hook(reference: "weakref.ref[MutableMapping[int, Any]]", key: int, kind: type[Wrapper]) -> None:
    hooks = reference()
    if hooks is not None and type(hooks.get(key)) is kind:
        hooks[key] = hooks[key].__wrapped__


class SharedPatch:
    """A patch of Opacus or torch itself, shared by all attachments that need it.

    Args:
        patch: makes the changes; called for the first attachment. They are undone after the last one is detached.
        repeat: call `patch` for every attachment, because there may be more to patch later.
    """

    def __init__(self, patch: Callable[[Attachment], None], *, repeat: bool = False) -> None:
        self._patch = patch
        self._repeat = repeat
        self._users = 0
        self._attachment = Attachment("a patch of Opacus or torch")

    def use(self, attachment: Attachment) -> None:
        """Keeps the patch in place until `attachment` is detached."""
        self._users += 1
        attachment.on_detach(self._release)
        if self._users == 1 or self._repeat:
            self._patch(self._attachment)

    def _release(self) -> None:
        self._users -= 1
        if self._users == 0:
            self._attachment.detach()


def is_compile_result(module: nn.Module) -> bool:
    """Returns whether `module` is the result of `torch.compile(other_module)`."""
    return "_orig_mod" in module._modules


def looks_compiled(module: nn.Module) -> bool:
    """Returns whether `module` is compiled, as far as its own attributes show."""
    return (
        is_compile_result(module)
        or module._compiled_call_impl is not None
        or hasattr(module.__dict__.get("forward"), "_torchdynamo_orig_callable")
    )


def reachable_modules(target: Any) -> list[nn.Module]:
    """Returns the modules that `target` can reach.

    These are itself, the object that it is a method of, and its attributes, closure and globals. Modules that it
    receives as arguments are unknown until it runs.
    """
    owner = getattr(target, "__self__", target)
    reachable = [target, owner, *getattr(owner, "__dict__", {}).values()]
    with contextlib.suppress(TypeError, ValueError):  # not a function, or a closure variable without a value yet
        closure = inspect.getclosurevars(target)
        reachable += [*closure.nonlocals.values(), *closure.globals.values()]
    return [value for value in reachable if isinstance(value, nn.Module)]


def remove_scoped_forward(module: nn.Module) -> None:
    """Removes the scoped forward of `module`, unless another patch has wrapped it and still calls it."""
    scoped = module.__dict__.get("forward")
    if not isinstance(scoped, native.ScopedForward):
        return
    if scoped.bound_by_class:
        del module.__dict__["forward"]
    else:
        module.__dict__["forward"] = scoped.__wrapped__


def remove_scoped_forwards(module: nn.Module) -> None:
    """Removes all scoped forwards of `module`. It has one for each attached model that contains it."""
    while isinstance(module.__dict__.get("forward"), native.ScopedForward):
        remove_scoped_forward(module)


def hide_profiler_hooks(create: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps torch.jit._recursive.create_script_module to hide the profiler's hooks for the duration of the call.

    The function compiles a module with its hooks and its instance's `forward`.
    """
    return observe(create, _observe_create)


def _observe_create(model: nn.Module, *args: Any, **kwargs: Any) -> CallHook:
    with contextlib.ExitStack() as stack:
        for module in model.modules():
            stack.enter_context(_without_profiler_hooks(module))
        yield


@contextlib.contextmanager
def _without_profiler_hooks(module: nn.Module) -> Iterator[None]:
    attributes = vars(module)
    originals = {name: attributes[name] for name in (*_HOOKS, "forward") if name in attributes}
    for name in _HOOKS:
        hooks = originals.get(name, {})
        if any(map(_is_profiler_hook, hooks.values())):  # otherwise the module keeps the same dictionary
            attributes[name] = OrderedDict((key, hook) for key, hook in hooks.items() if not _is_profiler_hook(hook))
    remove_scoped_forwards(module)
    try:
        yield
    finally:
        attributes.update(originals)


def _is_profiler_hook(hook: Any) -> bool:
    return type(hook).__module__.startswith("opacus_memprof.") and not hasattr(hook, "__wrapped__")


def reduce_to_noop(hook: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Pickles a profiler hook as a function of the standard library that does nothing (for copyreg).

    Models are pickled and deep-copied with their hooks. A copy is not profiled, and can be loaded where this package is
    missing.
    """
    return getattr, (contextlib.nullcontext(), "__exit__")
