# SPDX-License-Identifier: Apache-2.0
"""Data-parallel models that flash_clip supports, and communication between their ranks."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from opacus.distributed import DifferentiallyPrivateDistributedDataParallel
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from opacus_memprof.errors import MemprofError

_WRAPPERS = (DistributedDataParallel, DifferentiallyPrivateDistributedDataParallel)


def is_replicated(module: nn.Module) -> bool:
    """Returns whether the module is DDP or Opacus' DDP wrapper, so that every rank has the whole model."""
    return isinstance(module, _WRAPPERS)


def spans_ranks(module: nn.Module) -> bool:
    """Returns whether several ranks train the model, replicated or sharded."""
    parallel = (*_WRAPPERS, FullyShardedDataParallel, FSDPModule)
    parts = any(isinstance(parameter, DTensor) for parameter in module.parameters())
    return parts or any(isinstance(each, parallel) for each in module.modules())


def inner_model(module: nn.Module) -> nn.Module:
    """Returns the model inside DDP or Opacus' DDP wrapper; returns any other module unchanged."""
    return module.module if isinstance(module, _WRAPPERS) else module


def computing_device(parameter: torch.Tensor) -> torch.device:
    """Returns the device on which layers compute with a parameter.

    Under FSDP2's CPUOffloadPolicy the parameter's shards are on the CPU instead.
    """
    if isinstance(parameter, DTensor) and parameter.device_mesh.device_type != parameter.device.type:
        kind = parameter.device_mesh.device_type
        return torch.device(kind, torch.get_device_module(kind).current_device())
    return parameter.device


def prepare_replicated(module: nn.Module) -> None:
    """Keeps DDP from reducing gradients in backward.

    flash_clip has no gradients there; its optimizer reduces the clipped sums in the step.

    Raises:
        MemprofError: the wrapper has options that flash_clip does not support.
    """
    if any(isinstance(each, _WRAPPERS) for each in inner_model(module).modules()):
        raise MemprofError("a part of the model is in DistributedDataParallel by itself; wrap the whole model once.")
    if not isinstance(module, DistributedDataParallel):
        return
    if module.static_graph:
        raise MemprofError(
            "DistributedDataParallel with static_graph=True reduces gradients that flash_clip does not have; build it "
            "without static_graph."
        )
    if module.mixed_precision is not None:
        raise MemprofError(
            "flash_clip does not know the mixed_precision of DistributedDataParallel; use torch.autocast instead."
        )
    if module.process_group.size() != dist.get_world_size():
        raise MemprofError(
            "DistributedDataParallel has a process group that is not all ranks, but the expected batch size and the "
            "noise are those of all ranks; build it without process_group."
        )
    let_reducer_run(module, False)


def let_reducer_run(module: nn.Module, enabled: bool) -> None:
    """Turns DDP's gradient reduction in backward on or off, as `no_sync` does. Does nothing for other modules."""
    if isinstance(module, DistributedDataParallel):
        module.require_backward_grad_sync = module.require_forward_param_sync = enabled


