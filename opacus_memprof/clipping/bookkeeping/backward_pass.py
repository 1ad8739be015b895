# SPDX-License-Identifier: Apache-2.0
"""The tensors that the backward pass of one physical batch has kept, and checks of its norms and clipped sums.

Norms must be finite, and clipped sums not larger than their samples allow. The device does not wait for these checks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
from torch import nn

from opacus_memprof.clipping.arguments import ClipRule
from opacus_memprof.clipping.forwards.state import GivenRows
from opacus_memprof.clipping.kernels.norms import norms_of_sums
from opacus_memprof.clipping.layers import KeptTensors, Layer
from opacus_memprof.clipping.layers.shared import SharedGradient
from opacus_memprof.clipping.layers.small_layers import (
    Splits,
    find_deferred_norms,
    pop_small_products,
    pop_small_sums,
)
from opacus_memprof.clipping.workspace import Workspace, sum_dtype
from opacus_memprof.errors import MemprofError

_TOLERANCE = 1e-3  # relative, for rounding
Factors: TypeAlias = "torch.Tensor | dict[nn.Parameter, torch.Tensor]"
"""Clip factors, [B], of all parameters or by parameter."""


class HostCopy:
    """A copy of a tensor in host memory, which is read after more work has been queued on the device."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor
        self._ready: torch.cuda.Event | None = None
        if tensor.is_cuda:
            host_copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._tensor = host_copy.copy_(tensor, non_blocking=True)
            self._ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._ready.record(torch.cuda.current_stream(tensor.device))

    def get(self) -> torch.Tensor:
        """Waits for the copy and returns it."""
        if self._ready is not None:
            self._ready.synchronize()
        return self._tensor


class NormCheck:
    """Checks asynchronously that per-sample norms are finite.

    The result is copied to the host when the norms are ready, and read after more work has been queued.

    Args:
        norms: per-sample norms, [B].
        squared_norms: squared norms by layer, [layers, B].
        owners: layers, or gradients that several layers share, in the order of the squared norms.
    """

    def __init__(
        self, norms: torch.Tensor, squared_norms: torch.Tensor, owners: Sequence[Layer | SharedGradient]
    ) -> None:
        self.norms, self.squared_norms, self.owners = norms, squared_norms, owners
        self._sum: HostCopy | None = None

    def begin(self) -> None:
        """Queues the check."""
        # Finite norms are at most the root of the largest number times the batch size: their sum is finite, too.
        self._sum = HostCopy(self.norms.sum())

    def raise_unless_finite(self) -> None:
        """Raises MemprofError, naming the samples and the first layer, unless all norms are finite."""
        assert self._sum is not None, "begin has not been called"
        if math.isfinite(self._sum.get().item()):
            return
        samples = torch.nonzero(~self.norms.isfinite()).flatten().tolist()
        layers = torch.nonzero(~self.squared_norms.isfinite().all(1)).flatten().tolist()
        first = self.owners[layers[0]].describe() if layers else "the sum over layers"
        raise MemprofError(
            f"the gradient norm of samples {samples} of the batch is not finite (first seen in {first}); no parameter "
            "was changed. Look for NaN or infinity in inputs and loss, and lower the learning rate; float16 needs a "
            "smaller loss scale, or bfloat16. With flash_clip_nonfinite='drop' such samples add nothing to a step."
        )


@dataclass
class Limit:
    """The largest norm that a sum of clipped gradients may have.

    Attributes:
        samples: the number of samples that have been added up.
        total: the sum of their bounds.
        by_parameter: the sums of bounds by parameter, where parameters have bounds of their own.
        bound: the largest bound that a sample was clipped to.
    """

    samples: int = 0
    total: float = 0.0
    by_parameter: list[float] = field(default_factory=list)
    bound: float = 0.0

    def add(self, other: Limit) -> None:
        """Adds the samples of another sum."""
        self.samples += other.samples
        self.total += other.total
        before = self.by_parameter or [0.0] * len(other.by_parameter)
        self.by_parameter = [a + b for a, b in zip(before, other.by_parameter, strict=True)]
        self.bound = max(self.bound, other.bound)


def limit_of_batch(samples: int, rule: ClipRule) -> Limit:
    """Returns the limit of a batch that is clipped by this rule."""
    return Limit(samples, samples * rule.bound, [samples * bound for bound in rule.bounds], rule.bound)


