# SPDX-License-Identifier: Apache-2.0
"""Proofs under FSDP2, which all ranks run together because each forward gathers parameters from all ranks."""

import zlib
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from opacus_memprof.clipping.agreement import Agreement, computing_device
from opacus_memprof.clipping.forwards.state import RandomState
from opacus_memprof.errors import MemprofError

_LEAST = 4  # a repeated check uses at least so many samples, and one part in _SHARE of the batch
_SHARE = 16


@dataclass
class JointProof:
    """A proof that all ranks run together, with the same forwards.

    Attributes:
        is_new: whether a situation is proved for the first time, rather than checked again.
        is_own: whether it is the situation of this rank's batch.
        args, kwargs: the arguments, with one rank's samples.
        batch: the number of samples.
        random: the initial state of the random number generators.
    """

    is_new: bool
    is_own: bool
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    batch: int
    random: RandomState


class JointProofs:
    """Proofs of the same situation with the same samples and random numbers on all ranks.

    Every forward needs the parameters of all ranks, and all ranks must come to the same result.

    Args:
        model: the model.
    """

    def __init__(self, model: nn.Module) -> None:
        self.agreement = Agreement(computing_device(next(model.parameters())))
        self._modules = [each for each in model.modules() if isinstance(each, FSDPModule)]

    def reshard(self) -> None:
        """Reshards modules that a forward without a backward has left gathered."""
        for module in self._modules:
            if any(not isinstance(p, DTensor) for p in module.parameters()):
                module.reshard()

    def next(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        batch: int,
        situation: object,
        trained: Iterable[str],
        need: int,
        random: RandomState | None,
        error: MemprofError | None,
    ) -> JointProof | None:
        """Returns the next proof. All ranks call it before each forward, until it returns None.

        Args:
            args: the model's positional arguments.
            kwargs: its keyword arguments.
            batch: the number of samples of this rank.
            situation: a description of this rank's situation, without details that differ between processes.
            trained: the names of the trained parameters, whose gradients backward reduces over the ranks.
            need: 2 if this rank's situation is new, 1 if it must be checked again, otherwise 0.
            random: the initial state of this rank's random number generators.
            error: an error that this rank has raised, or None.

        Raises:
            MemprofError: `error`, or another rank's error; or ranks call the model with arguments of different kinds,
                or train different parameters.
        """
        world, rank = self.agreement.world_size, self.agreement.rank
        leaves, structure = tree_flatten((args, kwargs))
        kind = zlib.crc32(repr((str(structure), [_kind(leaf) for leaf in leaves])).encode())
        # Priority: most urgent, then largest batch, then lowest rank.
        place = (need << 48) + (batch << 16) + world - rank
        kinds, names, (_, first) = self.agreement.settle(error, [kind, zlib.crc32(repr([*trained]).encode()), place])
        if kinds[0] != kinds[1]:
            raise MemprofError("the ranks call the model with different kinds of arguments; FSDP2 needs equal kinds.")
        if names[0] != names[1]:
            raise MemprofError(
                "the ranks train different parameters of the model, which FSDP2 shards over all of them: freeze and "
                "unfreeze them on all ranks alike."
            )
        if not first >> 48:
            return None
        source = world - first % (1 << 16)
        sent: list[Any] = [None] * 4
        if rank == source:
            count = batch if need == 2 else min(batch, max(_LEAST, -(-batch // _SHARE)))
            sent = [[_some(leaf, batch, count) for leaf in leaves], count, random, repr(situation)]
        dist.broadcast_object_list(sent, source)
        if sent[0] is None:  # a simulated rank runs without the others
            return None
        moved = [
            new.to(own.device) if isinstance(new, torch.Tensor) else new
            for new, own in zip(sent[0], leaves, strict=True)
        ]
        args, kwargs = tree_unflatten(moved, structure)
        is_new = first >> 48 == 2
        return JointProof(is_new, sent[3] == repr(situation), args, kwargs, sent[1], self._on_own_device(sent[2]))

    def _on_own_device(self, random: RandomState) -> RandomState:
        device = self.agreement.device
        return replace(random, cuda=[(device.index, state) for _, state in random.cuda])


def _kind(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return leaf.dim(), leaf.dtype
    return leaf if leaf is None or isinstance(leaf, (bool, str)) else type(leaf)


def _some(leaf: Any, batch: int, count: int) -> Any:
    """Returns the first samples of a leaf, on the CPU."""
    if not isinstance(leaf, torch.Tensor):
        return leaf
    leaf = leaf.detach()
    return (leaf[:count] if leaf.dim() and len(leaf) == batch else leaf).cpu()
