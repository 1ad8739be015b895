# SPDX-License-Identifier: Apache-2.0
"""Layers with inputs, and the oracle of the clipping tests: one sample at a time through plain autograd."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from opacus_memprof.clipping.layers import KeptTensors, Layer
from opacus_memprof.clipping.layers.small_layers import find_deferred_norms
from opacus_memprof.clipping.workspace import Workspace


@dataclass(frozen=True)
class Case:
    name: str
    build: Callable[[], nn.Module]
    shape: tuple[int, ...]  # of one sample
    indices: int = 0  # of an embedding's table; 0 for real inputs

    def inputs(self, batch: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
        if self.indices:
            return torch.randint(0, self.indices, (batch, *self.shape))
        return torch.randn(batch, *self.shape, dtype=dtype)


CASES = [
    Case("linear_2d", lambda: nn.Linear(7, 5), (7,)),
    Case("linear_2d_no_bias", lambda: nn.Linear(7, 5, bias=False), (7,)),
    Case("linear_3d_short", lambda: nn.Linear(7, 5), (2, 7)),
    Case("linear_3d_long", lambda: nn.Linear(7, 5), (19, 7)),
    Case("linear_3d_no_bias", lambda: nn.Linear(16, 24, bias=False), (5, 16)),
    Case("linear_4d", lambda: nn.Linear(6, 9), (3, 4, 6)),
    Case("linear_4d_short", lambda: nn.Linear(32, 33), (2, 3, 32)),
    Case("linear_tall", lambda: nn.Linear(3, 40), (2, 3)),
    Case("embedding", lambda: nn.Embedding(11, 6), (9,), 11),
    Case("embedding_4d", lambda: nn.Embedding(5, 3), (2, 3, 4), 5),
    Case("embedding_1d", lambda: nn.Embedding(5, 3), (), 5),
    Case("embedding_padding", lambda: nn.Embedding(6, 4, padding_idx=2), (13,), 6),
    Case("layer_norm", lambda: nn.LayerNorm(8), (5, 8)),
    Case("layer_norm_2d", lambda: nn.LayerNorm(8), (8,)),
    Case("layer_norm_two_dims", lambda: nn.LayerNorm((4, 6)), (3, 4, 6)),
    Case("layer_norm_eps", lambda: nn.LayerNorm(8, eps=0.1), (5, 8)),
    Case("layer_norm_no_bias", lambda: nn.LayerNorm(8, bias=False), (5, 8)),
    Case("rms_norm", lambda: nn.RMSNorm(8), (5, 8)),
    Case("rms_norm_eps", lambda: nn.RMSNorm(8, eps=1e-3), (2, 3, 8)),
    Case("conv1d", lambda: nn.Conv1d(4, 6, 3), (4, 17)),
    Case("conv1d_all", lambda: nn.Conv1d(4, 6, 3, stride=2, padding=2, dilation=2, groups=2), (4, 17)),
    Case("conv1d_same_even", lambda: nn.Conv1d(4, 6, 4, padding="same", bias=False), (4, 9)),
    Case("conv2d", lambda: nn.Conv2d(3, 5, 3), (3, 9, 8)),
    Case("conv2d_few_positions", lambda: nn.Conv2d(16, 24, 3, padding=1), (16, 3, 3)),
    Case("conv2d_stride_padding", lambda: nn.Conv2d(3, 5, (3, 2), stride=(2, 1), padding=(1, 2)), (3, 9, 8)),
    Case("conv2d_dilation_groups", lambda: nn.Conv2d(6, 9, 3, dilation=2, padding=2, groups=3), (6, 7, 7)),
    Case("conv2d_depthwise", lambda: nn.Conv2d(6, 6, 3, padding=1, groups=6, bias=False), (6, 5, 5)),
    Case("conv2d_pointwise", lambda: nn.Conv2d(8, 12, 1), (8, 4, 4)),
    Case("conv2d_pointwise_stride", lambda: nn.Conv2d(8, 12, 1, stride=2, groups=2), (8, 5, 5)),
    Case("conv2d_same", lambda: nn.Conv2d(3, 4, (2, 3), padding="same"), (3, 6, 5)),
    Case("conv2d_circular", lambda: nn.Conv2d(3, 4, 3, padding=1, padding_mode="circular"), (3, 6, 5)),
    Case("group_norm", lambda: nn.GroupNorm(3, 6), (6, 4, 5)),
    Case("group_norm_1d", lambda: nn.GroupNorm(2, 8), (8,)),
]


def randomized(case: Case, dtype: torch.dtype = torch.float64) -> nn.Module:
    """The case's layer with parameters that are not all zeros or ones."""
    module = case.build().to(dtype)
    for parameter in module.parameters():
        nn.init.normal_(parameter)
    return module


def per_sample_gradients(
    module: nn.Module, x: torch.Tensor, weight: Callable[[int], torch.Tensor]
) -> dict[str, torch.Tensor]:
    """[B, *shape] by parameter: the gradient of ``(module(x[i]) * weight(i)).sum()``, one sample at a time."""
    gradients: dict[str, list[torch.Tensor]] = {name: [] for name, _ in module.named_parameters()}
    for i in range(len(x)):
        module.zero_grad()
        (module(x[i : i + 1]) * weight(i)).sum().backward()
        for name, parameter in module.named_parameters():
            gradients[name].append(parameter.grad.clone())
    module.zero_grad()
    return {name: torch.stack(each) for name, each in gradients.items()}


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    scale = expected.abs().max().clamp(min=1e-300)
    return float((actual - expected).abs().max() / scale) if expected.numel() else 0.0


def keep_with_norms(layer: Layer, x: torch.Tensor | None, g: torch.Tensor, workspace: Workspace) -> KeptTensors:
    """What the layer keeps in backward, with the norms that wait for the step."""
    kept = layer.keep(x, g, workspace)
    find_deferred_norms({layer: kept})
    return kept
