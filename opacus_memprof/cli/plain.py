# SPDX-License-Identifier: Apache-2.0
"""Training without privacy, in a script that knows of no profiler: its models are attached like private ones, so that
the two can be compared.

What every training makes is an optimizer. The outermost modules with its parameters are models, and their first forward
pass with gradients is the latest moment: a `make_private` comes before it, and then nothing is left to do here.
"""

import contextlib
import copyreg
import functools
import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data.dataloader import _BaseDataLoaderIter
from torch.utils.hooks import RemovableHandle

from opacus_memprof import workload
from opacus_memprof.session import Session

T = TypeVar("T")


class PlainTraining:
    """Watches for optimizers from now on, for as long as nothing else has attached a model to the session."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._optimizers: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._waiting: weakref.WeakKeyDictionary[nn.Module, RemovableHandle] = weakref.WeakKeyDictionary()
        self._known = workload.current().modules  # anew with each model that is attached
        made, init = self._harmless(self._made), Optimizer.__init__

        @functools.wraps(init)
        def wrapper(optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
            init(optimizer, *args, **kwargs)
            made(optimizer)

        Optimizer.__init__ = wrapper  # type: ignore[method-assign, assignment]

    def _made(self, optimizer: Optimizer) -> None:
        if self._others_attach():
            return
        self._optimizers.add(optimizer)
        for model in _models(optimizer):
            if model not in self._waiting:
                first = _FirstForward(self._harmless(self._comes))
                self._waiting[model] = model.register_forward_pre_hook(first, prepend=True, with_kwargs=True)

    def _harmless(self, call: Callable[..., None]) -> Callable[..., None]:
        """The script did not ask to be followed: what goes wrong here is not its to die of."""

        def wrapper(*args: Any) -> None:
            try:
                call(*args)
            except Exception as error:
                self._session.warnings.append(f"a model that trains without Opacus could not be followed ({error})")

        return wrapper

    def _others_attach(self) -> bool:
        return workload.current().modules is not self._known

    def _comes(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        """The first forward pass of a model begins."""
        waiting = self._waiting.pop(model, None)
        if waiting is None:
            return  # two threads
        waiting.remove()
        if self._others_attach() or any("autograd_grad_sample_hooks" in vars(module) for module in model.modules()):
            return
        import opacus  # noqa: F401  # before what attaches, for at this import the session begins to watch for engines

        from opacus_memprof.hooks.inputs import tag_dataset
        from opacus_memprof.hooks.modules import EnterModel

        mine = _ids(model.parameters())
        optimizers = [one for one in self._optimizers if not mine.isdisjoint(_ids(_parameters(one)))]
        self._session.attach(model, *optimizers)
        self._known = workload.current().modules
        for drawing in _alive(_BaseDataLoaderIter):  # from now on they are seen as they begin
            tag_dataset(drawing._dataset)
        for hook in list(model._forward_pre_hooks.values()):  # torch has read these before it called us
            if isinstance(hook, EnterModel):
                hook(model, args, kwargs)


class _FirstForward:
    """A forward pre-hook, which calls `comes` in a forward pass that a backward can follow."""

    __slots__ = ("_comes",)

    def __init__(self, comes: Callable[[nn.Module, Any, Any], None]) -> None:
        self._comes = comes

    def __call__(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        if not torch.compiler.is_compiling() and torch.is_grad_enabled():
            self._comes(model, args, kwargs)


# A copy of the model, or a file with it, has a function of the standard library in its place that does nothing.
def _reduce_to_nothing(hook: _FirstForward) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    return getattr, (contextlib.nullcontext(), "__exit__")


copyreg.pickle(_FirstForward, _reduce_to_nothing)


def _alive(kind: type[T]) -> list[T]:
    return [thing for thing in gc.get_objects() if issubclass(type(thing), kind)]  # never asks a proxy what it is


def _parameters(optimizer: Optimizer) -> Iterator[Tensor]:
    return (parameter for group in optimizer.param_groups for parameter in group["params"])


def _ids(tensors: Iterator[Any]) -> set[int]:
    return set(map(id, tensors))


def _models(optimizer: Optimizer) -> list[nn.Module]:
    """The modules that are in no other and have parameters of the optimizer's. Not what FSDP2 has sharded: its modules
    have other parameters in forward."""
    trained = list(_parameters(optimizer))
    if any(hasattr(parameter, "_local_tensor") for parameter in trained):
        return []
    modules = [module for module in _alive(nn.Module) if isinstance(vars(module).get("_modules"), dict)]
    inside = {id(child) for module in modules for child in module._modules.values()}
    wanted = _ids(iter(trained))
    return [
        module for module in modules if id(module) not in inside and not wanted.isdisjoint(_ids(module.parameters()))
    ]
