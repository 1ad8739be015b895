# SPDX-License-Identifier: Apache-2.0
"""Whether the norms of a batch are finite, found out without making the device wait for the host."""

from __future__ import annotations

import torch

from opacus_memprof.errors import MemprofError


class Verdict:
    """Copies one bit to the host when the norms are ready; the host asks for it once more work is queued.

    Args:
        norms: per-sample norms, [B].
        squares: squared norms by layer, [layers, B].
        layers: their descriptions, in the order of backward.
    """

    def __init__(self, norms: torch.Tensor, squares: torch.Tensor, layers: list[str]) -> None:
        self.norms, self.squares, self.layers = norms, squares, layers
        self._finite = torch.isfinite(norms).all()
        self._ready: torch.cuda.Event | None = None
        if norms.is_cuda:
            on_host = torch.empty((), dtype=torch.bool, pin_memory=True)
            self._finite = on_host.copy_(self._finite, non_blocking=True)
            self._ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._ready.record(torch.cuda.current_stream(norms.device))

    def require_finite(self) -> None:
        """Raises MemprofError, naming samples and layer, unless all norms are finite."""
        if self._ready is not None:
            self._ready.synchronize()
        if bool(self._finite):
            return
        samples = torch.nonzero(~self.norms.isfinite()).flatten().tolist()
        layers = torch.nonzero(~self.squares.isfinite().all(1)).flatten().tolist()
        raise MemprofError(
            f"the gradient norm of samples {samples} of the batch is not finite (first seen in "
            f"{self.layers[layers[0]] if layers else 'the sum over layers'}); no parameter was changed. Look for NaN "
            "or infinity in inputs and loss, and lower the learning rate; float16 needs a smaller loss scale, or "
            "bfloat16."
        )
