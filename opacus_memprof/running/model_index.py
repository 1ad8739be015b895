# SPDX-License-Identifier: Apache-2.0
"""Finds the models that contain a parameter, by looking through the heap as seldom as possible."""

import gc
import weakref
from collections.abc import Iterable
from typing import Any, TypeVar

from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

T = TypeVar("T")


def instances(cls: type[T]) -> list[T]:
    """All live instances of a class. `type(...)` instead of isinstance, which would evaluate weak proxies."""
    return [instance for instance in gc.get_objects() if issubclass(type(instance), cls)]


class ModelIndex:
    """The outermost modules by the parameters in them. It is made by one look through the heap, and again after a
    module has got another submodule or parameter: a program may construct an optimizer for each parameter of a large
    model, and a look through its heap takes a tenth of a second."""

    def __init__(self) -> None:
        self._is_current = False
        # By the parameter's id: the module that has it, its name there, and the model around it. Even a weak reference
        # to a parameter would keep torch from swapping it.
        self._places: dict[int, list[tuple[weakref.ref[nn.Module], str, weakref.ref[nn.Module]]]] = {}
        register_module_module_registration_hook(self._on_registration)
        register_module_parameter_registration_hook(self._on_registration)

    def models_of(self, parameters: Iterable[Tensor]) -> list[nn.Module]:
        """The outermost modules that contain any of these parameters."""
        if not self._is_current:
            self._look_through_heap()
        found: dict[int, nn.Module] = {}
        for parameter in parameters:
            for module_ref, name, model_ref in self._places.get(id(parameter), ()):
                module, model = module_ref(), model_ref()
                if module is not None and model is not None and module._parameters.get(name) is parameter:
                    found[id(model)] = model
        return list(found.values())

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
