# SPDX-License-Identifier: Apache-2.0
"""torch.compile of attached models. What it traces must be the program's own code, or its graphs would break: scoped
forwards are taken out of it, and what a model's hooks do is done around the compiled call."""

import contextlib
import functools
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.compiler import is_compiling
from torch.jit import _recursive

from opacus_memprof import _native, tracing
from opacus_memprof.hooks import shapes
from opacus_memprof.hooks.attach import Attachment
from opacus_memprof.hooks.vocabulary import FORWARD, IDLE

Hooks = tuple[Callable[[nn.Module, Any, Any], None], Callable[[nn.Module, Any, Any], None]]  # the model's own two

_followed: "weakref.WeakKeyDictionary[nn.Module, tuple[Attachment, Hooks]]" = weakref.WeakKeyDictionary()
_results: "weakref.WeakKeyDictionary[nn.Module, weakref.WeakSet[nn.Module]]" = weakref.WeakKeyDictionary()
# Compiling may run a backward pass, after which nobody would say that this forward goes on.
_FORWARD = _native.Tag(phase=FORWARD)
_INSIDE_HOOKS = ("forward", "_call_impl")  # a module's methods, which its hooks stand around, or nn.Module.compile's
_running = 0  # compiled calls of followed models that have not returned


def compiled(module: nn.Module) -> bool:
    """torch.compile traces what is inside: hooks there would break its graphs."""
    return tracing.compiled(module) or bool(_results.get(module))


def hooks_idle() -> bool:
    """A model's hooks are being traced, or run inside of a compiled call around which their work is done."""
    return is_compiling() or _running > 0


def follow(attachment: Attachment, root: nn.Module, hooks: Hooks) -> None:
    """Calls `hooks` around the compiled calls of `root`, those there are and those to come."""
    attachment.keep_entry(_followed, root, (attachment, hooks))
    if root._compiled_call_impl is not None:
        _stand_in(attachment, root, "_compiled_call_impl", root)
    for result in (root,) if tracing.is_result(root) else _results.get(root, ()):
        _stand_in(attachment, result, "forward", root)


def follow_compile(attachment: Attachment) -> None:
    """On torch, where nn.Module.compile looks it up too; whoever has imported `compile` by its name gets more graphs,
    and the same results."""
    attachment.replace_attribute(torch, "compile", _compiling(torch.compile))
    attachment.replace_attribute(nn.Module, "compile", _compiling_in_place(nn.Module.compile))
    scripted = tracing.out_of_sight(_recursive.create_script_module)
    attachment.replace_attribute(_recursive, "create_script_module", scripted)


def _compiling(compile: Any) -> Any:
    @functools.wraps(compile)
    def wrapper(model: Any = None, *args: Any, **kwargs: Any) -> Any:
        while isinstance(model, _native.ScopedForward):  # somebody's `torch.compile(model.forward)`
            model = model.__wrapped__
        seen = tracing.modules_seen_by(model)
        for module in seen:
            _take_out(module)
        result = compile(model, *args, **kwargs)
        root = next((inside for module in seen for inside in module.modules() if inside in _followed), None)
        if isinstance(model, nn.Module) and isinstance(result, nn.Module) and result is not model:
            _results.setdefault(model, weakref.WeakSet()).add(result)
            if root is not None:
                _results.setdefault(root, weakref.WeakSet()).add(result)
                _stand_in(_followed[root][0], result, "forward", root)
        elif root is not None and getattr(model, "__name__", "") not in _INSIDE_HOOKS:
            result = _calling_hooks(result, weakref.ref(root), contextlib.nullcontext())  # it may train
        return result

    return wrapper


def _compiling_in_place(compile: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(compile)
    def wrapper(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        compile(self, *args, **kwargs)
        if self in _followed:
            _stand_in(_followed[self][0], self, "_compiled_call_impl", self)

    return wrapper


def _take_out(module: nn.Module) -> None:
    inside = set(module.modules())
    for each in inside:
        tracing.unscope_whole(each)
    shapes.unwatch(inside)


def _stand_in(attachment: Attachment, holder: nn.Module, name: str, root: nn.Module) -> None:
    """Stands in for `holder`'s attribute, a compiled call of `root`."""
    around = _calling_hooks(holder.__dict__[name], weakref.ref(root), _FORWARD)
    holder.__dict__[name] = around
    attachment.on_detach(functools.partial(_restore, weakref.ref(holder), name, weakref.ref(around)))


def _restore(reference: "weakref.ref[nn.Module]", name: str, mine: "weakref.ref[Any]") -> None:
    holder, around = reference(), mine()
    current: Any = None if holder is None else holder.__dict__.get(name)
    if holder is not None and around is not None and current is around:
        holder.__dict__[name] = around.__wrapped__


def _calling_hooks(
    call: Callable[..., Any], reference: "weakref.ref[nn.Module]", tag: AbstractContextManager[Any]
) -> Callable[..., Any]:
    @functools.wraps(call)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        global _running
        root = reference()
        if root is None or root not in _followed or hooks_idle():
            return call(*args, **kwargs)
        enter, leave = _followed[root][1]
        enter(root, args, kwargs)
        _running += 1
        try:
            with tag:
                output = call(*args, **kwargs)
        except BaseException:
            _native.set_phase(IDLE)
            raise
        finally:
            _running -= 1
        leave(root, args, output)
        return output

    return wrapper
