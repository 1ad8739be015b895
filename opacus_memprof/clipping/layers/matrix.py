# SPDX-License-Identifier: Apache-2.0
"""The base class of layers whose weight gradient is a matrix product: linear layers, and convolutions of their unfolded
input."""

from __future__ import annotations

from typing import NamedTuple

import torch

from opacus_memprof.clipping.cost import Choice, choose
from opacus_memprof.clipping.layers.base import Layer
from opacus_memprof.clipping.norms import has_kernels, is_small


class Sizes(NamedTuple):
    """The sizes of the products [samples groups, rows, tokens] @ [samples groups, tokens, columns]."""

    samples: int
    groups: int
    tokens: int
    rows: int
    columns: int


class MatrixLayer(Layer):
    """A layer whose weight gradient is a matrix product."""

    owns_weight_gradients = True

    def sizes(self, x: torch.Tensor, g: torch.Tensor) -> Sizes:
        """The sizes of the product."""
        raise NotImplementedError

    def operands(self, x: torch.Tensor, g: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The operands of the weight gradients, [B, rows, tokens] and [B, tokens, columns]."""
        raise NotImplementedError

    def has_views(self, x: torch.Tensor, g: torch.Tensor) -> bool:
        """Whether ``operands`` are views."""
        raise NotImplementedError

    def norms_wait(self, x: torch.Tensor, g: torch.Tensor, choice: Choice) -> bool:
        if choice.norm != "gram" or x.dtype != g.dtype or not has_kernels(g) or g.numel() == 0:
            return False
        return self.has_views(x, g) and (self.sizes(x, g).tokens > 1 or (is_small(x) and is_small(g)))

    def choose(self, x: torch.Tensor, g: torch.Tensor, keep: bool) -> Choice:
        size = self.sizes(x, g)
        return choose(
            size.samples * size.groups,
            size.tokens,
            size.rows,
            size.columns,
            g.element_size(),
            pair_elements=x.numel() + g.numel(),
            keep=keep,
        )
