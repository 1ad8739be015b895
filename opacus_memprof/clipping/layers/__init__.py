# SPDX-License-Identifier: Apache-2.0
"""One class for each type of layer that flash_clip clips, which computes its per-sample norms and clipped sums."""

from collections.abc import Sequence

from torch import nn

from opacus_memprof.clipping.layers.base import KeptTensors, Layer
from opacus_memprof.clipping.layers.convolution import ConvolutionLayer
from opacus_memprof.clipping.layers.embedding import EmbeddingLayer
from opacus_memprof.clipping.layers.generic import GenericLayer
from opacus_memprof.clipping.layers.linear import LinearLayer
from opacus_memprof.clipping.layers.normalization import GroupNormLayer, LayerNormLayer, RMSNormLayer
from opacus_memprof.clipping.layers.recognition import recognize

LAYERS: dict[type[nn.Module], type[Layer]] = {
    nn.Linear: LinearLayer,
    nn.Embedding: EmbeddingLayer,
    nn.LayerNorm: LayerNormLayer,
    nn.RMSNorm: RMSNormLayer,
    nn.Conv1d: ConvolutionLayer,
    nn.Conv2d: ConvolutionLayer,
    nn.GroupNorm: GroupNormLayer,
}
"""Keyed by exact type, because a subclass may have another forward. Other layers are recognized by their results."""


def layer_for(name: str, module: nn.Module, trainable: Sequence[str]) -> Layer:
    """Returns the layer that clips a module's own parameters.

    Args:
        name: the name of the module in the model.
        module: the module.
        trainable: names of its own parameters that are trained.
    """
    if any(module._parameters[n].is_complex() for n in trainable):  # type: ignore[union-attr]
        return GenericLayer(name, module, trainable)
    if type(module) in LAYERS and set(trainable) <= {"weight", "bias"}:
        return LAYERS[type(module)](name, module)
    return recognize(name, module) or GenericLayer(name, module, trainable)


__all__ = ["LAYERS", "GenericLayer", "KeptTensors", "Layer", "layer_for"]
