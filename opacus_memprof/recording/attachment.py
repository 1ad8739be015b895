# SPDX-License-Identifier: Apache-2.0
"""Attachment: the changes that the profiler has made to a program, and how each is undone.

Nothing here holds a strong reference to a model, an optimizer or a tensor. The profiler must not keep objects alive
that the program drops.
"""

import importlib
import weakref
from collections.abc import Callable, MutableMapping
from functools import partial, reduce
from types import ModuleType
from typing import Any

import torch

from opacus_memprof.errors import MemprofError
from opacus_memprof.recording import faults, native
from opacus_memprof.versions import installed_version

Wrapper = native.CaptureActivations | native.CaptureBackprops


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
