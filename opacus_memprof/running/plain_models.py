# SPDX-License-Identifier: Apache-2.0
"""Attaches models that a program trains without a PrivacyEngine.

Examples are training without privacy, as a baseline, and Opacus' modules and optimizers that are constructed directly.

Every training constructs an optimizer. The outermost modules that contain its parameters are assumed to be models. They
are attached in their first forward pass with gradients: a program calls `make_private` before that, and then nothing is
left to do. If no such forward pass is seen, the models are attached at the optimizer's first step.
"""

import copyreg
import gc
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.jit import _recursive
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.data.dataloader import _BaseDataLoaderIter
from torch.utils.hooks import RemovableHandle

from opacus_memprof.recording import native, observations
from opacus_memprof.recording.attachment import hide_profiler_hooks, looks_compiled, reachable_modules, reduce_to_noop
from opacus_memprof.recording.faults import CallHook, contain, observe
from opacus_memprof.recording.startup import AfterImport
from opacus_memprof.session import Session

T = TypeVar("T")
_FIRST_BACKWARDS = 3
# Optimizers that are not torch's: their module, class and update, and what returns the states of one.
_OTHER_OPTIMIZERS: list[tuple[str, str, str, Callable[[Any], list[Any]]]] = [
    (  # imported if torch is Keras' backend
        "keras.src.backend.torch.optimizers.torch_optimizer",
        "TorchOptimizer",
        "apply",
        lambda optimizer: [variable.value for variable in optimizer.variables],
    ),
    ("fastai.optimizer", "Optimizer", "step", lambda optimizer: list(optimizer.state.values())),
]


