# SPDX-License-Identifier: Apache-2.0
"""What attaching changed, and how to undo it.

Nothing here holds a model, an optimizer or a tensor: a profile must not keep alive what the program drops.
"""

import contextlib
import weakref
from collections.abc import Callable, Iterator, MutableMapping
from types import ModuleType
from typing import Any

from opacus_memprof import _native

Wrapper = _native.CaptureActivations | _native.CaptureBackprops


class Attachment:
    """The changes that one attachment made; `detach` undoes them. Dropping it leaves them in place."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], object]] = []

    def on_detach(self, undo: Callable[[], object]) -> None:
        """Detaching calls `undo`, the latest first. It must hold what it changes weakly."""
        self._undo.append(undo)

    def detach(self) -> None:
        """Restores what was there before. Again is harmless."""
        while self._undo:
            self._undo.pop()()

    @contextlib.contextmanager
    def undone_on_error(self) -> Iterator[None]:
        """Attaching is whole or nothing: an exception detaches what was attached so far."""
        try:
            yield
        except BaseException:
            self.detach()
            raise

    def keep_entry(self, entries: "weakref.WeakKeyDictionary[Any, Any]", key: Any, value: Any) -> None:
        """The entry is there until detach, or until the key is gone."""
        entries[key] = value
        reference = weakref.ref(key)
        del key, value

        def forget() -> None:
            if (alive := reference()) is not None:
                entries.pop(alive, None)

        self.on_detach(forget)

    def replace_attribute(self, owner: type | ModuleType, name: str, value: Any) -> None:
        """Of a class or a module: these outlive every attachment."""
        before = owner.__dict__[name]
        setattr(owner, name, value)

        def restore() -> None:
            if owner.__dict__.get(name) is value:  # else somebody patched on top, and their patch needs ours
                setattr(owner, name, before)

        self.on_detach(restore)

    def replace_item(self, registry: dict[Any, Any], key: Any, value: Any) -> None:
        """Of a registry that belongs to a class and so outlives every attachment. Keeps the order of its keys."""
        before = registry[key]
        registry[key] = value

        def restore() -> None:
            if registry.get(key) is value:
                registry[key] = before

        self.on_detach(restore)

    def replace_hook(self, hooks: MutableMapping[int, Any], key: int, wrapper: Wrapper) -> None:
        """Of one module: the hook that `wrapper` wraps, in its place."""
        hooks[key] = wrapper
        reference, kind = weakref.ref(hooks), type(wrapper)
        del wrapper  # it holds the model

        def restore() -> None:
            alive = reference()
            if alive is not None and type(alive.get(key)) is kind:
                alive[key] = alive[key].__wrapped__

        self.on_detach(restore)


class Shared:
    """Patches of Opacus itself: made for the first attachment that needs them, undone after the last. With `repeat`
    for each of them: what there is to patch may have grown."""

    def __init__(self, patch: Callable[[Attachment], None], *, repeat: bool = False) -> None:
        self._patch = patch
        self._repeat = repeat
        self._users = 0
        self._attachment = Attachment()

    def use(self, attachment: Attachment) -> None:
        """Keeps the patches in place until `attachment` is detached."""
        if self._users == 0 or self._repeat:
            self._patch(self._attachment)
        self._users += 1
        attachment.on_detach(self._leave)

    def _leave(self) -> None:
        self._users -= 1
        if self._users == 0:
            self._attachment.detach()
