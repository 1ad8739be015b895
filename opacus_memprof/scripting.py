# SPDX-License-Identifier: Apache-2.0
"""torch.jit.script compiles all that a module has, its hooks and its own `forward` too: what stands there for the
profiler is out of its sight."""

import contextlib
import functools
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from opacus_memprof import _native

_HOOKS = ("_forward_pre_hooks", "_forward_hooks")


def out_of_sight(create: Callable[..., Any]) -> Callable[..., Any]:
    """For torch.jit._recursive.create_script_module, which makes a script module of its first argument."""

    @functools.wraps(create)
    def wrapper(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with contextlib.ExitStack() as stack:
            for module in model.modules():
                stack.enter_context(_without_ours(vars(module)))
            return create(model, *args, **kwargs)

    return wrapper


@contextlib.contextmanager
def _without_ours(attributes: dict[str, Any]) -> Iterator[None]:
    kept = {name: attributes[name] for name in (*_HOOKS, "forward") if name in attributes}
    for name in _HOOKS:
        hooks = kept.get(name, {})
        if any(map(_is_ours, hooks.values())):  # else the very dictionary stays
            attributes[name] = OrderedDict((key, hook) for key, hook in hooks.items() if not _is_ours(hook))
    while isinstance(scoped := attributes.get("forward"), _native.ScopedForward):
        if scoped.bound_by_class:
            del attributes["forward"]
        else:
            attributes["forward"] = scoped.__wrapped__
    try:
        yield
    finally:
        attributes.update(kept)


def _is_ours(hook: Any) -> bool:
    return type(hook).__module__.startswith(f"{__package__}.") and not hasattr(hook, "__wrapped__")
