# SPDX-License-Identifier: Apache-2.0
"""What torch.compile and torch.jit.script read of a program: which modules, and what of ours is on them. Needs no
Opacus."""

import contextlib
import functools
import inspect
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from opacus_memprof import _native

_HOOKS = ("_forward_pre_hooks", "_forward_hooks")


def is_result(module: nn.Module) -> bool:
    """Whether it is what torch.compile returns for a module."""
    return "_orig_mod" in module._modules


def compiled(module: nn.Module) -> bool:
    """Whether it is compiled, in any of torch's ways that a module itself tells."""
    return (
        is_result(module)
        or module._compiled_call_impl is not None
        or hasattr(module.__dict__.get("forward"), "_torchdynamo_orig_callable")
    )


def modules_seen_by(target: Any) -> list[nn.Module]:
    """A module, its method, or a function, method or object that has modules in its closure, globals or attributes:
    what it gets as an argument shows only when it runs."""
    owner = getattr(target, "__self__", target)
    seen = [target, owner, *getattr(owner, "__dict__", {}).values()]
    with contextlib.suppress(TypeError, ValueError):  # no function; one in whose closure something is still missing
        outside = inspect.getclosurevars(target)
        seen += [*outside.nonlocals.values(), *outside.globals.values()]
    return [thing for thing in seen if isinstance(thing, nn.Module)]


def unscope(module: nn.Module) -> None:
    """Takes the scoped forward out, unless somebody has patched on top: their patch needs ours."""
    scoped = module.__dict__.get("forward")
    if not isinstance(scoped, _native.ScopedForward):
        return
    if scoped.bound_by_class:
        del module.__dict__["forward"]
    else:
        module.__dict__["forward"] = scoped.__wrapped__


def unscope_whole(module: nn.Module) -> None:
    """Takes out one for each attached model that it is a part of."""
    while isinstance(module.__dict__.get("forward"), _native.ScopedForward):
        unscope(module)


def out_of_sight(create: Callable[..., Any]) -> Callable[..., Any]:
    """For torch.jit._recursive.create_script_module, which makes a script module of its first argument and compiles all
    that it has, its hooks and its own `forward` too: those of the profiler are not there meanwhile."""

    @functools.wraps(create)
    def wrapper(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with contextlib.ExitStack() as stack:
            for module in model.modules():
                stack.enter_context(_without_ours(module))
            return create(model, *args, **kwargs)

    return wrapper


@contextlib.contextmanager
def _without_ours(module: nn.Module) -> Iterator[None]:
    attributes = vars(module)
    kept = {name: attributes[name] for name in (*_HOOKS, "forward") if name in attributes}
    for name in _HOOKS:
        hooks = kept.get(name, {})
        if any(map(_is_ours, hooks.values())):  # else the very dictionary stays
            attributes[name] = OrderedDict((key, hook) for key, hook in hooks.items() if not _is_ours(hook))
    unscope_whole(module)
    try:
        yield
    finally:
        attributes.update(kept)


def _is_ours(hook: Any) -> bool:
    return type(hook).__module__.startswith(f"{__package__}.") and not hasattr(hook, "__wrapped__")


def reduce_to_nothing(hook: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """For copyreg: pickled and deep-copied models carry their hooks along. There ours become a function of the standard
    library that does nothing: a copy is not profiled, and loads where this package is missing."""
    return getattr, (contextlib.nullcontext(), "__exit__")
