# SPDX-License-Identifier: Apache-2.0
"""The layers of a model that flash_clip clips: which modules are tapped or repeated, and for which parameters."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from opacus_memprof.clipping.layers import GenericLayer, Layer, layer_for
from opacus_memprof.clipping.layers.sharded import check_sharding, refuse_repetition, sharded_layer
from opacus_memprof.errors import MemprofError


class LayerRegistry:
    """The layers of a model by module.

    Every trainable parameter belongs to the layers of all modules that own it, or to one GenericLayer above them.

    Args:
        model: the model.

    Raises:
        MemprofError: nothing is trainable, or the samples of a batch influence one another.
    """

    def __init__(self, model: nn.Module) -> None:
        check_model(model)
        check_sharding(model)
        self.is_sharded = isinstance(model, FSDPModule)
        make = sharded_layer if self.is_sharded else layer_for
        self.model = model
        self.at: dict[nn.Module, list[Layer]] = {}
        self._modules = dict(model.named_modules(remove_duplicate=False))
        self._names: dict[nn.Module, list[str]] = {}
        for name, module in self._modules.items():
            self._names.setdefault(module, []).append(name)
        for name, module in model.named_modules():
            trainable = [n for n, p in module.named_parameters(recurse=False) if p.requires_grad]
            if trainable:
                self.at[module] = [make(name, module, trainable)]
        self._leave_to_inner_modules()
        self.mark_shared()

    def layers(self) -> list[Layer]:
        """Returns all layers."""
        return [layer for layers in self.at.values() for layer in layers]

    def parameter_names(self) -> dict[nn.Parameter, str]:
        """Returns the names of the trainable parameters."""
        return {p: name for name, p in self.model.named_parameters() if p.requires_grad}

    def _leave_to_inner_modules(self) -> None:
        """Assigns parameters that both a module and its submodule own to the submodule."""
        for module, layers in list(self.at.items()):
            inside = {p for inner in module.modules() if inner is not module for p in inner.parameters(recurse=False)}
            for layer in layers:
                if isinstance(layer, GenericLayer):
                    layer.names = [name for name in layer.names if module.get_parameter(name) not in inside]
                    if not layer.names:
                        del self.at[module]

    def mark_shared(self) -> None:
        """Marks layers that share a parameter with other layers."""
        owners: dict[nn.Parameter, list[Layer]] = {}
        for layer in self.layers():
            for parameter in layer.trainable():
                owners.setdefault(parameter, []).append(layer)
        for layers in owners.values():
            for layer in layers:
                layer.is_shared |= len(layers) > 1

    def repeat_module(self, layer: Layer) -> None:
        """Switches a layer to repeating its module, instead of tapping input and output."""
        self._move(layer, layer.module)

    def repeat_at(self, layer: Layer, module: nn.Module) -> None:
        """Switches a layer to repeating a module that contains it."""
        self._move(layer, module)

    def parent_of(self, layer: Layer) -> nn.Module:
        """Returns the module that contains the layer's module. For the model itself, returns the model."""
        names = self._names[layer.module]
        parents = {name.rpartition(".")[0] for name in names}
        while len(parents) > 1:  # a module with several names: find the module that contains all of them
            longest = max(parents, key=lambda name: name.count(".") + bool(name))
            parents = (parents - {longest}) | {longest.rpartition(".")[0]}
        parent: nn.Module = self._modules[parents.pop()]
        return parent

    def _move(self, layer: Layer, target: nn.Module) -> None:
        """Moves the layer's parameters to a GenericLayer of `target`, and removes them from other layers inside it."""
        if self.is_sharded:
            refuse_repetition(layer)
        parameters = layer.trainable()
        names = self._names_in(target, parameters)
        for module in target.modules():
            for other in list(self.at.get(module, [])):
                if module is target and isinstance(other, GenericLayer):
                    continue
                if isinstance(other, GenericLayer):
                    other.names = [n for n in other.names if not _any_is(other.module.get_parameter(n), parameters)]
                else:
                    other.excluded |= {n for n, p in module._parameters.items() if _any_is(p, parameters)}
                if not other.trainable():
                    self.at[module].remove(other)
        layers = self.at.setdefault(target, [])
        generic = next((each for each in layers if isinstance(each, GenericLayer)), None)
        if generic is None:
            generic = GenericLayer(self._names[target][0], target, [])
            layers.append(generic)
        generic.names += [name for name in names if name not in generic.names]
        self.mark_shared()

    def _names_in(self, target: nn.Module, parameters: list[nn.Parameter]) -> list[str]:
        return [name for name, p in target.named_parameters() if _any_is(p, parameters)]


def _any_is(parameter: nn.Parameter | None, parameters: Iterable[nn.Parameter]) -> bool:
    return any(parameter is each for each in parameters)


def check_model(model: nn.Module) -> None:
    """Checks, by the types of layers, that samples are processed independently.

    Raises:
        MemprofError: nothing is trainable; a layer normalizes over the batch; an embedding has options under which
            per-sample gradients do not exist.
    """
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule) and any(p.requires_grad for p in module.parameters()):
            raise MemprofError(
                f"{name or 'the model'} is a TorchScript module, inside of which flash_clip sees no layers: train the "
                "Python module that it was made from, or freeze it."
            )
        mixes = isinstance(module, _BatchNorm) and not isinstance(module, _InstanceNorm)
        if module.training and (mixes or (isinstance(module, _InstanceNorm) and module.track_running_stats)):
            raise MemprofError(
                f"layer {name!r} ({type(module).__name__}) computes statistics of the whole batch, so that samples "
                "have no gradients of their own: replace it by GroupNorm (opacus.validators.ModuleValidator.fix does), "
                "or freeze it and call eval() on it before training."
            )
        if isinstance(module, nn.Embedding) and any(p.requires_grad for p in module.parameters(recurse=False)):
            _refuse_embedding_options(module, name)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and has_gradient_hook(parameter):
            raise MemprofError(
                f"a hook on the gradient of {name} (Tensor.register_hook) would change the gradient of the whole "
                "batch, and not those of its samples, which are clipped: remove it, and change the model's output or "
                "loss instead."
            )
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise MemprofError("flash_clip found no trainable parameter: every parameter has requires_grad=False.")


def has_gradient_hook(parameter: torch.Tensor) -> bool:
    """Returns whether the program has registered a hook on a parameter's gradient."""
    hooks = (getattr(hook, "func", hook) for hook in (parameter._backward_hooks or {}).values())
    return not all(map(is_own, hooks))


def is_own(hook: Any) -> bool:
    """Returns whether a hook belongs to this package. The profiler adds and removes its hooks at any time."""
    function = getattr(hook, "__func__", hook)
    kind = getattr(function, "__module__", None) or type(hook).__module__
    return kind.startswith("opacus_memprof") or getattr(hook, "_is_opacus_memprof", False)


def _refuse_embedding_options(module: nn.Embedding, name: str) -> None:
    for option in ("max_norm", "scale_grad_by_freq", "sparse"):
        if getattr(module, option):
            raise MemprofError(
                f"layer {name!r} (Embedding) has {option}={getattr(module, option)}, under which the samples of a "
                f"batch have no exact gradients of their own; build it without {option}."
            )
