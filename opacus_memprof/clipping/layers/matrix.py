# SPDX-License-Identifier: Apache-2.0
"""Layers whose weight gradient is a matrix product: linear layers, and convolutions on their unfolded input."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from opacus_memprof.clipping.cost import Choice, choose
from opacus_memprof.clipping.grads import sum_products
from opacus_memprof.clipping.layers.base import Layer
from opacus_memprof.clipping.norms import gradient_squared_norms, gram_squared_norms
from opacus_memprof.clipping.workspace import Workspace, accumulation_dtype


class Sizes(NamedTuple):
    """Of the products: [samples groups, rows, tokens] @ [samples groups, tokens, columns]."""

    samples: int
    groups: int
    tokens: int
    rows: int
    columns: int


class Block(NamedTuple):
    """Operands of some samples, some groups and some columns of the weight."""

    samples: slice
    groups: slice
    columns: slice
    g: torch.Tensor
    a: torch.Tensor


class MatrixLayer(Layer):
    """Subclasses say how input and output gradient become operands."""

    owns_weight_gradients = True
    unfolds = False

    def sizes(self, x: torch.Tensor, g: torch.Tensor) -> Sizes:
        raise NotImplementedError

    def blocks(self, x: torch.Tensor, g: torch.Tensor, workspace: Workspace) -> Iterator[Block]:
        """Cuts the products so that what a block unfolds stays within the ceiling."""
        raise NotImplementedError

    def choose(self, x: torch.Tensor, g: torch.Tensor, keep: bool) -> Choice:
        size = self.sizes(x, g)
        held = x.numel() + g.numel()
        return choose(
            size.samples * size.groups,
            size.tokens,
            size.rows,
            size.columns,
            g.element_size(),
            pair_elements=held,
            keep=keep,
        )

    def weight_gradients(self, x: torch.Tensor, g: torch.Tensor, workspace: Workspace) -> torch.Tensor:
        size = self.sizes(x, g)
        shape = (size.samples, size.groups, size.rows, size.columns)
        stack: torch.Tensor | None = None
        for block in self.blocks(x, g, workspace):
            # For one sample a plain product, as in training without privacy, rather than a batch of one.
            part = torch.mm(block.g[0], block.a[0]) if len(block.g) == 1 else torch.bmm(block.g, block.a)
            part = part.view(-1, block.groups.stop - block.groups.start, size.rows, block.a.shape[2])
            if part.shape == shape:
                stack = part
            else:
                stack = part.new_empty(shape) if stack is None else stack
                stack[block.samples, block.groups, :, block.columns] = part
            del part, block
        if stack is None:
            stack = g.new_zeros(shape)
        return stack.view(size.samples, *self._weight().shape)

    def weight_squared_norms(
        self, x: torch.Tensor, g: torch.Tensor, choice: Choice, workspace: Workspace
    ) -> torch.Tensor:
        size, share = self.sizes(x, g), self._share(workspace)
        total = torch.zeros(size.samples, dtype=accumulation_dtype(g.dtype), device=g.device)
        for block in self.blocks(x, g, share):
            # The Gram product needs all columns at once; gradients add up over columns.
            all_columns = block.a.shape[2] == size.columns
            by = gram_squared_norms if choice.norm == "gram" and all_columns else gradient_squared_norms
            norms = by(block.g, block.a, share)
            total[block.samples] += norms.view(-1, block.groups.stop - block.groups.start).sum(1)
            del block
        return total

    def weight_sum(
        self, x: torch.Tensor, g: torch.Tensor, factors: torch.Tensor | None, workspace: Workspace
    ) -> torch.Tensor:
        size, share = self.sizes(x, g), self._share(workspace)
        shape = (size.groups, size.rows, size.columns)
        total: torch.Tensor | None = None
        for block in self.blocks(x, g, share):
            scale = None if factors is None else factors[block.samples]
            part = sum_products(block.g, block.a, scale, block.groups.stop - block.groups.start, share)
            if part.shape == shape and block.samples == slice(0, size.samples):
                total = part
            else:
                if total is None:
                    total = torch.zeros(shape, dtype=accumulation_dtype(part.dtype), device=part.device)
                total[block.groups, :, block.columns] += part
            del part, block
        if total is None:
            total = g.new_zeros(shape)
        return total.view(self._weight().shape)

    def _share(self, workspace: Workspace) -> Workspace:
        """Where the input is unfolded, one half for that and one for what is done with it."""
        return workspace.half() if self.unfolds else workspace
