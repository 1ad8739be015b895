# SPDX-License-Identifier: Apache-2.0
"""One class for each type of layer that flash_clip clips, which computes its per-sample norms and clipped sums."""

from __future__ import annotations

from torch import nn

from opacus_memprof.clipping.layers.base import KeptTensors, Layer
from opacus_memprof.clipping.layers.convolution import ConvolutionLayer
from opacus_memprof.clipping.layers.embedding import EmbeddingLayer
from opacus_memprof.clipping.layers.linear import LinearLayer
from opacus_memprof.clipping.layers.normalization import GroupNormLayer, LayerNormLayer, RMSNormLayer

LAYERS: dict[type[nn.Module], type[Layer]] = {
    nn.Linear: LinearLayer,
    nn.Embedding: EmbeddingLayer,
    nn.LayerNorm: LayerNormLayer,
    nn.RMSNorm: RMSNormLayer,
    nn.Conv1d: ConvolutionLayer,
    nn.Conv2d: ConvolutionLayer,
    nn.GroupNorm: GroupNormLayer,
}
"""By exact type, because a subclass may have another forward."""

__all__ = ["LAYERS", "KeptTensors", "Layer"]
