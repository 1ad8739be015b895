# SPDX-License-Identifier: Apache-2.0
"""Training without a PrivacyEngine, in a script that knows of no profiler: without privacy, so that it can be compared
with one that has it, or with Opacus' modules and optimizers made by hand.

What every training makes is an optimizer. The outermost modules with its parameters are models, and their first forward
pass with gradients is the latest moment: a `make_private` comes before it, and then nothing is left to do here. Where
there is no such pass to be seen, the optimizer's first step is.
"""

import copyreg
import functools
import gc
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.jit import _recursive
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.data.dataloader import _BaseDataLoaderIter
from torch.utils.hooks import RemovableHandle

from opacus_memprof import tracing, workload
from opacus_memprof.session import Session

T = TypeVar("T")


class PlainTraining:
    """Watches for optimizers from now on, for as long as nothing else has attached a model to the session."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._optimizers: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._lock = threading.RLock()
        self._compiled: list[tuple[weakref.ref[Any], bool]] = []  # by torch.compile; whether as one graph
        self._stepped: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._attached: weakref.WeakSet[nn.Module | Optimizer] = weakref.WeakSet()  # by this
        self._waiting: weakref.WeakKeyDictionary[nn.Module, RemovableHandle] = weakref.WeakKeyDictionary()
        self._known = workload.current().modules  # anew with each model that is attached
        made, steps, init = self._harmless(self._made), self._harmless(self._steps), Optimizer.__init__

        @functools.wraps(init)
        def wrapper(optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
            init(optimizer, *args, **kwargs)
            made(optimizer)

        def first_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            if not torch.compiler.is_compiling():
                steps(optimizer)

        note, compile = self._harmless(self._compiles), torch.compile

        @functools.wraps(compile)
        def compiling(model: Any = None, *args: Any, **kwargs: Any) -> Any:
            if not torch.compiler.is_compiling():
                note(model, kwargs.get("fullgraph", False))
            return compile(model, *args, **kwargs)

        torch.compile = compiling
        register_optimizer_step_pre_hook(first_step)
        Optimizer.__init__ = wrapper  # type: ignore[method-assign, assignment]
        _recursive.create_script_module = tracing.out_of_sight(_recursive.create_script_module)

    def _made(self, optimizer: Optimizer) -> None:
        if self._others_attach():
            return
        self._optimizers.add(optimizer)
        for model in _models(optimizer):
            if model not in self._waiting:
                first = _FirstForward(self._harmless(self._comes))
                self._waiting[model] = model.register_forward_pre_hook(first, prepend=True, with_kwargs=True)

    def _compiles(self, target: Any, whole: bool) -> None:
        if target is not None:  # else what is decorated comes next
            self._compiled.append((weakref.ref(getattr(target, "__self__", target)), whole))

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
        """A forward pass of a waiting model begins."""
        parameters = list(model.parameters())
        mine = _ids(parameters)
        trained = any(not mine.isdisjoint(_ids(_parameters(optimizer))) for optimizer in self._optimizers)
        if not trained or any(is_lazy(parameter) for parameter in parameters):
            return  # a functional call puts others in the place of the parameters; later, then
        if self._is_traced(model):
            return
        root = self._follow(model)
        from opacus_memprof.hooks.modules import EnterModel

        for hook in list(root._forward_pre_hooks.values()):  # torch has read these before it called us
            if isinstance(hook, EnterModel):
                hook(root, args, kwargs)

    def _steps(self, optimizer: Optimizer) -> None:
        """The first sign of a model of which no forward pass is seen: others call its parts, or it is compiled."""
        if optimizer in self._stepped or optimizer not in self._optimizers or self._others_attach():
            return
        self._stepped.add(optimizer)
        if optimizer in self._attached:
            return
        for model in _models(optimizer):
            if not self._is_traced(model):
                self._follow(model)

    def _is_traced(self, model: nn.Module) -> bool:
        """Whether compiled code may run into hooks on the model, which would break its graphs: what is compiled later
        is known to those who attach."""
        mine = set(_traceable(model))
        for reference, whole in self._compiled if mine else ():
            compiled = reference()
            if compiled is None:
                continue
            if whole and not isinstance(compiled, nn.Module):
                return True
            if any(not mine.isdisjoint(module.modules()) for module in tracing.modules_seen_by(compiled)):
                return True
        return False

    def _follow(self, model: nn.Module) -> nn.Module:
        """Returns the module that is followed: the model, or the GradSampleModule around it."""
        with self._lock:  # several threads may begin at once
            return self._follow_alone(model)

    def _follow_alone(self, model: nn.Module) -> nn.Module:
        if (waiting := self._waiting.pop(model, None)) is not None:
            waiting.remove()
        if self._others_attach():
            return model
        mine = _ids(model.parameters())
        optimizers = [one for one in self._optimizers if not mine.isdisjoint(_ids(_parameters(one)))]
        new = [one for one in optimizers if one not in self._attached]
        if model in self._attached:  # attaching it again would take away hooks that torch is about to call
            self._session.attach(*_as_made_private(new))
            self._attached.update(new)
            return model
        import opacus  # noqa: F401  # before what attaches, for at this import the session begins to watch for engines

        from opacus_memprof.hooks.inputs import tag_dataset

        private = _made_private(model)
        root = private if isinstance(private, nn.Module) else model
        for inside in root.modules():  # what was a model of its own is now a part of this one
            self._attached.discard(inside)
            if (waiting := self._waiting.pop(inside, None)) is not None:
                waiting.remove()
        self._session.attach(model if private is None else private, *_as_made_private(optimizers))
        self._attached.update((root, *optimizers))
        self._known = workload.current().modules
        for drawing in _alive(_BaseDataLoaderIter):  # from now on they are seen as they begin
            tag_dataset(drawing._dataset)
        return root


class _FirstForward:
    """A forward pre-hook, which calls `comes` in a forward pass that a backward can follow."""

    __slots__ = ("_comes",)

    def __init__(self, comes: Callable[[nn.Module, Any, Any], None]) -> None:
        self._comes = comes

    def __call__(self, model: nn.Module, args: Any, kwargs: Any = None) -> None:  # none if it was removed meanwhile
        if torch.is_grad_enabled() and not torch.compiler.is_compiling() and not torch._C._get_tracing_state():
            self._comes(model, args, kwargs)


copyreg.pickle(_FirstForward, tracing.reduce_to_nothing)


def _traceable(model: nn.Module) -> Iterator[nn.Module]:
    """The modules that would be seen from outside: not those in what torch.compile has made, where no hooks go."""
    if not tracing.compiled(model):
        yield model
        for child in model.children():
            yield from _traceable(child)


def _alive(kind: type[T]) -> list[T]:
    return [thing for thing in gc.get_objects() if issubclass(type(thing), kind)]  # never asks a proxy what it is


def _made_private(model: nn.Module) -> Any:
    """The GradSampleModule that the model is or is in, or the GradSampleHooks on it; None if it is a plain one."""
    from opacus.grad_sample import AbstractGradSampleHooks

    for hooks in _alive(AbstractGradSampleHooks):
        if model is hooks or any(model is inside for inside in hooks._module.modules()):
            return hooks
    return None


def _as_made_private(optimizers: Iterable[Optimizer]) -> list[Optimizer]:
    """Each, or the DPOptimizer around it, if there is one."""
    from opacus.optimizers import DPOptimizer

    around = {private.original_optimizer: private for private in _alive(DPOptimizer)}
    return [around.get(optimizer, optimizer) for optimizer in optimizers]


def _parameters(optimizer: Optimizer) -> Iterator[Tensor]:
    return (parameter for group in optimizer.param_groups for parameter in group["params"])


def _ids(tensors: Iterable[Any]) -> set[int]:
    return set(map(id, tensors))


def _models(optimizer: Optimizer) -> list[nn.Module]:
    """The modules that are in no other and have parameters of the optimizer's. Not what FSDP2 has sharded: its modules
    have other parameters in forward."""
    trained = [parameter for parameter in _parameters(optimizer) if isinstance(parameter, nn.Parameter)]
    if not trained or any(hasattr(parameter, "_local_tensor") for parameter in trained):
        return []
    modules = [module for module in _alive(nn.Module) if isinstance(vars(module).get("_modules"), dict)]
    inside = {id(child) for module in modules for child in module._modules.values()}
    wanted = _ids(trained)
    return [
        module for module in modules if id(module) not in inside and not wanted.isdisjoint(_ids(module.parameters()))
    ]