class Agreement:
    """Communication between ranks. Every method is a collective: all ranks call it, in the same order.

    Args:
        device: the device of the tensors that the process group's backend communicates.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()
        # The host waits for the other ranks only, not for work that is queued on this rank's device.
        self._on_own_stream: AbstractContextManager[Any] = nullcontext()
        if device.type == "cuda":
            self._on_own_stream = torch.cuda.stream(torch.cuda.Stream(device))  # type: ignore[no-untyped-call]

    def check_same(self, what: dict[str, Any]) -> None:
        """Raises MemprofError on all ranks, naming the first difference, unless `what` is equal on all ranks."""
        found: list[dict[str, Any] | None] = [None] * self.world_size
        dist.all_gather_object(found, what)
        first = found[0]
        for rank, other in enumerate(found):
            if first is None or other is None:  # a simulated rank runs without the others
                continue
            for key in [*first, *(other.keys() - first.keys())]:
                if first.get(key) != other.get(key):
                    raise MemprofError(
                        f"the ranks train different models: {key} is {first.get(key, 'missing')} on rank 0 and "
                        f"{other.get(key, 'missing')} on rank {rank}."
                    )

    def add(self, numbers: Sequence[float]) -> list[float]:
        """Returns the sum of each number over all ranks."""
        with self._on_own_stream:
            total = torch.tensor(numbers, dtype=torch.float64, device=self.device)
            dist.all_reduce(total)
            added: list[float] = total.tolist()
        return added

    def settle(self, error: Exception | None, numbers: Sequence[int] = ()) -> list[tuple[int, int]]:
        """Ends a stage that each rank ran alone: if it failed on one rank, it raises on all, so none waits forever.

        Args:
            error: the error of this rank, or None.
            numbers: numbers to compare; every rank passes equally many.

        Returns:
            The lowest and the highest value of each number over all ranks.

        Raises:
            MemprofError: another rank failed. A rank with an `error` raises that instead.
        """
        own = [0 if error is None else self.rank + 1, *numbers, *(-number for number in numbers)]
        with self._on_own_stream:
            reduced = torch.tensor(own, dtype=torch.int64, device=self.device)
            dist.all_reduce(reduced, dist.ReduceOp.MAX)
            if error is not None:
                raise error
            failed, *found = reduced.tolist()
        if failed:
            raise MemprofError(
                f"rank {failed - 1} could not take this step and reports the reason; the other ranks stop too."
            )
        return [(-low, high) for high, low in zip(found[: len(numbers)], found[len(numbers) :], strict=True)]


class Lockstep:
    """Keeps ranks together that run the same forwards, each of which needs the parameters of all ranks.

    A rank that ran another number of forwards than the others would leave them waiting.

    Args:
        agreement: of the ranks.
    """

    def __init__(self, agreement: Agreement) -> None:
        self.agreement = agreement
        self._is_over = False

    def begin_forward(self) -> None:
        """Raises MemprofError on all ranks unless all of them begin a forward."""
        self._settle(None, True)

    def end(self, error: Exception | None) -> None:
        """Says that this rank runs no more forwards, and waits until the other ranks say so.

        Args:
            error: the error that ended them, which is raised here; None if they ended as planned.

        Raises:
            MemprofError: another rank begins a further forward, or had an error.
        """
        if not self._is_over:
            self._settle(error, False)

    def _settle(self, error: Exception | None, is_forward: bool) -> None:
        self._is_over = True  # for all ranks, unless they agree
        [(fewest, most)] = self.agreement.settle(error, [is_forward])
        if fewest != most:
            raise MemprofError(
                "the ranks get different results from the same samples, so that clipping cannot be proved: make what "
                "the model computes depend on its arguments and modes, and not on the rank."
            )
        self._is_over = False


class KeptRefusal:
    """Defers an error to the next step when several ranks train one model.

    If a rank raised at once, the other ranks would wait for its gradients forever. Its program continues without
    gradients instead, and the step raises on every rank.

    Attributes:
        is_deferred: whether errors are raised in the step; otherwise at once.
        error: the first error since the last step, which the next step raises.
        raised: the number of errors that were raised at once since the last step, each of which ended the forward or
            backward of a physical batch.
    """

    def __init__(self) -> None:
        self.is_deferred = False
        self.error: MemprofError | None = None
        self.raised = 0

    def add(self, error: MemprofError) -> None:
        """Stores an error for the next step, or raises it if errors are not deferred.

        Raises:
            MemprofError: the error, if errors are not deferred.
        """
        if not self.is_deferred:
            self.raised += 1
            raise error
        self.error = self.error or error

    def pop(self) -> None:
        """Raises the stored MemprofError, if any, and clears it."""
        error, self.error = self.error, None
        if error is not None:
            raise error
