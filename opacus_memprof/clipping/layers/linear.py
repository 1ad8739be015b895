# SPDX-License-Identifier: Apache-2.0
"""nn.Linear, with any number of dimensions between the batch and the features."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from opacus_memprof.clipping.layers.matrix import Block, MatrixLayer, Sizes
from opacus_memprof.clipping.workspace import Workspace, accumulation_dtype


def autocast_input(x: torch.Tensor) -> torch.Tensor:
    """Casts ``x`` as autocast casts the operands of a matrix product or convolution: everything but float64."""
    device = x.device.type
    if torch.is_autocast_enabled(device) and x.is_floating_point() and x.dtype != torch.float64:
        return x.to(torch.get_autocast_dtype(device))
    return x


class LinearLayer(MatrixLayer):
    any_arrangement = True

    def min_dimensions(self) -> int:
        return 2

    def cast(self, x: torch.Tensor) -> torch.Tensor:
        return autocast_input(x)

    def small_gradients(self, x: torch.Tensor | None, g: torch.Tensor, workspace: Workspace) -> dict[str, torch.Tensor]:
        if not self.is_trainable("bias"):
            return {}
        if g.dim() == 2:
            return {"bias": g}
        return {"bias": g.sum(tuple(range(1, g.dim() - 1)), dtype=accumulation_dtype(g.dtype))}

    def sizes(self, x: torch.Tensor, g: torch.Tensor) -> Sizes:
        return Sizes(x.shape[0], 1, x.shape[1:-1].numel(), g.shape[-1], x.shape[-1])

    def blocks(self, x: torch.Tensor, g: torch.Tensor, workspace: Workspace) -> Iterator[Block]:
        size = self.sizes(x, g)
        if size.samples and size.tokens:
            g = g.reshape(size.samples, size.tokens, size.rows).mT
            a = x.to(g.dtype).reshape(size.samples, size.tokens, size.columns)
            yield Block(slice(0, size.samples), slice(0, 1), slice(0, size.columns), g, a)


class TransposedLinearLayer(LinearLayer):
    """A linear layer whose weight is [inputs, outputs], such as Conv1D of transformers: the gradient of its weight is
    that of a linear layer with input and output gradient exchanged."""

    def sizes(self, x: torch.Tensor, g: torch.Tensor) -> Sizes:
        return Sizes(x.shape[0], 1, x.shape[1:-1].numel(), x.shape[-1], g.shape[-1])

    def blocks(self, x: torch.Tensor, g: torch.Tensor, workspace: Workspace) -> Iterator[Block]:
        size = self.sizes(x, g)
        if size.samples and size.tokens:
            a = x.to(g.dtype).reshape(size.samples, size.tokens, size.rows).mT
            g = g.reshape(size.samples, size.tokens, size.columns)
            yield Block(slice(0, size.samples), slice(0, 1), slice(0, size.columns), a, g)
