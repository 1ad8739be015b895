# SPDX-License-Identifier: Apache-2.0
"""Runs what is checkpointed as it is, while a forward is repeated for gradients of its parameters.

A reentrant checkpoint gives parameters that its function reaches by itself no gradient, and others cannot run under
``torch.func``. Repeating has no use for checkpoints: it goes through a few samples at a time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.utils.checkpoint

_lock = threading.Lock()
_depth = 0
_originals: dict[str, Any] = {}


@contextmanager
def without_checkpoints(is_plain: Callable[[], bool]) -> Iterator[None]:
    """Inside, checkpoints call their function directly.

    Args:
        is_plain: whether they do so in the thread that calls it; others checkpoint as always.
    """
    _enter(is_plain)
    try:
        yield
    finally:
        _leave()


def _enter(is_plain: Callable[[], bool]) -> None:
    global _depth
    checkpoints: Any = torch.utils.checkpoint
    with _lock:
        _depth += 1
        if _depth > 1:
            return
        if hasattr(checkpoints, "_checkpoint_impl"):  # newer torch
            _replace("_checkpoint_impl", lambda original: _plain_checkpoint(original, is_plain))
        else:
            _replace("CheckpointFunction", lambda original: _plain_function(original, is_plain))
            name = "_checkpoint_without_reentrant_generator"
            _replace(name, lambda original: _plain_generator(original, is_plain))


def _replace(name: str, make: Callable[[Any], Any]) -> None:
    _originals[name] = getattr(torch.utils.checkpoint, name)
    setattr(torch.utils.checkpoint, name, make(_originals[name]))


def _leave() -> None:
    global _depth
    with _lock:
        _depth -= 1
        while _depth == 0 and _originals:
            setattr(torch.utils.checkpoint, *_originals.popitem())


def _plain_checkpoint(original: Any, is_plain: Callable[[], bool]) -> Any:
    def checkpoint(function: Any, args: Any, kwargs: Any, **options: Any) -> Any:
        if is_plain():
            return function(*args, **kwargs)
        return original(function, args, kwargs, **options)

    return checkpoint


def _plain_function(original: Any, is_plain: Callable[[], bool]) -> Any:
    class CheckpointFunction(original):  # type: ignore[misc]
        @classmethod
        def apply(cls, function: Any, preserve_rng_state: bool, *args: Any) -> Any:
            return function(*args) if is_plain() else original.apply(function, preserve_rng_state, *args)

    return CheckpointFunction


def _plain_generator(original: Any, is_plain: Callable[[], bool]) -> Any:
    def generator(*args: Any, **kwargs: Any) -> Iterator[None]:
        if is_plain():
            yield
        else:
            yield from original(*args, **kwargs)

    return generator
