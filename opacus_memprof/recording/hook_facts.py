# SPDX-License-Identifier: Apache-2.0
"""Facts that hooks record for the findings of a session, because the event file does not contain them.

A fact has a kind, a module and bytes. Of the facts of one kind about one module only the one with the most bytes is
kept (the latest of several), so their number is bounded by the number of modules.
"""

from collections.abc import Callable
from typing import Any

from opacus_memprof.recording import native

_facts: dict[tuple[str, int], dict[str, Any]] = {}
_captures_before: dict[int, int] = {}  # that were outstanding when the session began
_on_clear: list[Callable[[], object]] = []


def on_clear(callback: Callable[[], object]) -> None:
    """Registers `callback` to be called whenever a session begins."""
    _on_clear.append(callback)


def clear() -> None:
    """Discards all facts. Called when a session begins: captures that are outstanding then do not count as its own."""
    for callback in _on_clear:
        callback()
    _facts.clear()
    _captures_before.clear()
    _captures_before.update(native.captures())


def record(kind: str, module: int, bytes: int, **details: Any) -> None:
    """Records a fact, unless one of the same kind and module with more bytes is there. `module` is a module id."""
    present = _facts.get((kind, module))
    if present is None or present["bytes"] <= bytes:
        _facts[kind, module] = {"kind": kind, "module": module, "bytes": bytes, **details}


def discard(kind: str) -> None:
    """Discards the facts of one kind, because they have turned out to be none."""
    for key in [key for key in _facts if key[0] == kind]:
        del _facts[key]


def recorded() -> list[dict[str, Any]]:
    """The session's facts, each {"kind", "module": id, "bytes", ...}, ordered by kind and module. Those about captures
    are left out if a backward pass has released all captures since."""
    outstanding = captures()
    return [_facts[key] for key in sorted(_facts) if key[0] != "captures" or outstanding]


def captures() -> dict[int, int]:
    """Captures of this session's forward passes that no backward pass has released: module id → number."""
    outstanding = native.captures()
    if not outstanding:
        return outstanding
    since = {module: count - _captures_before.get(module, 0) for module, count in outstanding.items()}
    return {module: count for module, count in since.items() if count > 0}
