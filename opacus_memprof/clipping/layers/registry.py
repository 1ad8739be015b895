# SPDX-License-Identifier: Apache-2.0
"""The layers of a model that flash_clip clips: which modules are tapped or repeated, and for which parameters.

In a model that FSDP2 has sharded, every rank holds a part of each parameter, and the whole parameter only while its
module runs. Each layer has a twin of its module, without FSDP's hooks and always with the shards, which the optimizer
uses. The twin's shapes and options are the module's.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.parameter import is_lazy
from torch.nn.utils import parametrize

from opacus_memprof.clipping.forwards.state import is_own
from opacus_memprof.clipping.layers import LAYERS, GenericLayer, Layer, layer_for
from opacus_memprof.errors import MemprofError

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def check_sharding(model: nn.Module) -> None:
    """Checks that a model is not sharded, or sharded by `fully_shard` over all ranks.

    Raises:
        MemprofError: it is sharded in another way.
    """
    if any(isinstance(each, FullyShardedDataParallel) for each in model.modules()):
        raise MemprofError("flash_clip does not support FullyShardedDataParallel (FSDP1); use fully_shard (FSDP2).")
    is_sharded = isinstance(model, FSDPModule)
    if not is_sharded and any(isinstance(each, FSDPModule) for each in model.modules()):
        raise MemprofError("parts of the model are sharded by fully_shard, but the model is not; shard it as well.")
    for name, parameter in model.named_parameters():
        if isinstance(parameter, DTensor):
            _check_parameter(name, parameter, is_sharded)
        elif is_sharded and parameter.requires_grad:
            raise MemprofError(f"{name} is trained but not sharded by fully_shard; leave it out of ignored_params.")


def _check_parameter(name: str, parameter: DTensor, is_sharded: bool) -> None:
    mesh, placements = parameter.device_mesh, parameter.placements
    plain = type(placements[-1]) is Shard and all(isinstance(each, Replicate) for each in placements[:-1])
    if not is_sharded or not plain:
        raise MemprofError(
            f"{name} is placed as {placements}, as in tensor or context parallelism, where a rank has a part of each "
            "sample: flash_clip supports only data parallelism, by DDP or fully_shard."
        )
    if mesh.size() != dist.get_world_size():
        raise MemprofError(
            f"{name} is sharded over {mesh.size()} of {dist.get_world_size()} ranks, but the expected batch size and "
            "the noise are those of all ranks; give fully_shard a mesh of all of them."
        )


def refuse_context_parallel() -> None:
    """Raises MemprofError inside `context_parallel`, which replaces the attention function."""
    attention = functional.scaled_dot_product_attention
    if (getattr(attention, "__module__", None) or "").startswith("torch.distributed"):
        raise MemprofError(
            "under context parallelism a rank has a part of each sample: flash_clip supports only data parallelism, by "
            "DDP or fully_shard."
        )


def refuse_cached_parameters(model: nn.Module) -> None:
    """Raises MemprofError inside `parametrize.cached()`, if a module of the model is parametrized."""
    if parametrize._cache_enabled and any(map(parametrize.is_parametrized, model.modules())):
        raise MemprofError(
            "the model is called in torch.nn.utils.parametrize.cached(), so that its parametrized weights, from which "
            "gradients are formed, are those of an earlier call: call the model outside of it."
        )


def sharded_layer(name: str, module: nn.Module, trainable: Sequence[str]) -> Layer:
    """Returns the layer that clips the parameters of a module of a sharded model.

    Args:
        name: see `layer_for`.
        module: see `layer_for`.
        trainable: see `layer_for`.

    Raises:
        MemprofError: its forward would have to be repeated.
    """
    twin = _twin(module)
    shards = dict(twin._parameters)
    if type(twin) not in LAYERS:
        for key, shard in shards.items():
            twin._parameters[key] = None if shard is None else _stand_in(shard)
    layer = layer_for(name, twin, trainable)
    twin._parameters.update(shards)
    if isinstance(layer, GenericLayer):
        refuse_repetition(layer)
    layer.running_module = module
    return layer


def refuse_repetition(layer: Layer, reason: str = "") -> None:
    """Refuses a layer whose forward would be repeated in backward, when FSDP2 has freed its parameters.

    Args:
        layer: the layer.
        reason: a sentence on why its forward would be repeated.

    Raises:
        MemprofError: always.
    """
    raise MemprofError(
        f"the gradients of {layer.describe()} need its forward repeated, or that of a module around it, in backward, "
        f"when FSDP2 has freed parameters: freeze it, or use DDP. {reason}".rstrip()
    )


def _twin(module: nn.Module) -> nn.Module:
    kind = type(module).__mro__[2] if isinstance(module, FSDPModule) else type(module)
    twin: nn.Module = object.__new__(kind)
    twin.__dict__.update(module.__dict__)
    twin.__dict__["_parameters"] = dict(module._parameters)
    twin.__dict__.update({hooks: OrderedDict() for hooks in _HOOKS})
    return twin


def _stand_in(shard: torch.Tensor) -> nn.Parameter:
    """Returns a parameter of the whole shape, whose values show how a module uses it."""
    generator = torch.Generator(shard.device).manual_seed(0)
    values = torch.randn(shard.shape, dtype=shard.dtype, device=shard.device, generator=generator)
    return nn.Parameter(values, requires_grad=shard.requires_grad)


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
        """Returns the module that contains the layer's module and has a forward. Of the model itself, the model."""
        names = self._names[layer.module]
        parents = {name.rpartition(".")[0] for name in names}
        while len(parents) > 1:  # a module with several names: find the module that contains all of them
            longest = max(parents, key=lambda name: name.count(".") + bool(name))
            parents = (parents - {longest}) | {longest.rpartition(".")[0]}
        path = parents.pop()
        while path and isinstance(self._modules[path], (nn.ModuleList, nn.ModuleDict)):
            path = path.rpartition(".")[0]
        parent: nn.Module = self._modules[path]
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
    for name, parameter in model.named_parameters():
        if is_lazy(parameter):
            raise MemprofError(
                f"{name} belongs to a lazy module, and has no shape before the first forward: call the model with a "
                "batch before you make it private."
            )
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise MemprofError(
                f"{repr(name) if name else 'the model'} is a TorchScript module, inside of which flash_clip sees no "
                "layers: use the Python module that it was made from."
            )
        # Other forwards, as of a frozen BatchNorm, show in the proof whether they mix samples.
        is_torchs = "forward" not in vars(module) and type(module).forward.__module__.startswith("torch.nn.")
        mixes = isinstance(module, _BatchNorm) and not isinstance(module, _InstanceNorm)
        if (
            module.training
            and is_torchs
            and (mixes or (isinstance(module, _InstanceNorm) and module.track_running_stats))
        ):
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


def _refuse_embedding_options(module: nn.Embedding, name: str) -> None:
    for option in ("max_norm", "scale_grad_by_freq", "sparse"):
        if getattr(module, option):
            raise MemprofError(
                f"layer {name!r} (Embedding) has {option}={getattr(module, option)}, under which the samples of a "
                f"batch have no exact gradients of their own; build it without {option}."
            )
