# SPDX-License-Identifier: Apache-2.0
"""Runs the forward hooks that a program has put on a module around a call of its forward, as the call itself does."""

from __future__ import annotations

from typing import Any

from torch import nn

from opacus_memprof.clipping.proof.model_state import is_own


def run_pre_hooks(
    module: nn.Module, own: int, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments after the forward pre-hooks that come behind the hook with the id ``own``."""
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
    """The output after the forward hooks that come before the hook with the id ``own``."""
    keys = list(module._forward_hooks)
    for key in keys[: keys.index(own)]:
        hook: Any = module._forward_hooks[key]
        if is_own(hook):
            continue
        with_kwargs = key in module._forward_hooks_with_kwargs
        changed = hook(module, args, kwargs, output) if with_kwargs else hook(module, args, output)
        output = output if changed is None else changed
    return output
