# SPDX-License-Identifier: Apache-2.0
"""nn.Linear, and the base class of all layers whose weight gradient is a matrix product.

These are linear layers, with any number of dimensions between the batch and the features, and convolutions, whose input
is unfolded.
"""

from typing import NamedTuple

import torch
from torch import nn

from opacus_memprof.clipping.cost import Choice, choose
from opacus_memprof.clipping.kernels.native import linear_gradients_cpu
from opacus_memprof.clipping.kernels.norms import (
    gradient_squared_norms,
    gram_squared_norms,
    has_kernels,
    is_small,
    squared_norms_unless_deferred,
)
from opacus_memprof.clipping.kernels.sums import products, sum_outer_products, sum_products
from opacus_memprof.clipping.layers.base import KeepFunction, KeptTensors, Layer, keep_stacks
from opacus_memprof.clipping.workspace import Workspace, accumulation_dtype, sum_dtype


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
        """Returns the sizes of the product."""
        raise NotImplementedError

    def operands(self, x: torch.Tensor, g: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the operands of the weight gradients, [B groups, rows, tokens] and [B groups, tokens, columns].

        There must be at least one sample and one token.
        """
        raise NotImplementedError

    def has_views(self, x: torch.Tensor, g: torch.Tensor) -> bool:
        """Returns whether `operands` are views."""
        raise NotImplementedError

    def fits(self, x: torch.Tensor, g: torch.Tensor, workspace: Workspace) -> bool:
        """Returns whether the copies that `operands` makes fit into the workspace."""
        return True

    def outer(self, x: torch.Tensor, g: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Returns the tensors, [B, ..., rows] and [B, ..., columns], whose outer products give the weight's gradient.

        The gradient is the sum over tokens. Returns None if the tensors would have to be copied.
        """
        raise NotImplementedError

    def defers_norms(self, x: torch.Tensor, g: torch.Tensor, choice: Choice) -> bool:
        if choice.norm != "gram" or x.dtype != g.dtype or g.numel() == 0 or not self.has_views(x, g):
            return False
        return has_kernels(g) if self.sizes(x, g).tokens > 1 else is_small(x) and is_small(g)

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

    def keep_function(
        self, kept: KeptTensors, x: torch.Tensor, g: torch.Tensor, workspace: Workspace
    ) -> KeepFunction | None:
        weight = self.module._parameters["weight"]
        if weight is None or not weight.requires_grad:
            return None
        if kept.pair is not None and kept.norms[weight] is None:
            return self._keep_pair
        if x.dtype != g.dtype or g.numel() == 0 or not self.fits(x, g, workspace):
            return None
        return self._keep_gradients if kept.pair is None else self._keep_pair_with_norms

    def _keep_pair(self, x: torch.Tensor, g: torch.Tensor, workspace: Workspace) -> KeptTensors:
        """Keeps the input and the output's gradient, and defers the norms of the weight."""
        kept = self._keep_bias(x, g, workspace)
        kept.pair = (x, g)
        kept.norms[self.weight()] = None
        return kept

    def _keep_pair_with_norms(self, x: torch.Tensor, g: torch.Tensor, workspace: Workspace) -> KeptTensors:
        """Keeps the input and the output's gradient, and computes the norms that are not deferred."""
        kept, choice = self._keep_bias(x, g, workspace), self._choice(x, g, keep=True)
        assert choice is not None
        self._keep_norms(kept, x, g, choice, workspace)
        return kept

    def _keep_gradients(self, x: torch.Tensor, g: torch.Tensor, workspace: Workspace) -> KeptTensors:
        """Keeps the per-sample gradients, and defers the norms of small ones."""
        kept, weight = self._keep_bias(x, g, workspace), self.weight()
        stack = kept.stacks[weight] = products(*self.operands(x, g)).view(len(x), *weight.shape)
        kept.norms[weight] = squared_norms_unless_deferred(stack)
        return kept

    def _keep_bias(self, x: torch.Tensor, g: torch.Tensor, workspace: Workspace) -> KeptTensors:
        bias = self.module._parameters.get("bias")
        if bias is None or not bias.requires_grad:
            return KeptTensors()
        return keep_stacks({bias: self.small_gradients(x, g, workspace)["bias"]})


def autocast_input(x: torch.Tensor) -> torch.Tensor:
    """Casts `x` as autocast casts the operands of a matrix product or convolution: every dtype except float64."""
    device = x.device.type
    if torch.is_autocast_enabled(device) and x.is_floating_point() and x.dtype != torch.float64:
        return x.to(torch.get_autocast_dtype(device))
    return x


class LinearLayer(MatrixLayer):
    """nn.Linear."""

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

    def operands(self, x: torch.Tensor, g: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if x.dtype != g.dtype:
            x = x.to(g.dtype)
        left, right = self.outer(x, g)
        if x.dim() == g.dim() == 3:
            return left.mT, right
        if x.dim() == 2:
            return left.unsqueeze(2), right.unsqueeze(1)
        batch, tokens = x.shape[0], x.shape[1:-1].numel()
        return left.reshape(batch, tokens, left.shape[-1]).mT, right.reshape(batch, tokens, right.shape[-1])

    def keep_function(
        self, kept: KeptTensors, x: torch.Tensor, g: torch.Tensor, workspace: Workspace
    ) -> KeepFunction | None:
        own = super().keep_function(kept, x, g, workspace)
        is_plain = x.dim() == g.dim() == 3 and len(x) > 1 and all(map(is_small, (x, g, *kept.stacks.values())))
        return self._keep_gradients_cpu if own == self._keep_gradients and g.is_cpu and is_plain else own

    def _keep_gradients_cpu(self, x: torch.Tensor, g: torch.Tensor, workspace: Workspace) -> KeptTensors:
        """Does the same as `_keep_gradients`, for small tensors [B, T, features], in one call into C++."""
        weight, bias = self.weight(), self.module._parameters.get("bias")
        has_bias = bias is not None and bias.requires_grad
        of_weight, of_bias = linear_gradients_cpu(*self.outer(x, g), g if has_bias else None)
        stacks: dict[nn.Parameter, torch.Tensor] = {}
        if bias is not None and of_bias is not None:
            stacks[bias] = of_bias
        stacks[weight] = of_weight
        return KeptTensors(dict.fromkeys(stacks), stacks)

    def weight_gradients(self, x: torch.Tensor, g: torch.Tensor, workspace: Workspace) -> torch.Tensor:
        shape = self.weight().shape
        if g.numel() == 0:
            return g.new_zeros(x.shape[0], *shape)
        return products(*self.operands(x, g)).view(len(x), *shape)

    def has_views(self, x: torch.Tensor, g: torch.Tensor) -> bool:
        return x.dim() == g.dim() == 3 or (x.is_contiguous() and g.is_contiguous())

    def weight_squared_norms(
        self,
        x: torch.Tensor,
        g: torch.Tensor,
        choice: Choice,
        workspace: Workspace,
        lost: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if g.numel() == 0:
            if lost is not None:
                lost.zero_()
            return g.new_zeros(x.shape[0], dtype=accumulation_dtype(g.dtype))
        compute = gram_squared_norms if choice.norm == "gram" else gradient_squared_norms
        return compute(*self.operands(x, g), workspace, lost)

    def outer(self, x: torch.Tensor, g: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return g, x

    def weight_sum(
        self,
        x: torch.Tensor,
        g: torch.Tensor,
        factors: torch.Tensor,
        workspace: Workspace,
        lost: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if g.numel() == 0:
            return g.new_zeros(self.weight().shape, dtype=sum_dtype(g.dtype))
        left, right = self.operands(x, g)
        total = sum_outer_products(left.mT, right, factors, workspace, lost)
        return sum_products(left, right, factors, 1, workspace, lost)[0] if total is None else total


class TransposedLinearLayer(LinearLayer):
    """A linear layer whose weight is [inputs, outputs], such as Conv1D of transformers.

    The gradient of its weight is that of a linear layer with input and output gradient exchanged.
    """

    def sizes(self, x: torch.Tensor, g: torch.Tensor) -> Sizes:
        return Sizes(x.shape[0], 1, x.shape[1:-1].numel(), x.shape[-1], g.shape[-1])

    def outer(self, x: torch.Tensor, g: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x, g