class SumCheck:
    """Checks asynchronously that the norm of a clipped sum is at most the sum of the samples' bounds.

    It runs in every step and finds large errors whatever their cause.
    """

    def __init__(self) -> None:
        self._of_sums: list[torch.Tensor] = []
        self._norms: HostCopy | None = None

    def add(self, sums: Sequence[torch.Tensor]) -> None:
        """Queues the norms of clipped sums without noise, in the order of the optimizer's parameters."""
        self.add_norms(norms_of_sums(sums))

    def add_norms(self, norms: torch.Tensor) -> None:
        """Adds norms of clipped sums that `add` would find."""
        self._of_sums.append(norms)

    def begin(self) -> None:
        """Queues the copy of the norms to the host."""
        norms, self._of_sums = self._of_sums, []
        self._norms = HostCopy(torch.cat([each.to(norms[0].device) for each in norms]))

    def raise_if_beyond(self, limit: Limit, names: Callable[[], Sequence[str]]) -> float | None:
        """Raises MemprofError, naming a parameter, if the norm of the sums exceeds the limit.

        Args:
            limit: the limit of these sums, over all ranks that contributed.
            names: returns the parameters' names.

        Returns:
            The norm relative to the limit; None without samples.

        Raises:
            MemprofError: the norm exceeds the limit, or is NaN.
        """
        assert self._norms is not None, "begin has not been called"
        norms: list[float] = self._norms.get().tolist()
        total = math.hypot(*norms)
        most = limit.by_parameter
        pairs = list(zip(norms, most, strict=True)) if most else [(total, limit.total)]
        if all(found <= allowed * (1 + _TOLERANCE) for found, allowed in pairs):  # also false for NaN
            return max((found / allowed for found, allowed in pairs if allowed), default=None)
        named = names()
        for norm, name in zip(norms, named, strict=True):
            if not math.isfinite(norm):
                raise MemprofError(
                    f"the sum of the clipped gradients of {name!r} is not finite, although all norms are; no parameter "
                    "was changed. Lower the loss scale or the learning rate, or train in float32."
                )
        if most:
            worst = max(range(len(norms)), key=lambda i: norms[i] / most[i] if most[i] else norms[i])
            found, allowed, whose = norms[worst], most[worst], f"of {named[worst]!r}"
        else:
            worst = max(range(len(norms)), key=norms.__getitem__)
            found, allowed, whose = total, limit.total, f"of all parameters (most of it of {named[worst]!r})"
        raise MemprofError(
            f"the sum of the clipped gradients {whose} has norm {found:.6g}, but {limit.samples} samples that are "
            f"clipped to max_grad_norm have at most {allowed:.6g}: a sample was not clipped, and no parameter was "
            "changed. Look for hooks and custom layers around that parameter, or freeze it."
        )


def refuse_capture() -> None:
    """Raises MemprofError while a CUDA graph is captured on the current stream."""
    initialized = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    if initialized and torch.cuda.is_current_stream_capturing():
        raise MemprofError(
            "flash_clip cannot be captured in a CUDA graph: replays would go past the privacy accountant, and past the "
            "check that gradient norms are finite. Leave private training steps out of the capture, or have "
            "opacus_memprof.clipping.GraphedBackward capture what can be."
        )


