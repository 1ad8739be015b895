# SPDX-License-Identifier: Apache-2.0
"""The optimizer of flash_clip under FSDP2.

Clipped sums are formed and reduce-scattered one layer at a time. Each rank adds the noise of its own shards.
"""

import functools
import hashlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement
from torch.optim import Optimizer

from opacus_memprof.clipping.bookkeeping.backward_pass import Limit
from opacus_memprof.clipping.module.hooks import FlashClipHooks
from opacus_memprof.clipping.optimizers.ddp import DPOptimizerFlashClipDDP
from opacus_memprof.errors import MemprofError


class DPOptimizerFlashClipFSDP(DPOptimizerFlashClipDDP):
    """DPOptimizerFlashClip for a model that `fully_shard` has sharded.

    `p.summed_grad` is this rank's shard of the sum. Each rank draws noise of the shape of its shards, with the variance
    of one process, so the noise of all shards together is that of one process. Where shards are also replicated (a
    two-dimensional mesh), the first replica draws the noise.

    If ranks drew the same numbers, differences between shards would have no noise. Therefore every rank has a generator
    of its own, seeded with a number of the given generator (or of torch's) and with the rank.

    Args:
        optimizer, module, kwargs: see DPOptimizerFlashClipDDP.
    """

    def __init__(self, optimizer: Optimizer, *, module: FlashClipHooks, **kwargs: Any) -> None:
        super().__init__(optimizer, module=module, **kwargs)
        self._modules = [each for each in module.registry.model.modules() if isinstance(each, FSDPModule)]
        if not self.secure_mode:
            self.generator = _own_generator(kwargs.get("generator"), self.rank, self.params[0].device)

    def _follow_model(self) -> None:
        super()._follow_model()
        replicated = {p: _replicated_dimensions(p) for p in self.params}
        self._replicated = {p: dimensions for p, dimensions in replicated.items() if dimensions}

    @torch.no_grad()  # otherwise to_local records each of hundreds of parameters for autograd
    def clip_and_accumulate(self) -> None:
        """Adds this rank's shards of the clipped sums of every backward since the last step to `p.summed_grad`.

        Sums are formed while earlier ones are being reduced.
        """
        self.bookkeeping.sort()
        for parameter, shard in scatter(self.bookkeeping.in_order(self.bookkeeping.pop_clipped_sums())):
            own = shard.to(parameter.device)  # the CPU, under CPUOffloadPolicy
            if parameter.summed_grad is None:
                parameter.summed_grad = own
            else:
                parameter.summed_grad += own
            del shard, own

    def _prepare_step(self, skips: bool) -> None:
        for module in self._modules:
            module.reshard()  # a module that backward did not reach is still gathered and would miss the update
        error: Exception | None = None
        try:
            self.bookkeeping.refusal.pop()
            self._follow_model()
            self.bookkeeping.check_complete(self.params, self._names)
            if not skips:
                self._check_number_of_samples()
        except (MemprofError, Warning) as raised:  # a program may turn warnings into errors
            error = raised
        passes, skipping = self._settle(error, [self.bookkeeping.passes, int(skips)])
        if passes[0] < passes[1] or skipping[0] < skipping[1]:
            raise MemprofError(
                "the ranks have split their batches into different numbers of parts (BatchMemoryManager), or run "
                "different numbers of backward passes: under FSDP2 all ranks take part in each forward. Split batches "
                "into as many parts on every rank, or use DDP."
            )
        super()._prepare_step(skips)

    def _check_norms(self) -> None:
        error: MemprofError | None = None
        try:
            super()._check_norms()
        except MemprofError as raised:
            error = raised
        self.agreement.settle(error)

    def _limit(self) -> Limit:
        """Returns the limit of the sums over all ranks. All ranks call it."""
        own = self.bookkeeping.limit
        samples, total, *by_parameter = self.agreement.add([own.samples, own.total, *own.by_parameter])
        return Limit(int(samples), total, by_parameter, own.bound)

    def _gets_noise(self, parameter: Any) -> bool:
        return all(parameter.device_mesh.get_local_rank(i) == 0 for i in self._replicated.get(parameter, ()))

    def _is_final(self, parameter: Any) -> bool:
        return parameter not in self._replicated or super()._is_final(parameter)

    def _as_gradient(self, parameter: Any, total: torch.Tensor) -> torch.Tensor:
        return DTensor(total, parameter._spec, requires_grad=False)  # from_local would move it to the mesh's device

    def reduce_gradients(self) -> None:
        """Adds up the gradients of shards that are replicated."""
        for parameter, dimensions in self._replicated.items():
            for i in dimensions:
                shard = parameter.summed_grad
                total = shard.to(self.agreement.device)
                dist.all_reduce(total, group=parameter.device_mesh.get_group(i))
                if total is not shard:
                    shard.copy_(total)
        self._assign_rounded()


def _replicated_dimensions(parameter: Any) -> list[int]:
    """Returns the dimensions of the mesh along which the parameter's shards are replicated."""
    return [i for i, placement in enumerate(parameter.placements) if isinstance(placement, Replicate)]


def _own_generator(given: torch.Generator | None, rank: int, device: torch.device) -> torch.Generator:
    number = int(torch.randint(2**62, (1,), generator=given, device="cpu" if given is None else given.device))
    digest = hashlib.sha256(f"{number} {rank}".encode()).digest()
    return torch.Generator(device).manual_seed(int.from_bytes(digest[:7], "big"))


_SMALL = 2 << 20  # bytes; smaller sums are sent together
_MOST = 8 << 20  # bytes; limit on the sums that are sent together

Sum = tuple[Any, torch.Tensor]


def scatter(sums: Iterator[Sum]) -> Iterator[Sum]:
    """Adds the ranks' sums, and yields each parameter with this rank's shard of the total (a reduce-scatter).

    Only ranks that have different shards are added. The next sums are formed while earlier ones are being reduced.

    Args:
        sums: each parameter, a DTensor, with the sum over this rank's samples, in the whole parameter's shape. All
            ranks have the same parameters in the same order.
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
    """Yields lists of sums to send together. A sum that the caller pops from a list is referred to nowhere here."""
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
