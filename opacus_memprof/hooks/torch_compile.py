# SPDX-License-Identifier: Apache-2.0
"""Follows models through torch.compile and torch.jit.script.

They must trace the program's own code only; otherwise their graphs would break. So scoped forwards are removed from
compiled modules, and the model's two forward hooks run around the compiled call instead of inside it.
"""

import contextlib
import functools
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from torch import nn
from torch.compiler import is_compiling

from opacus_memprof.hooks import forward_shapes
from opacus_memprof.hooks.vocabulary import FORWARD, IDLE
from opacus_memprof.recording import native
from opacus_memprof.recording.attachment import (
    Attachment,
    hide_profiler_hooks,
    is_compile_result,
    looks_compiled,
    reachable_modules,
    remove_scoped_forwards,
)
from opacus_memprof.recording.faults import CallError, CallHook, call_observed, contain, observe

# A model's forward pre-hook and forward hook.
ModelHooks = tuple[Callable[[nn.Module, Any, Any], None], Callable[[nn.Module, Any, Any], None]]

_followed: "weakref.WeakKeyDictionary[nn.Module, tuple[Attachment, ModelHooks]]" = weakref.WeakKeyDictionary()
_compiled_results: "weakref.WeakKeyDictionary[nn.Module, weakref.WeakSet[nn.Module]]" = weakref.WeakKeyDictionary()
# Compiling, at the first call, may run a backward pass, which resets the phase; the tag keeps the phase at forward.
_FORWARD = native.Tag(phase=FORWARD)
_METHODS_INSIDE_HOOKS = ("forward", "_call_impl")  # nn.Module calls these inside its hooks, or compiles one
_running_calls = 0  # compiled calls of followed models that have not returned


def is_compiled(module: nn.Module) -> bool:
    """Returns whether torch.compile traces the inside of `module`, where hooks would break its graphs."""
    return looks_compiled(module) or bool(_compiled_results.get(module))


def hooks_suspended() -> bool:
    """Returns whether the model's hooks must do nothing.

    Either they are being traced, or a wrapper around the compiled call has called them already.
    """
    return is_compiling() or _running_calls > 0


def follow(attachment: Attachment, root: nn.Module, hooks: ModelHooks) -> None:
    """Calls `hooks` around every compiled call of `root`, whether it is compiled already or later."""
    attachment.set_entry(_followed, root, (attachment, hooks))
    if root._compiled_call_impl is not None:
        _wrap_compiled_call(attachment, root, "_compiled_call_impl", root)
    for result in (root,) if is_compile_result(root) else _compiled_results.get(root, ()):
        _wrap_compiled_call(attachment, result, "forward", root)


def wrap_torch_compile(attachment: Attachment) -> None:
    """Patches torch.compile, nn.Module.compile and torch.jit.script.

    A program that has already imported `compile` by name gets the same results, with more graphs.
    """
    for path, wrap in (
        ("torch:compile", _wrap_compile),
        ("torch.nn:Module.compile", lambda compile: observe(compile, _observe_module_compile)),
        ("torch.jit._recursive:create_script_module", hide_profiler_hooks),
    ):
        attachment.apply(path, partial(_wrap, path, wrap))


def _wrap(path: str, wrap: Callable[[Any], Any], attachment: Attachment) -> None:
    attachment.wrap(path, wrap)


def _wrap_compile(compile: Any) -> Any:
    @functools.wraps(compile)
    def wrapper(model: Any = None, *args: Any, **kwargs: Any) -> Any:
        while isinstance(model, native.ScopedForward):  # from `torch.compile(model.forward)`
            model = model.__wrapped__
        modules = _remove_reachable_wrappers(model) or []
        result = compile(model, *args, **kwargs)
        followed = _follow_result(model, modules, result)
        return result if followed is None else followed

    return wrapper


@contain("removing the profiler's hooks from what torch.compile traces")
def _remove_reachable_wrappers(model: Any) -> list[nn.Module]:
    """Returns the modules that `model` can reach, after removing the profiler's wrappers from them."""
    modules = reachable_modules(model)
    for module in modules:
        _remove_wrappers(module)
    return modules


@contain("following what torch.compile has returned")
def _follow_result(model: Any, modules: list[nn.Module], result: Any) -> Any:
    root = next((inside for module in modules for inside in module.modules() if inside in _followed), None)
    if isinstance(model, nn.Module) and isinstance(result, nn.Module) and result is not model:
        _compiled_results.setdefault(model, weakref.WeakSet()).add(result)
        if root is not None:
            _compiled_results.setdefault(root, weakref.WeakSet()).add(result)
            _wrap_compiled_call(_followed[root][0], result, "forward", root)
    elif root is not None and getattr(model, "__name__", "") not in _METHODS_INSIDE_HOOKS:
        # A compiled function may be a whole training step, so its phase is set by the functions that it calls.
        return _call_hooks_around(result, weakref.ref(root), contextlib.nullcontext())
    return result


def _observe_module_compile(module: nn.Module, *args: Any, **kwargs: Any) -> CallHook:
    yield
    if module in _followed:
        _wrap_compiled_call(_followed[module][0], module, "_compiled_call_impl", module)


def _remove_wrappers(module: nn.Module) -> None:
    modules = set(module.modules())
    for each in modules:
        remove_scoped_forwards(each)
    forward_shapes.unwatch_modules(modules)


def _wrap_compiled_call(attachment: Attachment, holder: nn.Module, name: str, root: nn.Module) -> None:
    """Wraps the attribute `name` of `holder`, which is a compiled call of `root`."""
    wrapper = _call_hooks_around(holder.__dict__[name], weakref.ref(root), _FORWARD)
    attachment.on_detach(partial(_restore, weakref.ref(holder), name, weakref.ref(wrapper)))
    holder.__dict__[name] = wrapper


def _restore(holder_ref: "weakref.ref[nn.Module]", name: str, wrapper_ref: "weakref.ref[Any]") -> None:
    holder, wrapper = holder_ref(), wrapper_ref()
    current: Any = None if holder is None else holder.__dict__.get(name)
    if holder is not None and wrapper is not None and current is wrapper:
        holder.__dict__[name] = wrapper.__wrapped__


def _call_hooks_around(
    call: Callable[..., Any], root_ref: "weakref.ref[nn.Module]", tag: AbstractContextManager[Any]
) -> Callable[..., Any]:
    @functools.wraps(call)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        root = root_ref()
        if root is None or root not in _followed or hooks_suspended():
            return call(*args, **kwargs)
        return call_observed(call, args, kwargs, lambda: _observe_compiled_call(root, tag, args, kwargs))

    return wrapper


def _observe_compiled_call(root: nn.Module, tag: AbstractContextManager[Any], args: Any, kwargs: Any) -> CallHook:
    global _running_calls
    forward_pre_hook, forward_hook = _followed[root][1]
    forward_pre_hook(root, args, kwargs)
    _running_calls += 1
    try:
        with tag:
            output = yield
    except CallError:
        native.set_phase(IDLE)
        raise
    finally:
        _running_calls -= 1
    forward_hook(root, args, output)
