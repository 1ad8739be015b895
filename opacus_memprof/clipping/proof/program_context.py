# SPDX-License-Identifier: Apache-2.0
"""The program's context of a forward: contexts that a proof leaves, and hooks that it runs as a call does."""

import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from opacus_memprof.clipping.layers.registry import is_own


def without_compiled_autograd() -> AbstractContextManager[Any]:
    """Keeps backward from being compiled inside the context, because a proof cannot follow compiled code."""
    compiled: Any = sys.modules.get("torch._dynamo.compiled_autograd")
    return nullcontext() if compiled is None else compiled._disable()


@contextmanager
def without_saved_tensors_hooks() -> Iterator[None]:
    """Disables the program's saved-tensor hooks inside the context.

    Otherwise a checkpoint around the model would treat the tensors of a proof as its own.
    """
    autograd: Any = torch._C._autograd
    hooks = []
    while (top := autograd._top_saved_tensors_default_hooks(False)) is not None:
        hooks.append(top)
        autograd._pop_saved_tensors_default_hooks()
    try:
        yield
    finally:
        for pack, unpack in reversed(hooks):
            autograd._push_saved_tensors_default_hooks(pack, unpack)


def run_pre_hooks(
    module: nn.Module, own: int, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Runs the forward pre-hooks that follow the hook with the id `own`, and returns the arguments."""
    keys = list(module._forward_pre_hooks)
    for key in keys[keys.index(own) + 1 :]:
        hook: Any = module._forward_pre_hooks[key]
        if is_own(hook):
            continue
        if key in module._forward_pre_hooks_with_kwargs:
            args, kwargs = hook(module, args, kwargs) or (args, kwargs)
        else:
            changed = hook(module, args)
            if changed is not None:
                args = changed if isinstance(changed, tuple) else (changed,)
    return args, kwargs


def run_hooks(module: nn.Module, own: int, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
    """Runs the forward hooks that precede the hook with the id `own`, and returns the output."""
    keys = list(module._forward_hooks)
    for key in keys[: keys.index(own)]:
        hook: Any = module._forward_hooks[key]
        if is_own(hook):
            continue
        with_kwargs = key in module._forward_hooks_with_kwargs
        changed = hook(module, args, kwargs, output) if with_kwargs else hook(module, args, output)
        output = output if changed is None else changed
    return output
