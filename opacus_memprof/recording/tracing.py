# SPDX-License-Identifier: Apache-2.0
"""Finds the modules that torch.compile and torch.jit.script trace, and removes the profiler's hooks from them.

Works without Opacus.
"""

import contextlib
import inspect
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from opacus_memprof.recording import native
from opacus_memprof.recording.faults import CallHook, observe

_HOOKS = ("_forward_pre_hooks", "_forward_hooks")


def is_compile_result(module: nn.Module) -> bool:
    """Returns whether `module` is the result of `torch.compile(other_module)`."""
    return "_orig_mod" in module._modules


def is_compiled(module: nn.Module) -> bool:
    """Returns whether `module` is compiled, as far as its own attributes show."""
    return (
        is_compile_result(module)
        or module._compiled_call_impl is not None
        or hasattr(module.__dict__.get("forward"), "_torchdynamo_orig_callable")
    )


def reachable_modules(target: Any) -> list[nn.Module]:
    """Returns the modules that `target` can reach.

    These are itself, the object that it is a method of, and its attributes, closure and globals. Modules that it
    receives as arguments are unknown until it runs.
    """
    owner = getattr(target, "__self__", target)
    reachable = [target, owner, *getattr(owner, "__dict__", {}).values()]
    with contextlib.suppress(TypeError, ValueError):  # not a function, or a closure variable without a value yet
        closure = inspect.getclosurevars(target)
        reachable += [*closure.nonlocals.values(), *closure.globals.values()]
    return [value for value in reachable if isinstance(value, nn.Module)]


def remove_scoped_forward(module: nn.Module) -> None:
    """Removes the scoped forward of `module`, unless another patch has wrapped it and still calls it."""
    scoped = module.__dict__.get("forward")
    if not isinstance(scoped, native.ScopedForward):
        return
    if scoped.bound_by_class:
        del module.__dict__["forward"]
    else:
        module.__dict__["forward"] = scoped.__wrapped__


def remove_scoped_forwards(module: nn.Module) -> None:
    """Removes all scoped forwards of `module`. It has one for each attached model that contains it."""
    while isinstance(module.__dict__.get("forward"), native.ScopedForward):
        remove_scoped_forward(module)


def hide_profiler_hooks(create: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps torch.jit._recursive.create_script_module to hide the profiler's hooks for the duration of the call.

    The function compiles a module with its hooks and its instance's `forward`.
    """
    return observe(create, _observe_create)


def _observe_create(model: nn.Module, *args: Any, **kwargs: Any) -> CallHook:
    with contextlib.ExitStack() as stack:
        for module in model.modules():
            stack.enter_context(_without_profiler_hooks(module))
        yield


@contextlib.contextmanager
def _without_profiler_hooks(module: nn.Module) -> Iterator[None]:
    attributes = vars(module)
    originals = {name: attributes[name] for name in (*_HOOKS, "forward") if name in attributes}
    for name in _HOOKS:
        hooks = originals.get(name, {})
        if any(map(_is_profiler_hook, hooks.values())):  # otherwise the module keeps the same dictionary
            attributes[name] = OrderedDict((key, hook) for key, hook in hooks.items() if not _is_profiler_hook(hook))
    remove_scoped_forwards(module)
    try:
        yield
    finally:
        attributes.update(originals)


def _is_profiler_hook(hook: Any) -> bool:
    return type(hook).__module__.startswith("opacus_memprof.") and not hasattr(hook, "__wrapped__")


def reduce_to_noop(hook: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Pickles a profiler hook as a function of the standard library that does nothing (for copyreg).

    Models are pickled and deep-copied with their hooks. A copy is not profiled, and can be loaded where this package is
    missing.
    """
    return getattr, (contextlib.nullcontext(), "__exit__")
