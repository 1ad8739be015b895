# SPDX-License-Identifier: Apache-2.0
"""nn.Conv1d and nn.Conv2d: for each group a linear map of the unfolded input.

The input is unfolded for some samples (or groups, or channels) at a time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional

from opacus_memprof.clipping.cost import Choice
from opacus_memprof.clipping.layers.linear import autocast_input
from opacus_memprof.clipping.layers.matrix import MatrixLayer, Sizes
from opacus_memprof.clipping.norms import gradient_squared_norms, gram_squared_norms
from opacus_memprof.clipping.sums import products, sum_outer_products, sum_products
from opacus_memprof.clipping.workspace import Workspace, accumulation_dtype, slices


class Block(NamedTuple):
    """The operands ``g`` and ``a`` for some samples, some groups and some columns of the weight."""

    samples: slice
    groups: slice
    columns: slice
    g: torch.Tensor
    a: torch.Tensor


class ConvolutionLayer(MatrixLayer):
    module: nn.Conv1d | nn.Conv2d

    def min_dimensions(self) -> int:
        return 4 if isinstance(self.module, nn.Conv2d) else 3

    def cast(self, x: torch.Tensor) -> torch.Tensor:
        return autocast_input(x)

    def small_gradients(self, x: torch.Tensor | None, g: torch.Tensor, workspace: Workspace) -> dict[str, torch.Tensor]:
        if not self.is_trainable("bias"):
            return {}
        return {"bias": g.flatten(2).sum(2, dtype=accumulation_dtype(g.dtype))}

    def sizes(self, x: torch.Tensor, g: torch.Tensor) -> Sizes:
        weight, groups = self.module.weight, self.module.groups
        return Sizes(len(x), groups, g.shape[2:].numel(), weight.shape[0] // groups, weight.shape[1:].numel())

    def weight_gradients(self, x: torch.Tensor, g: torch.Tensor, workspace: Workspace) -> torch.Tensor:
        size = self.sizes(x, g)
        shape = (size.samples, size.groups, size.rows, size.columns)
        stack: torch.Tensor | None = None
        for block in self.blocks(x, g, workspace):
            part = products(block.g, block.a)
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
        size, share = self.sizes(x, g), workspace.half()  # of it are the unfolded blocks
        total: torch.Tensor | None = None
        for block in self.blocks(x, g, share):
            # The Gram product needs all columns at once; squared norms of gradients add up over columns.
            all_columns = block.a.shape[2] == size.columns
            compute = gram_squared_norms if choice.norm == "gram" and all_columns else gradient_squared_norms
            norms = compute(block.g, block.a, share)
            groups = block.groups.stop - block.groups.start
            norms = norms if groups == 1 else norms.view(-1, groups).sum(1)
            if len(norms) == size.samples and total is None:
                total = norms
            else:
                total = self._no_norms(g) if total is None else total
                total[block.samples] += norms
            del block
        return self._no_norms(g) if total is None else total

    def _no_norms(self, g: torch.Tensor) -> torch.Tensor:
        return torch.zeros(len(g), dtype=accumulation_dtype(g.dtype), device=g.device)

    def weight_sum(
        self, x: torch.Tensor, g: torch.Tensor, factors: torch.Tensor | None, workspace: Workspace
    ) -> torch.Tensor:
        size, share = self.sizes(x, g), workspace.half()  # of it are the unfolded blocks
        shape = (size.groups, size.rows, size.columns)
        total: torch.Tensor | None = None
        for block in self.blocks(x, g, share):
            part = self._sum_of(block, factors, share)
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

    def _sum_of(self, block: Block, factors: torch.Tensor | None, workspace: Workspace) -> torch.Tensor:
        """The clipped sum of a block, [groups, rows, columns]."""
        groups = block.groups.stop - block.groups.start
        if factors is not None:
            factors = factors[block.samples]
            if groups == 1:
                total = sum_outer_products(block.g.mT, block.a, factors, workspace)
                if total is not None:
                    return total.unsqueeze(0)
        return sum_products(block.g, block.a, factors, groups, workspace)

    def operands(self, x: torch.Tensor, g: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return g.flatten(2), x.flatten(2).mT

    def has_views(self, x: torch.Tensor, g: torch.Tensor) -> bool:
        """As of all of these, only a convolution with a kernel of one tap that is applied everywhere."""
        module: Any = self.module
        ones = (*module.kernel_size, *module.stride, module.groups)
        is_pointwise = set(ones) == {1} and not any(module._reversed_padding_repeated_twice)
        return is_pointwise and x.is_contiguous() and g.is_contiguous()

    def blocks(self, x: torch.Tensor, g: torch.Tensor, workspace: Workspace) -> Iterator[Block]:
        """Splits the products into blocks whose operands fit into the workspace."""
        size = self.sizes(x, g)
        if size.samples == 0 or size.tokens == 0:
            return
        channels = x.shape[1] // size.groups
        taps = size.columns // channels
        # Bytes of one channel: its unfolded columns, and at most two copies of the input (cast or sliced, and padded).
        unit = (taps * size.tokens + 2 * self._padded_numel(x)) * g.element_size()
        if x.shape[:2].numel() * unit <= workspace.bytes:
            every = size.samples * size.groups
            a = self._unfold(x.to(g.dtype).reshape(every, channels, *x.shape[2:])).mT
            g = g.reshape(every, size.rows, size.tokens)
            yield Block(slice(0, size.samples), slice(0, size.groups), slice(0, size.columns), g, a)
            return
        x = x.reshape(size.samples, size.groups, channels, *x.shape[2:])
        g = g.reshape(size.samples, size.groups, size.rows, size.tokens)
        groups = workspace.fit(channels * unit, size.groups)  # of one sample
        samples = max(1, workspace.fit(size.groups * channels * unit, size.samples))
        one_channel = f"one channel of {self.describe()}"
        width = channels if groups else workspace.fit_at_least_one(unit, channels, one_channel)
        for n in slices(size.samples, samples):
            for k in slices(size.groups, max(1, groups)):
                for c in slices(channels, width):
                    a = self._unfold(x[n, k, c].to(g.dtype).flatten(0, 1)).mT
                    yield Block(n, k, slice(c.start * taps, c.stop * taps), g[n, k].flatten(0, 1), a)
                    del a

    def _unfold(self, x: torch.Tensor) -> torch.Tensor:
        """The unfolded input, [N, columns, tokens], of an input [N, channels, ...].

        The windows are a view, which one kernel copies: torch's own im2col on CUDA launches one for each sample.
        """
        module: Any = self.module
        pads = module._reversed_padding_repeated_twice
        if any(pads):
            x = functional.pad(x, pads, "constant" if module.padding_mode == "zeros" else module.padding_mode)
        kernel, stride, dilation = module.kernel_size, module.stride, module.dilation
        reaches = [d * (k - 1) for k, d in zip(kernel, dilation, strict=True)]
        places = [(n - reach - 1) // s + 1 for n, reach, s in zip(x.shape[2:], reaches, stride, strict=True)]
        steps = x.stride()[2:]
        taps = [step * d for step, d in zip(steps, dilation, strict=True)]
        moves = [step * s for step, s in zip(steps, stride, strict=True)]
        windows = x.as_strided((*x.shape[:2], *kernel, *places), (*x.stride()[:2], *taps, *moves))
        return windows.flatten(1, 1 + len(kernel)).flatten(2)  # a view where the kernel has one tap

    def _padded_numel(self, x: torch.Tensor) -> int:
        """The number of elements of one channel of one sample, including padding."""
        pads = self.module._reversed_padding_repeated_twice
        return math.prod(n + pads[2 * i] + pads[2 * i + 1] for i, n in enumerate(reversed(x.shape[2:])))
