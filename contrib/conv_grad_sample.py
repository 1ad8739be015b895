# SPDX-License-Identifier: Apache-2.0
"""Opacus' grad sampler for convolutions, with two corrections.

Opacus 1.6 pads with zeros whatever ``padding_mode`` is, and reads a two-dimensional input with the strides of a
contiguous tensor, so inputs in ``torch.channels_last`` or permuted views give the gradients of other numbers. Both are
silent. The sampler here also has no gradient for frozen weights and no sample for an empty batch, and does not compute
products of one group's inputs with another group's outputs.
"""

from __future__ import annotations

import math

import torch
import torch.nn as nn
import torch.nn.functional as F  # noqa: N812  # as everywhere in Opacus


def compute_conv_grad_sample(
    layer: nn.Conv1d | nn.Conv2d | nn.Conv3d, activations: list[torch.Tensor], backprops: torch.Tensor
) -> dict[nn.Parameter, torch.Tensor]:
    """Computes per sample gradients for convolutional layers.

    Args:
        layer: Layer
        activations: Activations, [batch, in_channels, ...]
        backprops: Backpropagations, [batch, out_channels, ...]
    """
    n, groups, positions = len(backprops), layer.groups, backprops.shape[2:].numel()
    ret = {}
    if layer.weight.requires_grad:
        g = backprops.reshape(n, groups, layer.out_channels // groups, positions)
        columns = layer.in_channels // groups * math.prod(layer.kernel_size)
        a = unfold(layer, activations[0].to(backprops.dtype)).reshape(n, groups, columns, positions)
        ret[layer.weight] = torch.einsum("ngoq,ngpq->ngop", g, a).reshape(n, *layer.weight.shape)
    if layer.bias is not None and layer.bias.requires_grad:
        ret[layer.bias] = backprops.flatten(2).sum(2)
    return ret


def unfold(layer: nn.Conv1d | nn.Conv2d | nn.Conv3d, x: torch.Tensor) -> torch.Tensor:
    """Returns the patches of an input with any strides and number of dimensions, [batch, in_channels, taps, positions].

    Args:
        layer: Layer
        x: Activations, [batch, in_channels, ...]
    """
    mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
    x = F.pad(x, layer._reversed_padding_repeated_twice, mode=mode)  # of padding="same" and "valid", too
    dims = len(layer.kernel_size)
    for i, (taps, stride, dilation) in enumerate(zip(layer.kernel_size, layer.stride, layer.dilation, strict=True)):
        x = x.unfold(2 + i, dilation * (taps - 1) + 1, stride)[..., ::dilation]
    # [batch, in_channels, positions in each dimension, taps in each dimension]
    x = x.permute(0, 1, *range(2 + dims, 2 + 2 * dims), *range(2, 2 + dims))
    return x.reshape(*x.shape[:2], math.prod(layer.kernel_size), x.shape[2 + dims :].numel())