class FollowWithoutEngine:
    """Patches torch so that models which train without a PrivacyEngine are attached to `session`.

    Does nothing once anything else has attached a model to it.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._optimizers: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._lock = threading.RLock()
        self._compiled: list[tuple[weakref.ref[Any], bool]] = []  # argument of torch.compile, and fullgraph
        self._stepped: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._attached: weakref.WeakSet[nn.Module | Optimizer] = weakref.WeakSet()  # by this object
        self._of_tensors: weakref.WeakSet[Optimizer] = weakref.WeakSet()  # that are in no module
        self._waiting: weakref.WeakKeyDictionary[nn.Module, RemovableHandle] = weakref.WeakKeyDictionary()
        self._modules_when_attached = observations.layer_shapes().modules  # hooks replace it when they attach a model
        self._index = ModelIndex()
        self._backwards = 0  # after which models were looked for that no optimizer updates
        self._updates_by_hand = False
        Optimizer.__init__ = observe(Optimizer.__init__, self._observe_init)  # type: ignore[method-assign]
        register_optimizer_step_pre_hook(self._on_step)
        torch.compile = observe(torch.compile, self._observe_compile)
        torch.autograd.backward = observe(torch.autograd.backward, self._observe_backward)
        torch.autograd.grad = observe(torch.autograd.grad, self._observe_grad)  # type: ignore[assignment]
        _recursive.create_script_module = hide_profiler_hooks(_recursive.create_script_module)
        for module, name, update, states_of in _OTHER_OPTIMIZERS:
            AfterImport(module, partial(_follow_class, module, name, update, states_of))

    def _observe_init(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> CallHook:
        yield
        self._on_new_optimizer(optimizer)

    def _observe_compile(self, model: Any = None, *args: Any, fullgraph: bool = False, **kwargs: Any) -> CallHook:
        if model is not None:  # None if torch.compile is used as a decorator with arguments: it is called again
            self._compiled.append((weakref.ref(getattr(model, "__self__", model)), fullgraph))
        yield

    def _observe_backward(self, *args: Any, **kwargs: Any) -> CallHook:
        observations.layer_shapes().waiting = 0
        yield
        self._on_gradients(self._index.parameters_with_gradients)

    def _observe_grad(self, outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> CallHook:
        observations.layer_shapes().waiting = 0
        yield
        self._on_gradients(lambda: native.tensors_in((inputs,)))

    def _on_gradients(self, parameters: Callable[[], Iterable[Tensor]]) -> None:
        """Attaches models that no optimizer updates: those with `parameters()` that have got gradients.

        Looks for them after the first few backward passes of a program that has constructed no optimizer.
        """
        if self._updates_by_hand:
            self._search_owners()
        elif not self._optimizers and self._backwards < _FIRST_BACKWARDS and not self._attached_by_others():
            self._backwards += 1
            for model in self._index.models_of(parameters()):
                if not self._is_traced(model):
                    self._updates_by_hand = True
                    self._attach(model)

    def _on_new_optimizer(self, optimizer: Optimizer) -> None:
        if self._attached_by_others():
            return
        self._optimizers.add(optimizer)
        for model in self._models(optimizer):
            if model not in self._waiting:
                hook = _FirstForwardHook(self._on_first_forward)
                self._waiting[model] = model.register_forward_pre_hook(hook, prepend=True, with_kwargs=True)

    @contain("following a model that trains without Opacus")
    def _on_first_forward(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        parameters = list(model.parameters())
        ids = _ids(parameters)
        trained = any(not ids.isdisjoint(_ids(_parameters(optimizer))) for optimizer in self._optimizers)
        if not trained or any(is_lazy(parameter) for parameter in parameters):
            from opacus_memprof.hooks.forward_shapes import observe_transforms

            observe_transforms(model)
            return  # torch.func.functional_call has swapped the parameters, or they have no shape yet
        if self._is_traced(model):
            return
        root = self._attach(model)
        from opacus_memprof.hooks.modules import ModelForwardPreHook

        for hook in list(
            root._forward_pre_hooks.values()
        ):  # too late for this call: torch has already listed its hooks
            if isinstance(hook, ModelForwardPreHook):
                hook(root, args, kwargs)

    @contain("following a model that trains without Opacus")
    def _on_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Attaches models whose forward was not seen: they are compiled, or the program calls their submodules."""
        if torch.compiler.is_compiling():
            return
        if optimizer in self._of_tensors:
            return self._claim_tensors(optimizer)
        if optimizer in self._stepped or optimizer not in self._optimizers or self._attached_by_others():
            return
        self._stepped.add(optimizer)
        if optimizer in self._attached:
            return
        for model in self._models(optimizer):
            if not self._is_traced(model):
                self._attach(model)
        if not self._index.models_of(_parameters(optimizer)):  # tensors that are in no module
            self._session.attach(optimizer)
            self._attached.add(optimizer)
            self._of_tensors.add(optimizer)
            self._claim_tensors(optimizer)

    def _claim_tensors(self, optimizer: Optimizer) -> None:
        from opacus_memprof.hooks.owners import claim_tensors

        claim_tensors(optimizer)

    def _search_owners(self) -> None:
        from opacus_memprof.hooks import search_owners

        search_owners()

    def _models(self, optimizer: Optimizer) -> list[nn.Module]:
        """Returns the outermost modules that contain parameters of the optimizer.

        Omits modules that FSDP2 has sharded, because they have other parameters during forward.
        """
        trained = [parameter for parameter in _parameters(optimizer) if isinstance(parameter, nn.Parameter)]
        if not trained or any(hasattr(parameter, "_local_tensor") for parameter in trained):
            return []
        return self._index.models_of(trained)

    def _attached_by_others(self) -> bool:
        return observations.layer_shapes().modules is not self._modules_when_attached

    def _is_traced(self, model: nn.Module) -> bool:
        """Returns whether code that was compiled before may call the model: hooks on it would break its graphs.

        `hooks.torch_compile` handles functions that are compiled after attaching.
        """
        modules = set(_uncompiled_modules(model))
        for reference, fullgraph in self._compiled if modules else ():
            compiled = reference()
            if compiled is None:
                continue
            if fullgraph and not isinstance(compiled, nn.Module):
                return True
            if any(not modules.isdisjoint(module.modules()) for module in reachable_modules(compiled)):
                return True
        return False

    def _attach(self, model: nn.Module) -> nn.Module:
        """Attaches the model and its optimizers.

        Returns the module that is attached: the model, or the GradSampleModule around it.
        """
        with self._lock:  # several threads may run their first forward at once
            return self._attach_locked(model)

    def _attach_locked(self, model: nn.Module) -> nn.Module:
        self._stop_waiting(model)
        if self._attached_by_others():
            return model
        ids = _ids(model.parameters())
        optimizers = [each for each in self._optimizers if not ids.isdisjoint(_ids(_parameters(each)))]
        if model in self._attached:  # attaching it again would remove hooks that torch is about to call
            new = [optimizer for optimizer in optimizers if optimizer not in self._attached]
            self._session.attach(*_dp_optimizers(new))
            self._attached.update(new)
            return model
        from opacus_memprof.hooks.inputs import tag_dataset

        opacus_model = _opacus_model(model)
        root = opacus_model if isinstance(opacus_model, nn.Module) else model
        for (
            module
        ) in root.modules():  # one of them may have been attached as a model before it became a part of this model
            self._attached.discard(module)
            self._stop_waiting(module)
        self._session.attach(model if opacus_model is None else opacus_model, *_dp_optimizers(optimizers))
        self._attached.update((root, *optimizers))
        self._modules_when_attached = observations.layer_shapes().modules
        for iterator in instances(_BaseDataLoaderIter):  # hooks.inputs tags later ones
            tag_dataset(iterator._dataset)
        return root

    def _stop_waiting(self, model: nn.Module) -> None:
        if (handle := self._waiting.pop(model, None)) is not None:
            handle.remove()


