# SPDX-License-Identifier: Apache-2.0
"""Activation checkpoints inside a module whose forward is repeated for the gradients of its parameters.

While the module runs, its parameters do not require grad. A checkpoint must run its function again under the same
conditions. When the forward is repeated, checkpoints call their function directly, for two reasons: a reentrant
checkpoint gives no gradient to parameters that its function does not take as arguments, and other checkpoints cannot
run under `torch.func`.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.utils.checkpoint

_lock = threading.Lock()
_users = 0
_originals: dict[str, Any] = {}


class _Thread(threading.local):
    """State of the checkpoints of this thread."""

    def __init__(self) -> None:
        self.plain = 0
        self.frozen: list[Sequence[torch.Tensor]] = []


_thread = _Thread()


@contextmanager
def without_checkpoints() -> Iterator[None]:
    """Makes the checkpoints of this thread call their function directly inside the context."""
    _begin()
    _thread.plain += 1
    try:
        yield
    finally:
        _thread.plain -= 1
        _end()


def freeze_in_checkpoints(parameters: Sequence[torch.Tensor]) -> None:
    """Freezes parameters while checkpointed functions are recomputed.

    This applies to functions that this thread checkpoints until it calls `end_freezing_in_checkpoints`.
    """
    _begin()
    _thread.frozen.append(parameters)


def end_freezing_in_checkpoints() -> None:
    """Ends the last `freeze_in_checkpoints`."""
    _thread.frozen.pop()
    _end()


def _followed(function: Any) -> Any:
    """Returns a checkpointed function that runs with the frozen parameters when it is recomputed."""
    parameters = [p for frozen in _thread.frozen for p in frozen]
    if not parameters:
        return function

    def run(*args: Any, **kwargs: Any) -> Any:
        frozen = [p for p in parameters if p.requires_grad]
        for p in frozen:
            p.requires_grad = False
        try:
            return function(*args, **kwargs)
        finally:
            for p in frozen:
                p.requires_grad = True

    return run


def _begin() -> None:
    global _users
    checkpoints: Any = torch.utils.checkpoint
    with _lock:
        _users += 1
        if _users > 1:
            return
        if hasattr(checkpoints, "_checkpoint_impl"):  # newer torch
            _replace("_checkpoint_impl", _replaced_checkpoint)
        else:
            _replace("CheckpointFunction", _replaced_function)
            _replace("_checkpoint_without_reentrant_generator", _replaced_generator)


def _replace(name: str, make: Callable[[Any], Any]) -> None:
    _originals[name] = getattr(torch.utils.checkpoint, name)
    setattr(torch.utils.checkpoint, name, make(_originals[name]))


def _end() -> None:
    global _users
    with _lock:
        _users -= 1
        while _users == 0 and _originals:
            setattr(torch.utils.checkpoint, *_originals.popitem())


def _replaced_checkpoint(original: Any) -> Any:
    def checkpoint(function: Any, args: Any, kwargs: Any, **options: Any) -> Any:
        return function(*args, **kwargs) if _thread.plain else original(_followed(function), args, kwargs, **options)

    return checkpoint


def _replaced_function(original: Any) -> Any:
    class CheckpointFunction(original):  # type: ignore[misc]
        @classmethod
        def apply(cls, function: Any, preserve_rng_state: bool, *args: Any) -> Any:
            if _thread.plain:
                return function(*args)
            return original.apply(_followed(function), preserve_rng_state, *args)

    return CheckpointFunction


def _replaced_generator(original: Any) -> Any:
    def generator(function: Any, *args: Any, **kwargs: Any) -> Iterator[None]:
        if _thread.plain:
            yield
        else:
            yield from original(_followed(function), *args, **kwargs)

    return generator
