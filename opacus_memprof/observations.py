# SPDX-License-Identifier: Apache-2.0
"""What hooks notice and the event file cannot know: facts about modules, for the findings of one session.

A fact has a kind, a module and bytes. Of facts of one kind about one module the latest with the most bytes stays, so
that what a run notices is bounded by its modules.
"""

from collections.abc import Callable
from typing import Any

from opacus_memprof import _native

_facts: dict[tuple[str, int], dict[str, Any]] = {}
_captures_before: dict[int, int] = {}
_resets: list[Callable[[], object]] = []


def on_clear(reset: Callable[[], object]) -> None:
    """Calls `reset` whenever a session begins."""
    _resets.append(reset)


def clear() -> None:
    """A session begins: nothing has been noticed yet, and what is captured already is not its own."""
    for reset in _resets:
        reset()
    _facts.clear()
    _captures_before.clear()
    _captures_before.update(_native.captures())


def note(kind: str, module: int, bytes: int, **more: Any) -> None:
    """Keeps the fact unless one with more bytes is there. `module` is an id."""
    known = _facts.get((kind, module))
    if known is None or known["bytes"] <= bytes:
        _facts[kind, module] = {"kind": kind, "module": module, "bytes": bytes, **more}


def forget(kind: str) -> None:
    """What seemed a fact was none."""
    for key in [key for key in _facts if key[0] == kind]:
        del _facts[key]


def noted() -> list[dict[str, Any]]:
    """The session's facts, each {"kind", "module": id, "bytes", ...}, by kind and module. Captures that a backward
    has released after all are none."""
    left = captures()
    return [_facts[key] for key in sorted(_facts) if key[0] != "captures" or left]


def captures() -> dict[int, int]:
    """Captures of this session's forwards that no backward has released: module id → number."""
    outstanding = _native.captures()
    if not outstanding:
        return outstanding
    own = {module: count - _captures_before.get(module, 0) for module, count in outstanding.items()}
    return {module: count for module, count in own.items() if count > 0}
