# SPDX-License-Identifier: Apache-2.0
"""The reduce-scatter of clipped sums under FSDP2: each rank gets its shards of the sums over all ranks.

A large sum is sent as it is. Small ones, as of LoRA, are many: sending each by itself would take the host longer than
the network, so they are sent together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

_SMALL = 2 << 20  # bytes of a sum that is sent together with others
_MOST = 8 << 20  # bytes of sums that are sent together

Sum = tuple[Any, torch.Tensor]


def scatter(sums: Iterator[Sum]) -> Iterator[Sum]:
    """Yields each parameter with this rank's shard of the sum over the ranks that have different shards. While some are
    on their way, the next sums are formed.

    Args:
        sums: each parameter, a DTensor, with its sum on this rank, of the whole shape. All ranks have the same
            parameters in the same order.
    """
    sent: Callable[[], Iterator[Sum]] | None = None
    for some in _together(sums):
        started = _send_one(*some.pop()) if len(some) == 1 else _send_many(some)
        if sent is not None:
            yield from sent()
        sent = started
    if sent is not None:
        yield from sent()


def _together(sums: Iterator[Sum]) -> Iterator[list[Sum]]:
    """What is sent at once. Refers to no sum of which the list is empty again."""
    some: list[Sum] = []
    alike, size = None, 0
    for parameter, total in sums:
        own = (parameter.device_mesh, parameter.placements, total.dtype, total.device)
        is_small = total.nbytes <= _SMALL and _shard_dimensions(parameter) == [0]
        if some and (not is_small or own != alike or size + total.nbytes > _MOST):
            yield some
            some, size = [], 0
        some.append((parameter, total))
        alike, size = own, size + total.nbytes
        del total
        if not is_small:
            yield some
            some, size = [], 0
    if some:
        yield some


def _shard_dimensions(parameter: Any) -> list[int]:
    """The dimensions along which ranks have different parts; -1 for those that are not plainly cut."""
    others = [each for each in parameter.placements if not isinstance(each, Replicate)]
    return [each.dim if type(each) is Shard else -1 for each in others]


def _send_one(parameter: Any, total: torch.Tensor) -> Callable[[], Iterator[Sum]]:
    mesh, placements = parameter.device_mesh, parameter.placements
    partial = DTensor.from_local(total.contiguous(), mesh, [Partial()] * mesh.ndim, run_check=False)
    target = [Partial() if isinstance(placement, Replicate) else placement for placement in placements]
    shard = partial.redistribute(placements=target, async_op=True).to_local()

    def receive() -> Iterator[Sum]:
        if isinstance(shard, AsyncCollectiveTensor):
            yield parameter, shard.trigger_wait()  # type: ignore[no-untyped-call]
        else:
            yield parameter, shard

    return receive


def _send_many(some: list[Sum]) -> Callable[[], Iterator[Sum]]:
    """Sends sums that are cut along their first dimension, into as many parts as there are ranks, in one message: for
    each rank its parts of all, filled up to the length of the first rank's."""
    parameters = [parameter for parameter, _ in some]
    cut = next(i for i, each in enumerate(parameters[0].placements) if isinstance(each, Shard))
    group, ranks = parameters[0].device_mesh.get_group(cut), parameters[0].device_mesh.size(cut)
    lengths = [-(-len(total) // ranks) * total[:1].numel() for _, total in some]
    message = some[0][1].new_empty(ranks, sum(lengths))
    torch._chunk_cat([total for _, total in some], 0, ranks, out=message)
    some.clear()
    received = message.new_empty(message.shape[1])
    work = dist.reduce_scatter_tensor(received, message.view(-1), group=group, async_op=True)

    def receive() -> Iterator[Sum]:
        nonlocal message
        if work is not None:
            work.wait()
        del message
        for parameter, part in zip(parameters, torch.split(received, lengths), strict=True):
            shape = parameter.to_local().shape
            yield parameter, part[: shape.numel()].view(shape).clone()

    return receive
