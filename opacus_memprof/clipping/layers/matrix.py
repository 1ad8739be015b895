# SPDX-License-Identifier: Apache-2.0
"""The base class of layers whose weight gradient is a matrix product: linear layers, and convolutions of their unfolded
input."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from opacus_memprof.clipping.cost import Choice, choose
from opacus_memprof.clipping.layers.base import Layer
from opacus_memprof.clipping.norms import gradient_squared_norms, gram_squared_norms
from opacus_memprof.clipping.sums import sum_products
from opacus_memprof.clipping.workspace import Workspace, accumulation_dtype


class Sizes(NamedTuple):
    """The sizes of the products [samples groups, rows, tokens] @ [samples groups, tokens, columns]."""

    samples: int
    groups: int
    tokens: int
    rows: int
    columns: int


class Block(NamedTuple):
    """The operands ``g`` and ``a`` for some samples, some groups and some columns of the weight."""

    samples: slice
    groups: slice
    columns: slice
    g: torch.Tensor
    a: torch.Tensor


class MatrixLayer(Layer):
    """A layer whose weight gradient is a matrix product. Subclasses turn input and output gradient into operands.

    Attributes:
        unfolds: whether ``blocks`` unfolds the input, which takes a part of the workspace.
    """

    owns_weight_gradients = True
    unfolds = False

    def sizes(self, x: torch.Tensor, g: torch.Tensor) -> Sizes:
        raise NotImplementedError

    def blocks(self, x: torch.Tensor, g: torch.Tensor, workspace: Workspace) -> Iterator[Block]:
        """Splits the products into blocks whose operands fit into the workspace."""
        raise NotImplementedError

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

    def weight_gradients(self, x: torch.Tensor, g: torch.Tensor, workspace: Workspace) -> torch.Tensor:
        size = self.sizes(x, g)
        shape = (size.samples, size.groups, size.rows, size.columns)
        stack: torch.Tensor | None = None
        for block in self.blocks(x, g, workspace):
            # For a single sample a plain matrix product, as in training without privacy.
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
        return stack.view(size.samples, *self.weight().shape)

    def weight_squared_norms(
        self, x: torch.Tensor, g: torch.Tensor, choice: Choice, workspace: Workspace
    ) -> torch.Tensor:
        size, share = self.sizes(x, g), self._share(workspace)
        total: torch.Tensor | None = None
        for block in self.blocks(x, g, share):
            # The Gram product needs all columns at once; squared norms of gradients add up over columns.
            all_columns = block.a.shape[2] == size.columns
            compute = gram_squared_norms if choice.norm == "gram" and all_columns else gradient_squared_norms
            norms = compute(block.g, block.a, share)
            if size.groups == 1 and all_columns and norms.shape[0] == size.samples:
                return norms
            if total is None:
                total = norms.new_zeros(size.samples)
            total[block.samples] += norms.view(-1, block.groups.stop - block.groups.start).sum(1)
            del block
        return g.new_zeros(size.samples, dtype=accumulation_dtype(g.dtype)) if total is None else total

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
        return total.view(self.weight().shape)

    def _share(self, workspace: Workspace) -> Workspace:
        """The workspace for blocks and for what is computed from them: half of it each, if blocks are unfolded."""
        return workspace.half() if self.unfolds else workspace