@dataclass
class BackwardPass:
    """The tensors that the backward of one physical batch has kept.

    Attributes:
        batch_size: the size of the physical batch.
        kept: kept tensors by layer.
        shared: kept tensors of parameters that are used more than once.
        sums: clipped sums, by parameter, that a second backward has already formed.
        clipped: whether `sums` is used instead of `kept`.
        limit: the limit of the clipped sums' norms, once the clip factors are known.
        samples: the indices of the remaining samples, if others have been dropped.
        dropped: the indices of the dropped samples.
        factors: the clip factors, if a second backward has formed `sums` with them.
        forwards: numbers of the forwards that this backward belongs to: several if one call of `backward` goes through
            them; they then have the same samples.
        tasks: autograd's numbers of these calls.
        given: the samples, if the pass has no forwards.
    """

    batch_size: int
    kept: dict[Layer, KeptTensors] = field(default_factory=dict)
    shared: dict[nn.Parameter, SharedGradient] = field(default_factory=dict)
    sums: dict[nn.Parameter, torch.Tensor] = field(default_factory=dict)
    clipped: bool = False
    limit: Limit = field(default_factory=Limit)
    samples: torch.Tensor | None = None
    dropped: list[int] = field(default_factory=list)
    factors: torch.Tensor | None = None
    forwards: set[int] = field(default_factory=set)
    tasks: set[int] = field(default_factory=set)
    given: list[GivenRows] = field(default_factory=list)

    def add_shared(self, layer: Layer, kept: KeptTensors, workspace: Workspace) -> None:
        """Adds the tensors that backward has kept for one of several uses of a parameter."""
        for parameter in layer.trainable():
            if parameter not in self.shared:
                self.shared[parameter] = SharedGradient(parameter, layer)
            self.shared[parameter].add(layer, kept, workspace)

    def first_of(self, layer: Layer) -> KeptTensors | None:
        """Returns the tensors that the first of two passes has kept for a layer's weight."""
        for parameter in layer.trainable():
            if parameter in self.shared:
                return self.shared[parameter].kept_norms
        return self.kept.get(layer)

    def select(self, factors: Factors) -> Factors:
        """Drops excluded samples, one layer after the other, and returns the clip factors of the others."""
        samples = self.samples
        if samples is None:
            return factors
        for kept in self.kept.values():
            kept.select(samples)
        for shared in self.shared.values():
            shared.select(samples)
        if isinstance(factors, dict):
            return {parameter: own[samples] for parameter, own in factors.items()}
        return factors[samples]

    def pop_clipped_sums(
        self, factors: Factors | None, workspace: Workspace
    ) -> Iterator[tuple[nn.Parameter, torch.Tensor]]:
        """Yields each parameter once, with its clipped sum, and releases the kept tensors.

        Sums of low-precision parameters are float32.

        Args:
            factors: the clip factors; None if a second backward has already formed the sums.
            workspace: limit on the temporaries of a layer.
        """
        while self.sums:
            parameter, total = self.sums.popitem()
            yield parameter, total.to(sum_dtype(parameter.dtype))
        if factors is None:
            return
        factors = self.select(factors)
        while self.shared:
            parameter, shared = self.shared.popitem()
            of_parameter = factors[parameter] if isinstance(factors, dict) else factors
            yield parameter, shared.clipped_sum(of_parameter, workspace)
        if isinstance(factors, dict):
            while self.kept:
                layer, kept = self.kept.popitem()
                for parameter, part in kept.split():
                    yield from layer.clipped_sums(part, factors[parameter], workspace)
            return
        yield from pop_small_sums(self.kept, factors)
        # A model may have hundreds of small layers; their tensors are released here.
        self.kept = {layer: kept for layer, kept in self.kept.items() if kept.stacks or kept.pair is not None}
        splits = Splits(self.kept, factors)
        while self.kept:
            if sums := pop_small_products(self.kept, splits, workspace):
                yield from sums
                continue
            layer, kept = self.kept.popitem()
            norms = next(iter(kept.norms.values()))
            assert norms is not None
            split = None if kept.lost is None else splits.of(layer)
            yield from layer.clipped_sums(kept, factors.to(norms), workspace, split)

    def release_shared(self) -> None:
        """Drops everything except the norms."""
        for shared in self.shared.values():
            shared.release()

    def check_unchanged(self) -> None:
        """Checks that the program has not written to a kept tensor since backward.

        A layer's input may be the program's own tensor, and the gradient of its output that of another operation, too.

        Raises:
            MemprofError: it has.
        """
        if self.clipped:  # by a second backward: nothing else is kept
            return
        shared = [(each, each) for each in self.shared.values()]
        found: list[tuple[Layer | SharedGradient, KeptTensors | SharedGradient]] = [*self.kept.items(), *shared]
        for owner, kept in found:
            if kept.version() != kept.noted_version:
                raise MemprofError(
                    f"the input of {owner.describe()}, or the gradient of its output, was written to in place after "
                    "its backward, but optimizer.step() needs it; no parameter was changed. Write the next batch into "
                    "another tensor, or call optimizer.step() before; custom backward functions should return new "
                    "tensors."
                )

    def parameter_ids(self) -> set[int]:
        """Returns the ids of the parameters that gradients have reached. They are faster than sets of tensors."""
        kept = {id(parameter) for kept in self.kept.values() for parameter in kept.norms}
        return kept | {*map(id, self.shared)} | {*map(id, self.sums)}

    def squared_norms(
        self, workspace: Workspace
    ) -> tuple[list[nn.Parameter], list[torch.Tensor], list[Layer | SharedGradient]]:
        """Returns the parameters, the squared norms of their gradients, [B] each, and the layer of each."""
        find_deferred_norms(self.kept)
        parameters: list[nn.Parameter] = []
        norms: list[torch.Tensor] = []
        owners: list[Layer | SharedGradient] = []
        for layer, kept in self.kept.items():
            for parameter, of_parameter in kept.norms.items():
                assert of_parameter is not None
                parameters.append(parameter)
                norms.append(of_parameter)
                owners.append(layer)
        for parameter, shared in self.shared.items():
            parameters.append(parameter)
            norms.append(shared.squared_norms(workspace))
            owners.append(shared)
        return parameters, norms, owners
