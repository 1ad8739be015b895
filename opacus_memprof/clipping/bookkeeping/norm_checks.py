# SPDX-License-Identifier: Apache-2.0
"""Checks that norms are finite, and that clipped sums are not larger than their samples allow.

The device does not wait for the host.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from opacus_memprof.clipping.layers import Layer
from opacus_memprof.clipping.layers.shared import SharedGradient
from opacus_memprof.clipping.rules import ClipRule
from opacus_memprof.errors import MemprofError

_TOLERANCE = 1e-3  # relative, for rounding


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
        self._finite: HostCopy | None = None

    def begin(self) -> None:
        """Queues the check."""
        self._finite = HostCopy(torch.isfinite(self.norms).all())

    def raise_unless_finite(self) -> None:
        """Raises MemprofError, naming the samples and the first layer, unless all norms are finite."""
        assert self._finite is not None, "begin has not been called"
        if bool(self._finite.get()):
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
        self._of_sums += torch._foreach_norm(list(sums))

    def begin(self) -> None:
        """Queues the copy of the norms to the host."""
        norms, self._of_sums = self._of_sums, []
        device = norms[0].device
        self._norms = HostCopy(torch.stack([each if each.device == device else each.to(device) for each in norms]))

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
