# SPDX-License-Identifier: Apache-2.0
"""nn.Conv1d and nn.Conv2d: for each group a linear map of the unfolded input.

The input is unfolded at once or, if that does not fit into the workspace, some samples (or groups, or channels) at a
time.
"""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional

from opacus_memprof.clipping.cost import Choice, Unfolding
from opacus_memprof.clipping.kernels.native import unfold
from opacus_memprof.clipping.kernels.norms import gradient_squared_norms, gram_squared_norms
from opacus_memprof.clipping.kernels.sums import products, sum_outer_products, sum_products
from opacus_memprof.clipping.layers.linear import MatrixLayer, Sizes, autocast_input
from opacus_memprof.clipping.workspace import Workspace, accumulation_dtype, slices, sum_dtype


class Block(NamedTuple):
    """The operands `g` and `a` for some samples, some groups and some columns of the weight."""

    samples: slice
    groups: slice
    columns: slice
    g: torch.Tensor
    a: torch.Tensor


class ConvolutionLayer(MatrixLayer):
    """nn.Conv1d or nn.Conv2d."""

    module: nn.Conv1d | nn.Conv2d

    def min_dimensions(self) -> int:
        return 4 if isinstance(self.module, nn.Conv2d) else 3

    def cast(self, x: torch.Tensor) -> torch.Tensor:
        return autocast_input(x)

    def small_gradients(self, x: torch.Tensor | None, g: torch.Tensor, workspace: Workspace) -> dict[str, torch.Tensor]:
        if not self.is_trainable("bias"):
            return {}
        return {"bias": g.flatten(2).sum(2, dtype=accumulation_dtype(g.dtype))}

    def terms(self, x: torch.Tensor) -> int:
        return self.module.weight.shape[2:].numel()  # taps

    def sizes(self, x: torch.Tensor, g: torch.Tensor) -> Sizes:
        weight, groups = self.module.weight, self.module.groups
        return Sizes(len(x), groups, g.shape[2:].numel(), weight.shape[0] // groups, weight.shape[1:].numel())

    def operands(self, x: torch.Tensor, g: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if x.dtype != g.dtype:
            x = x.to(g.dtype)
        groups = self.module.groups
        if groups == 1:
            return g.flatten(2), self._unfold(x).mT
        x = x.reshape(len(x) * groups, -1, *x.shape[2:])
        return g.reshape(len(x), -1, g.shape[2:].numel()), self._unfold(x).mT

    def has_views(self, x: torch.Tensor, g: torch.Tensor) -> bool:
        """Returns whether the operands are views. They are only for a kernel of one tap without stride and padding."""
        module: Any = self.module
        ones = (*module.kernel_size, *module.stride, module.groups)
        is_pointwise = set(ones) == {1} and not any(module._reversed_padding_repeated_twice)
        return is_pointwise and x.is_contiguous() and g.is_contiguous()

    def outer(self, x: torch.Tensor, g: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
        return (g.flatten(2).mT, x.flatten(2).mT) if self.has_views(x, g) else None

    def fits(self, x: torch.Tensor, g: torch.Tensor, workspace: Workspace) -> bool:
        return g.numel() > 0 and self._unfolding(x, g).fits(workspace.bytes)

    def _unfolding(self, x: torch.Tensor, g: torch.Tensor) -> Unfolding:
        size, padded = self.sizes(x, g), self._padded_numel(x)
        copied = padded if any(self.module._reversed_padding_repeated_twice) else 0
        if x.dtype != g.dtype:
            copied += x.shape[2:].numel()
        return Unfolding(
            samples=size.samples,
            groups=size.groups,
            channels=x.shape[1] // size.groups,
            taps=self.terms(x),
            tokens=size.tokens,
            padded=padded,
            copied=copied,
            itemsize=g.element_size(),
            is_view=self.has_views(x, g),
        )

    def weight_gradients(self, x: torch.Tensor, g: torch.Tensor, workspace: Workspace) -> torch.Tensor:
        size = self.sizes(x, g)
        if self.fits(x, g, workspace):
            return products(*self.operands(x, g)).view(size.samples, *self.weight().shape)
        shape = (size.samples, size.groups, size.rows, size.columns)
        stack: torch.Tensor | None = None
        for block in self.blocks(x, g, workspace):
            part = products(block.g, block.a)
            groups = block.groups.stop - block.groups.start
            stack = part.new_empty(shape) if stack is None else stack
            stack[block.samples, block.groups, :, block.columns] = part.view(-1, groups, *part.shape[1:])
            del part, block
        return (g.new_zeros(shape) if stack is None else stack).view(size.samples, *self.weight().shape)

    def weight_squared_norms(
        self,
        x: torch.Tensor,
        g: torch.Tensor,
        choice: Choice,
        workspace: Workspace,
        lost: torch.Tensor | None = None,
    ) -> torch.Tensor:
        size, share = self.sizes(x, g), workspace.half()  # half of it is for the unfolded blocks
        compute = gram_squared_norms if choice.norm == "gram" else gradient_squared_norms
        if self.fits(x, g, share):
            own = lost if lost is None or size.groups == 1 else lost.new_empty(len(g) * size.groups)
            norms = compute(*self.operands(x, g), share, own)
            if size.groups == 1:
                return norms
            if lost is not None and own is not None:
                torch.any(own.view(-1, size.groups), 1, out=lost)
            return norms.view(-1, size.groups).sum(1)
        if lost is not None:
            lost.zero_()
        total = torch.zeros(len(g), dtype=accumulation_dtype(g.dtype), device=g.device)
        for block in self.blocks(x, g, share):
            # The Gram product needs all columns at once; squared norms of gradients add up over columns.
            all_columns = block.a.shape[2] == size.columns
            own = None if lost is None else lost.new_empty(len(block.g))
            norms = (compute if all_columns else gradient_squared_norms)(block.g, block.a, share, own)
            groups = block.groups.stop - block.groups.start
            total[block.samples] += norms.view(-1, groups).sum(1)
            if lost is not None and own is not None:
                lost[block.samples] |= own.view(-1, groups).any(1)
            del block
        return total

    def weight_sum(
        self,
        x: torch.Tensor,
        g: torch.Tensor,
        factors: torch.Tensor,
        workspace: Workspace,
        lost: torch.Tensor | None = None,
    ) -> torch.Tensor:
        size, share = self.sizes(x, g), workspace.half()  # half of it is for the unfolded blocks
        if self.fits(x, g, share):
            return self._sum_of(*self.operands(x, g), factors, size.groups, share, lost).view(self.weight().shape)
        shape = (size.groups, size.rows, size.columns)
        total: torch.Tensor | None = None
        for block in self.blocks(x, g, share):
            groups, n = block.groups.stop - block.groups.start, block.samples
            own = None if lost is None else lost[n]
            part = self._sum_of(block.g, block.a, factors[n], groups, share, own)
            if total is None:
                total = torch.zeros(shape, dtype=part.dtype, device=part.device)
            total[block.groups, :, block.columns] += part
            del part, block
        return (g.new_zeros(shape, dtype=sum_dtype(g.dtype)) if total is None else total).view(self.weight().shape)

    def _sum_of(
        self,
        g: torch.Tensor,
        a: torch.Tensor,
        factors: torch.Tensor,
        groups: int,
        workspace: Workspace,
        lost: torch.Tensor | None,
    ) -> torch.Tensor:
        """Returns the clipped sum of the products `g @ a`, [groups, rows, columns]."""
        if groups == 1:
            total = sum_outer_products(g.mT, a, factors, workspace, lost)
            if total is not None:
                return total.unsqueeze(0)
        return sum_products(g, a, factors, groups, workspace, lost)

    def blocks(self, x: torch.Tensor, g: torch.Tensor, workspace: Workspace) -> Iterator[Block]:
        """Splits the products into blocks whose operands fit into the workspace."""
        size = self.sizes(x, g)
        if size.samples == 0 or size.tokens == 0:
            return
        unfolding = self._unfolding(x, g)
        channels, taps = unfolding.channels, unfolding.taps
        samples, groups, width = unfolding.part(workspace.bytes)
        if not width:
            workspace.fit_at_least_one(unfolding.channel_bytes, channels, f"one channel of {self.describe()}")
        x = x.reshape(size.samples, size.groups, channels, *x.shape[2:])
        g = g.reshape(size.samples, size.groups, size.rows, size.tokens)
        for n in slices(size.samples, samples):
            for k in slices(size.groups, groups):
                for c in slices(channels, width):
                    a = self._unfold(x[n, k, c].to(g.dtype).flatten(0, 1)).mT
                    yield Block(n, k, slice(c.start * taps, c.stop * taps), g[n, k].flatten(0, 1), a)
                    del a

    def _unfold(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the unfolded input, [N, columns, tokens], of an input [N, channels, ...]."""
        module: Any = self.module
        pads = module._reversed_padding_repeated_twice
        if module.padding_mode != "zeros" and any(pads):
            x = functional.pad(x, pads, module.padding_mode)
            pads = ()
        return unfold(x, pads, module.kernel_size, module.stride, module.dilation)

    def _padded_numel(self, x: torch.Tensor) -> int:
        """Returns the number of elements of one channel of one sample, including padding."""
        pads = self.module._reversed_padding_repeated_twice
        return math.prod(n + pads[2 * i] + pads[2 * i + 1] for i, n in enumerate(reversed(x.shape[2:])))