@contain("following optimizers that are not torch's")
def _follow_class(module: str, name: str, update: str, states_of: Callable[[Any], list[Any]]) -> None:
    from opacus_memprof.hooks.optimizer import observe_other_update

    cls = getattr(sys.modules[module], name)
    setattr(cls, update, observe(getattr(cls, update), partial(observe_other_update, states_of)))


class _FirstForwardHook:
    """A forward pre-hook that calls `callback(model, args, kwargs)` if a backward pass can follow."""

    __slots__ = ("_callback",)

    def __init__(self, callback: Callable[[nn.Module, Any, Any], None]) -> None:
        self._callback = callback

    # torch passes no kwargs if the hook was removed during this call.
    def __call__(self, model: nn.Module, args: Any, kwargs: Any = None) -> None:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling() and not torch._C._get_tracing_state():
            self._callback(model, args, kwargs)


copyreg.pickle(_FirstForwardHook, reduce_to_noop)


def _uncompiled_modules(model: nn.Module) -> Iterator[nn.Module]:
    """Yields the modules that can have hooks: all except those inside compiled modules."""
    if not looks_compiled(model):
        yield model
        for child in model.children():
            yield from _uncompiled_modules(child)


def _opacus_model(model: nn.Module) -> Any:
    """Returns the GradSampleModule that the model is or is in, or its GradSampleHooks; None without Opacus."""
    from opacus_memprof.hooks.vocabulary import find

    kind = find("opacus.grad_sample", "AbstractGradSampleHooks")
    for hooks in () if kind is None else instances(kind):
        if model is hooks or any(model is module for module in hooks._module.modules()):
            return hooks
    return None


def _dp_optimizers(optimizers: Iterable[Optimizer]) -> list[Optimizer]:
    """Returns for each optimizer the DPOptimizer around it, or itself if there is none."""
    from opacus_memprof.hooks.vocabulary import find

    kind = find("opacus.optimizers", "DPOptimizer")
    wrappers = {wrapper.original_optimizer: wrapper for wrapper in (() if kind is None else instances(kind))}
    return [wrappers.get(optimizer, optimizer) for optimizer in optimizers]


def _parameters(optimizer: Optimizer) -> Iterator[Tensor]:
    return (parameter for group in optimizer.param_groups for parameter in group["params"])


def _ids(tensors: Iterable[Any]) -> set[int]:
    return set(map(id, tensors))


def instances(cls: type[T]) -> list[T]:
    """Returns all live instances of a class. Uses `type(...)`, because isinstance would evaluate weak proxies."""
    return [instance for instance in gc.get_objects() if issubclass(type(instance), cls)]


class ModelIndex:
    """The outermost modules by the parameters in them.

    The index is built by one search through the heap, and again after a module has got another submodule or parameter.
    A program may construct an optimizer for each parameter of a large model, and a search takes a tenth of a second.
    """

    def __init__(self) -> None:
        self._is_current = False
        # By the parameter's id: the module that has it, its name there, and the outermost module. Even a weak reference
        # to a parameter would keep torch from swapping it.
        self._places: dict[int, list[tuple[weakref.ref[nn.Module], str, weakref.ref[nn.Module]]]] = {}
        register_module_module_registration_hook(self._on_registration)
        register_module_parameter_registration_hook(self._on_registration)

    def models_of(self, parameters: Iterable[Tensor]) -> list[nn.Module]:
        """Returns the outermost modules that contain any of these parameters."""
        if not self._is_current:
            self._look_through_heap()
        found: dict[int, nn.Module] = {}
        for parameter in parameters:
            for module_ref, name, model_ref in self._places.get(id(parameter), ()):
                module, model = module_ref(), model_ref()
                if module is not None and model is not None and module._parameters.get(name) is parameter:
                    found[id(model)] = model
        return list(found.values())

    def parameters_with_gradients(self) -> list[Tensor]:
        """Returns the parameters of all modules that have a gradient."""
        self._look_through_heap()
        places = [place for found in self._places.values() for place in found]
        modules = [(module, name) for module_ref, name, _ in places if (module := module_ref()) is not None]
        parameters = (module._parameters.get(name) for module, name in modules)
        return [parameter for parameter in parameters if parameter is not None and parameter.grad is not None]

    def _on_registration(self, module: nn.Module, name: str, value: Any) -> None:
        self._is_current = False

    def _look_through_heap(self) -> None:
        self._is_current = True
        self._places.clear()
        modules = [module for module in instances(nn.Module) if isinstance(vars(module).get("_modules"), dict)]
        children = {id(child) for module in modules for child in module._modules.values()}
        for model in modules:
            for module in () if id(model) in children else model.modules():
                for name, parameter in module._parameters.items():
                    if parameter is not None:
                        place = weakref.ref(module), name, weakref.ref(model)
                        self._places.setdefault(id(parameter), []).append(place)
