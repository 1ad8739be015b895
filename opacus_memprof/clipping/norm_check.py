# SPDX-License-Identifier: Apache-2.0
"""Checks that the norms of a batch are finite, without making the device wait for the host."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from opacus_memprof.clipping.layers import Layer
from opacus_memprof.clipping.shared import SharedGradient
from opacus_memprof.errors import MemprofError


class NormCheck:
    """An asynchronous check: once it has begun, the result is copied to the host when the norms are ready, and read
    after more work has been queued.

    Args:
        norms: per-sample norms, [B].
        squared_norms: by layer, [layers, B].
        owners: layers, or gradients that several layers share, in the order of the squared norms.
    """

    def __init__(
        self, norms: torch.Tensor, squared_norms: torch.Tensor, owners: Sequence[Layer | SharedGradient]
    ) -> None:
        self.norms, self.squared_norms, self.owners = norms, squared_norms, owners
        self._finite: torch.Tensor | None = None
        self._ready: torch.cuda.Event | None = None

    def begin(self) -> None:
        """Queues the check behind what computes the norms."""
        norms = self.norms
        self._finite = torch.isfinite(norms).all()
        if norms.is_cuda:
            host_copy = torch.empty((), dtype=torch.bool, pin_memory=True)
            self._finite = host_copy.copy_(self._finite, non_blocking=True)
            self._ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._ready.record(torch.cuda.current_stream(norms.device))

    def raise_unless_finite(self) -> None:
        """Raises MemprofError, with the samples and the first layer, unless all norms are finite."""
        assert self._finite is not None, "begin has not been called"
        if self._ready is not None:
            self._ready.synchronize()
        if bool(self._finite):
            return
        samples = torch.nonzero(~self.norms.isfinite()).flatten().tolist()
        layers = torch.nonzero(~self.squared_norms.isfinite().all(1)).flatten().tolist()
        first = self.owners[layers[0]].describe() if layers else "the sum over layers"
        raise MemprofError(
            f"the gradient norm of samples {samples} of the batch is not finite (first seen in {first}); no parameter "
            "was changed. Look for NaN or infinity in inputs and loss, and lower the learning rate; float16 needs a "
            "smaller loss scale, or bfloat16."
        )
