# SPDX-License-Identifier: Apache-2.0
"""nn.Linear, with any number of dimensions between the batch and the features."""

import torch

from opacus_memprof.clipping.cost import Choice
from opacus_memprof.clipping.kernels.norms import gradient_squared_norms, gram_squared_norms
from opacus_memprof.clipping.kernels.sums import products, sum_outer_products, sum_products
from opacus_memprof.clipping.layers.matrix import MatrixLayer, Sizes
from opacus_memprof.clipping.workspace import Workspace, accumulation_dtype, sum_dtype


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
        batch, tokens = x.shape[0], x.shape[1:-1].numel()
        return left.reshape(batch, tokens, left.shape[-1]).mT, right.reshape(batch, tokens, right.shape[-1])

    def weight_gradients(self, x: torch.Tensor, g: torch.Tensor, workspace: Workspace) -> torch.Tensor:
        shape = self.weight().shape
        if g.numel() == 0:
            return g.new_zeros(x.shape[0], *shape)
        return products(*self.operands(x, g)).view(-1, *shape)

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
