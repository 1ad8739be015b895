# SPDX-License-Identifier: Apache-2.0
"""The optimizer of flash_clip under DDP: every rank has the whole model, and the ranks' clipped sums are added once."""

import struct
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from opacus_memprof.clipping.agreement import Agreement, computing_device
from opacus_memprof.clipping.module.hooks import FlashClipHooks
from opacus_memprof.clipping.optimizers.optimizer import DPOptimizerFlashClip
from opacus_memprof.clipping.workspace import sum_dtype
from opacus_memprof.errors import MemprofError


class DPOptimizerFlashClipDDP(DPOptimizerFlashClip):
    """DPOptimizerFlashClip for a model in DDP or in Opacus' DDP wrapper.

    Rank 0 alone adds noise, as in Opacus, before the ranks' sums are reduced. The noise is therefore that of one
    process with rank 0's generator, and it is the same on all ranks. If each rank added its share of the variance
    instead, ranks with equal seeds would add equal numbers, whose sum has a different variance.

    Args:
        optimizer, module, kwargs: see DPOptimizerFlashClip.

    Raises:
        MemprofError: the ranks' models, optimizers or settings differ.
    """

    _is_alone = False  # the ranks' sums are still to be added, in float32

    def __init__(self, optimizer: Optimizer, *, module: FlashClipHooks, **kwargs: Any) -> None:
        super().__init__(optimizer, module=module, **kwargs)
        self.agreement = Agreement(computing_device(self.params[0]))
        self.agreement.check_same(self.description())
        self.ranks = self.agreement.world_size
        self.bookkeeping.refusal.is_deferred = True
        self.rank = self.agreement.rank
        wrapper = module._module
        copies_buffers = isinstance(wrapper, DistributedDataParallel) and wrapper.broadcast_buffers
        self._buffers = list(module.registry.model.buffers()) if copies_buffers else []

    def description(self) -> dict[str, Any]:
        """Returns what must be equal on all ranks: settings, and the parameters in the order of their reduction."""
        rule = self.bookkeeping.rule
        settings = {
            "clipping": rule.clipping,
            "max_grad_norm": rule.bounds or rule.bound,
            "noise_multiplier": self.noise_multiplier,
            "loss_reduction": self.loss_reduction,
            "the number of trained parameters": len(self.params),
        }
        shapes = {
            f"trained parameter {i}": f"{self._names[p]!r}, {p.dtype}, of shape {list(p.shape)}"
            for i, p in enumerate(self.params)
        }
        return settings | shapes

    def _gets_noise(self, parameter: nn.Parameter) -> bool:
        return self.rank == 0

    def _is_final(self, parameter: nn.Parameter) -> bool:
        return parameter.dtype == sum_dtype(parameter.dtype)

    def _prepare_step(self, skips: bool) -> None:
        # Ranks may split batches into different numbers of parts (BatchMemoryManager): each rank adds its parts up
        # first.
        refusal = self.bookkeeping.refusal
        if skips:
            try:
                if refusal.error is None:
                    super()._prepare_step(skips)
            except MemprofError as raised:
                refusal.add(raised)  # the other ranks learn of it in the step that is not skipped
            return
        error: Exception | None = None
        try:
            refusal.pop()
            super()._prepare_step(skips)
        except (MemprofError, Warning) as raised:  # a program may turn warnings into errors
            error = raised
        ((fewest, most),) = self._settle(error, [0 if error else self.accumulated_iterations])
        if self.loss_reduction == "mean" and fewest < most:
            raise MemprofError(
                f"a rank has run {fewest} backward passes for this step, and another one {most}: with a mean loss "
                "these numbers must be equal."
            )

    def _settle(self, error: Exception | None, numbers: Sequence[int]) -> list[tuple[int, int]]:
        """Does the same as `Agreement.settle`, and compares what a program may change between two steps.

        A scheduler that runs on one rank alone would leave the ranks with other bounds than the noise is made for.

        Raises:
            MemprofError: the ranks differ in settings, or in the parameters that they train.
        """
        settings = {
            "max_grad_norm": self.noise_bound(),
            "noise_multiplier": self.noise_multiplier,
            "expected_batch_size": self.expected_batch_size if self.loss_reduction == "mean" else 1,
        }
        trained = zlib.crc32("\n".join(f"{self._names.get(p)} {p.dtype}" for p in self.params).encode())
        own = [_ordered(float(value) if error is None else 0.0) for value in settings.values()]
        *found, names = self.agreement.settle(error, [*numbers, *own, trained])
        for name, (low, high) in zip(settings, found[len(numbers) :], strict=True):
            if low < high:
                raise MemprofError(
                    f"{name} is {_number(low):g} on a rank, and {_number(high):g} on another one, so that "
                    "the ranks would add noise of different sizes: change it on all ranks alike, and run schedulers on "
                    "each."
                )
        if names[0] < names[1]:
            raise MemprofError(
                "the ranks do not train the same parameters in the same order and dtypes, so that the sums of "
                "different ones would be added up: freeze, unfreeze, add and convert the parameters of the model and "
                "the optimizer on all ranks alike."
            )
        return found[: len(numbers)]

    def reduce_gradients(self) -> None:
        """Adds up the gradients of all ranks, in float32 where parameters are of low precision.

        Also copies rank 0's buffers, as DDP does before each forward.
        """
        waiting: list[dist.Work | None] = []
        for parameter in self.params:
            waiting.append(dist.all_reduce(parameter.summed_grad, async_op=True))
        for buffer in self._buffers:
            waiting.append(dist.broadcast(buffer, 0, async_op=True))
        for work in waiting:
            if work is not None:
                work.wait()
        self._assign_rounded()

    def _assign_rounded(self) -> None:
        """Rounds the gradients that were added up over the ranks to the parameters' dtype, and assigns them."""
        for parameter in self.params:
            if not self._is_final(parameter):
                self._assign_gradient(parameter)

    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Does the same as DPOptimizer.step; the ranks' gradients are added up before the update."""
        if closure is not None:
            with torch.enable_grad():
                closure()
        loss: float | None = None
        if self.pre_step():
            self.reduce_gradients()
            loss = self.original_optimizer.step()
        self._module.end_step()
        return loss


def _ordered(number: float) -> int:
    """Returns the bits of a number that is not negative, which are in the order of the numbers."""
    bits: int = struct.unpack("<q", struct.pack("<d", number))[0]
    return bits


def _number(bits: int) -> float:
    number: float = struct.unpack("<d", struct.pack("<q", bits))[0]
    return number
