# SPDX-License-Identifier: Apache-2.0
"""Models that FSDP2 has sharded: every rank holds a part of each parameter, and has the whole of it only while the
module that owns it runs.

A layer of such a model has a twin of its module: without FSDP's hooks, and always with the shards, which the optimizer
has. Its shapes and options are the module's.
"""

from __future__ import annotations

import zlib
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn import functional
from torch.utils._pytree import tree_flatten, tree_unflatten

from opacus_memprof.clipping.layers import LAYERS, GenericLayer, Layer, layer_for
from opacus_memprof.clipping.parallel.agreement import Agreement, computing_device
from opacus_memprof.clipping.repetition import RandomState
from opacus_memprof.errors import MemprofError

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_LEAST = 4  # samples of a batch whose situation is checked again, and at most this part of it
_SHARE = 16


def check_sharding(model: nn.Module) -> None:
    """Checks that a model is not sharded, or sharded by ``fully_shard`` over all ranks.

    Raises:
        MemprofError: it is sharded in another way.
    """
    if any(isinstance(each, FullyShardedDataParallel) for each in model.modules()):
        raise MemprofError("flash_clip does not know FullyShardedDataParallel (FSDP1); use fully_shard (FSDP2).")
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
    """Raises MemprofError inside of ``context_parallel``, which replaces attention's function."""
    attention = functional.scaled_dot_product_attention
    if (getattr(attention, "__module__", None) or "").startswith("torch.distributed"):
        raise MemprofError(
            "under context parallelism a rank has a part of each sample: flash_clip knows data parallelism alone, by "
            "DDP or fully_shard."
        )


def sharded_layer(name: str, module: nn.Module, trainable: Sequence[str]) -> Layer:
    """The layer that clips the parameters of a module of a sharded model.

    Args:
        name, module, trainable: see ``layer_for``.

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
    """Raises MemprofError: the layer's parameters are not there when its forward would be repeated. ``reason`` is a
    sentence that says why it would be."""
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
    """A parameter of the whole shape, with numbers that tell what a module computes with it."""
    generator = torch.Generator(shard.device).manual_seed(0)
    values = torch.randn(shard.shape, dtype=shard.dtype, device=shard.device, generator=generator)
    return nn.Parameter(values, requires_grad=shard.requires_grad)


@dataclass
class SharedProof:
    """What all ranks prove together, in the same forwards.

    Attributes:
        is_new: whether a situation is proved for the first time, rather than checked again.
        is_own: whether it is the situation of this rank's batch.
        args, kwargs: the arguments, of one rank's samples.
        batch: the number of samples.
        random: what the random number generators begin with.
    """

    is_new: bool
    is_own: bool
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    batch: int
    random: RandomState


class SharedSamples:
    """Has all ranks prove the same situation with the same samples and random numbers: in the same forwards, for whose
    parameters all ranks are needed, and with the same result.

    Args:
        model: the model.
    """

    def __init__(self, model: nn.Module) -> None:
        self.agreement = Agreement(computing_device(next(model.parameters())))
        self._modules = [each for each in model.modules() if isinstance(each, FSDPModule)]

    def reshard(self) -> None:
        """Has every module show its shards: those that a forward without a backward has left whole show others."""
        for module in self._modules:
            if any(not isinstance(p, DTensor) for p in module.parameters()):
                module.reshard()

    def next(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        batch: int,
        situation: object,
        need: int,
        random: RandomState | None,
        error: MemprofError | None,
    ) -> SharedProof | None:
        """What is proved next. Called by all ranks before each forward, until it returns None.

        Args:
            args, kwargs: of the model.
            batch: the number of samples of this rank.
            situation: a description of this rank's, without what differs between processes.
            need: 2 if this rank's situation is new, 1 if it is to be checked again, and 0 if neither.
            random: what the random number generators of this rank begin with.
            error: what this rank has raised already.

        Raises:
            MemprofError: ``error``, or another rank's; or ranks call the model with arguments of different kinds.
        """
        world, rank = self.agreement.world_size, self.agreement.rank
        leaves, structure = tree_flatten((args, kwargs))
        kind = zlib.crc32(repr((str(structure), [_kind(leaf) for leaf in leaves])).encode())
        # The most urgent first, of these the largest batch, of these the first rank.
        place = (need << 48) + (batch << 16) + world - rank
        kinds, (_, first) = self.agreement.settle(error, [kind, place])
        if kinds[0] != kinds[1]:
            raise MemprofError("the ranks call the model with different kinds of arguments; FSDP2 needs the same.")
        if not first >> 48:
            return None
        source = world - first % (1 << 16)
        sent: list[Any] = [None] * 4
        if rank == source:
            count = batch if need == 2 else min(batch, max(_LEAST, -(-batch // _SHARE)))
            sent = [[_some(leaf, batch, count) for leaf in leaves], count, random, repr(situation)]
        dist.broadcast_object_list(sent, source)
        if sent[0] is None:  # ranks that are simulated, one without the others
            return None
        moved = [
            new.to(own.device) if isinstance(new, torch.Tensor) else new
            for new, own in zip(sent[0], leaves, strict=True)
        ]
        args, kwargs = tree_unflatten(moved, structure)
        is_new = first >> 48 == 2
        return SharedProof(is_new, sent[3] == repr(situation), args, kwargs, sent[1], self._on_own_device(sent[2]))

    def _on_own_device(self, random: RandomState) -> RandomState:
        device = self.agreement.device
        return random if random.cuda is None else replace(random, cuda=(device.index, random.cuda[1]))


def _kind(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return leaf.dim(), leaf.dtype
    return leaf if leaf is None or isinstance(leaf, (bool, str)) else type(leaf)


def _some(leaf: Any, batch: int, count: int) -> Any:
    """The first samples of a leaf, on the CPU."""
    if not isinstance(leaf, torch.Tensor):
        return leaf
    leaf = leaf.detach()
    return (leaf[:count] if leaf.dim() and len(leaf) == batch else leaf).cpu()
