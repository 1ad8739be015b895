# SPDX-License-Identifier: Apache-2.0
"""Layers whose output is `c(x) * weight + bias`, feature by feature: RMSNorm, LayerNorm and layer scales.

`c(x)` is the layer's own output for a weight of ones and no bias. Where a layer adds one to the weight, it is the
output for a weight of zeros.
"""

from typing import Any, Literal

import torch
from torch import nn
from torch.func import functional_call

from opacus_memprof.clipping.forwards.repetition import repeating
from opacus_memprof.clipping.layers.base import Layer
from opacus_memprof.clipping.workspace import Workspace, accumulation_dtype, slices

_COPIES = 6  # copies of the input that are live: casts, squares, the normalized input and its product


class ScaleLayer(Layer):
    """A layer that scales features.

    Args:
        name: the name of the module.
        module: the module; its parameters are `weight` and perhaps `bias`, both with one element for each feature.
        axis: the dimension of the features: -1 or 1.
        unit: the value of the weight at which the output is c(x): 1, or 0.
    """

    def __init__(self, name: str, module: nn.Module, axis: Literal[-1, 1], unit: float) -> None:
        super().__init__(name, module)
        self.axis, self.unit = axis, unit
        self.any_arrangement = axis == -1

    def min_dimensions(self) -> int:
        return 2

    def small_gradients(self, x: torch.Tensor | None, g: torch.Tensor, workspace: Workspace) -> dict[str, torch.Tensor]:
        dtype = accumulation_dtype(g.dtype)
        gradients: dict[str, torch.Tensor] = {}
        if self.is_trainable("bias"):
            gradients["bias"] = self._sum(g, dtype)
        if x is None or not self.is_trainable("weight"):
            return gradients
        total = gradients["weight"] = torch.zeros(len(g), self.weight().numel(), dtype=dtype, device=g.device)
        sample_bytes = _COPIES * g[:1].numel() * dtype.itemsize
        for n in slices(len(g), max(1, workspace.fit(sample_bytes, len(g)))):
            total[n] = self._sum(self.normalize(x[n]).to(g.dtype) * g[n], dtype)
        return gradients

    def normalize(self, x: torch.Tensor) -> torch.Tensor:
        """Returns c(x)."""
        own = self.module.named_parameters()
        values = {name: torch.zeros(p.shape, dtype=p.dtype, device=x.device) for name, p in own}
        values["weight"].fill_(self.unit)
        with torch.no_grad(), repeating():
            output: Any = functional_call(self.module, values, (x,))
        result: torch.Tensor = output
        return result

    def _sum(self, g: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Sums over all dimensions except samples and features."""
        features = g.dim() - 1 if self.axis == -1 else 1
        others = tuple(i for i in range(1, g.dim()) if i != features)
        return g.sum(others, dtype=dtype) if others else g.to(dtype)
