# SPDX-License-Identifier: Apache-2.0
"""The reduce-scatter of clipped sums under FSDP2: each rank gets its shards of the sums over all ranks.

A large sum is sent by itself. Small sums, such as LoRA's, are sent together, because sending each by itself would take
the host longer than the network.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

_SMALL = 2 << 20  # bytes; smaller sums are sent together
_MOST = 8 << 20  # bytes; limit on the sums that are sent together

Sum = tuple[Any, torch.Tensor]


def scatter(sums: Iterator[Sum]) -> Iterator[Sum]:
    """Yields each parameter with this rank's shard of its sum over the ranks that have different shards.

    The next sums are formed while earlier ones are being reduced.

    Args:
        sums: each parameter, a DTensor, with its full sum on this rank. All ranks have the same parameters in the same
            order.
    """
    group_of = functools.cache(_sharding_group)  # finding a group takes the host as long as sending a sum
    sent: Callable[[], Iterator[Sum]] | None = None
    for some in _together(sums):
        mesh, placements = some[0][0].device_mesh, some[0][0].placements
        if _is_sharded_by_rows(placements):
            started = _reduce_scatter_rows(some, *group_of(mesh, placements))
        else:
            started = _redistribute(*some.pop())
        if sent is not None:
            yield from sent()
        sent = started
    if sent is not None:
        yield from sent()


def _together(sums: Iterator[Sum]) -> Iterator[list[Sum]]:
    """Yields sums that are sent together. Holds no reference to a sum after its list was emptied."""
    some: list[Sum] = []
    alike, size = None, 0
    for parameter, total in sums:
        own = (parameter.device_mesh, parameter.placements, total.dtype, total.device)
        is_small = total.nbytes <= _SMALL and _is_sharded_by_rows(parameter.placements)
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


@functools.cache
def _is_sharded_by_rows(placements: tuple[Placement, ...]) -> bool:
    """Returns whether the ranks have different parts along the first dimension alone."""
    return [each for each in placements if not isinstance(each, Replicate)] == [Shard(0)]


def _sharding_group(mesh: DeviceMesh, placements: tuple[Placement, ...]) -> tuple[dist.ProcessGroup, int]:
    """Returns the process group of the ranks that have different rows, and its size."""
    dimension = next(i for i, each in enumerate(placements) if isinstance(each, Shard))
    return mesh.get_group(dimension), mesh.size(dimension)


def _redistribute(parameter: Any, total: torch.Tensor) -> Callable[[], Iterator[Sum]]:
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


def _reduce_scatter_rows(some: list[Sum], group: dist.ProcessGroup, ranks: int) -> Callable[[], Iterator[Sum]]:
    """Reduce-scatters sums that are sharded by rows, in one message.

    The message has each rank's rows of all sums, padded to the first rank's number of rows. This takes the host a tenth
    of the time of `_redistribute`.
    """
    parameters = [parameter for parameter, _ in some]
    lengths = [-(-total.shape[0] // ranks) * total.shape[1:].numel() for _, total in some]
    if len(some) == 1 and ranks * lengths[0] == some[0][1].numel():
        message = some[0][1].contiguous().view(ranks, lengths[0])
    else:
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
            yield parameter, part[: shape.numel()].view(shape)

    return receive
