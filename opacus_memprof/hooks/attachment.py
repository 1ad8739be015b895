# SPDX-License-Identifier: Apache-2.0
"""Attachment: the list of changes that attaching has made, and how each is undone.

Nothing here holds a strong reference to a model, an optimizer or a tensor: the profiler must not keep alive what the
program drops.
"""

import contextlib
import weakref
from collections.abc import Callable, Iterator, MutableMapping
from types import ModuleType
from typing import Any

from opacus_memprof.recording import native

Wrapper = native.CaptureActivations | native.CaptureBackprops


class Attachment:
    """The changes that one call of `attach` made; `detach` undoes them. Dropping the object leaves them in place."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], object]] = []

    def on_detach(self, undo: Callable[[], object]) -> None:
        """Registers `undo` to be called by `detach`, in reverse order. It must refer weakly to what it changes."""
        self._undo.append(undo)

    def detach(self) -> None:
        """Restores everything that was changed. A second call does nothing."""
        while self._undo:
            self._undo.pop()()

    @contextlib.contextmanager
    def detach_on_error(self) -> Iterator[None]:
        """Undoes what was attached so far if the block raises, so that attaching is all or nothing."""
        try:
            yield
        except BaseException:
            self.detach()
            raise

    def set_entry(self, entries: "weakref.WeakKeyDictionary[Any, Any]", key: Any, value: Any) -> None:
        """Sets `entries[key]` until detach, or until the key is garbage-collected."""
        entries[key] = value
        reference = weakref.ref(key)
        del key, value

        def remove() -> None:
            if (alive := reference()) is not None:
                entries.pop(alive, None)

        self.on_detach(remove)

    def replace_attribute(self, owner: type | ModuleType, name: str, value: Any) -> None:
        """Replaces an attribute of a class or a Python module, both of which outlive every attachment."""
        original = owner.__dict__[name]
        setattr(owner, name, value)

        def restore() -> None:
            if owner.__dict__.get(name) is value:  # otherwise another patch has wrapped ours and still calls it
                setattr(owner, name, original)

        self.on_detach(restore)

    def replace_item(self, registry: dict[Any, Any], key: Any, value: Any) -> None:
        """Replaces an item of a class-level registry, keeping the order of its keys."""
        original = registry[key]
        registry[key] = value

        def restore() -> None:
            if registry.get(key) is value:
                registry[key] = original

        self.on_detach(restore)

    def replace_hook(self, hooks: MutableMapping[int, Any], key: int, wrapper: Wrapper) -> None:
        """Replaces one hook of an `nn.Module` by the wrapper around it."""
        hooks[key] = wrapper
        reference, kind = weakref.ref(hooks), type(wrapper)
        del wrapper  # its hook refers to the model

        def restore() -> None:
            alive = reference()
            if alive is not None and type(alive.get(key)) is kind:
                alive[key] = alive[key].__wrapped__

        self.on_detach(restore)


class SharedPatch:
    """A patch of Opacus or torch itself, shared by all attachments that need it.

    Args:
        patch: makes the changes; called for the first attachment. They are undone after the last one is detached.
        repeat: call `patch` for every attachment, because there may be more to patch by then.
    """

    def __init__(self, patch: Callable[[Attachment], None], *, repeat: bool = False) -> None:
        self._patch = patch
        self._repeat = repeat
        self._users = 0
        self._attachment = Attachment()

    def use(self, attachment: Attachment) -> None:
        """Keeps the patch in place until `attachment` is detached."""
        if self._users == 0 or self._repeat:
            self._patch(self._attachment)
        self._users += 1
        attachment.on_detach(self._release)

    def _release(self) -> None:
        self._users -= 1
        if self._users == 0:
            self._attachment.detach()
