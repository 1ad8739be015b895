# SPDX-License-Identifier: Apache-2.0
"""Models that FSDP2 has sharded.

Every rank holds a part of each parameter, and the whole parameter only while its module runs. Each layer has a twin of
its module, without FSDP's hooks and always with the shards, which the optimizer uses. The twin's shapes and options are
the module's.
"""

from collections import OrderedDict
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn import functional

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
            "sample: flash_clip knows data parallelism alone, by DDP or fully_shard."
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
            "under context parallelism a rank has a part of each sample: flash_clip knows data parallelism alone, by "
            "DDP or fully_shard."
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
    """Raises MemprofError, because the layer's parameters are gone when its forward would be repeated.

    `reason` is a sentence that says why it would be.

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
