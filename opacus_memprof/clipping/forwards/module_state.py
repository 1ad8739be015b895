# SPDX-License-Identifier: Apache-2.0
"""The state of a module that its forward may change, and how to restore it."""

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

INTERNAL = frozenset(nn.Module().__dict__)
"""The attributes that torch gives every module."""
_CONTAINERS = (list, dict, set, deque)


class ModuleState:
    """The buffers and attributes of a module and its submodules at one moment.

    Args:
        module: the module.
    """

    def __init__(self, module: nn.Module) -> None:
        self._dicts = [m.__dict__ for m in module.modules()]
        self._attributes = [{k: v for k, v in d.items() if k not in INTERNAL} for d in self._dicts]
        self._contents = [
            (value, value.copy())
            for attributes in self._attributes
            for value in attributes.values()
            if type(value) in _CONTAINERS
        ]
        self._buffers = [(buffer, buffer.detach().clone()) for buffer in module.buffers()]

    def has_changed(self) -> bool:
        """Returns whether anything has changed since then."""
        return (
            any(_differ(d, saved) for d, saved in zip(self._dicts, self._attributes, strict=True))
            or any(not _same_content(value, copy) for value, copy in self._contents)
            or any(not torch.equal(buffer, value) for buffer, value in self._buffers)
        )

    def restore(self) -> None:
        """Restores buffers and attributes."""
        for d, saved in zip(self._dicts, self._attributes, strict=True):
            if _differ(d, saved):
                for key in [key for key in d if key not in INTERNAL and key not in saved]:
                    del d[key]
                d.update(saved)
        for value, copy in self._contents:
            if not _same_content(value, copy):
                value.clear()
                value.extend(copy) if isinstance(value, (list, deque)) else value.update(copy)
        with torch.no_grad():
            for buffer, old in self._buffers:
                if not torch.equal(buffer, old):
                    buffer.copy_(old)


def _differ(d: dict[str, Any], saved: dict[str, Any]) -> bool:
    count = sum(key not in INTERNAL for key in d)
    return count != len(saved) or any(d.get(key, d) is not value for key, value in saved.items())


def _same_content(value: Any, copy: Any) -> bool:
    if len(value) != len(copy):
        return False
    if isinstance(value, dict):
        return all(key in copy and item is copy[key] for key, item in value.items())
    return isinstance(value, set) or all(a is b for a, b in zip(value, copy, strict=True))


@contextmanager
def restoring_state(module: nn.Module) -> Iterator[None]:
    """Restores a module's buffers and attributes at the end of the context."""
    state = ModuleState(module)
    try:
        yield
    finally:
        state.restore()
