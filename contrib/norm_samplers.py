# SPDX-License-Identifier: Apache-2.0
"""Norm samplers for ghost clipping whose temporaries have a ceiling.

Opacus' norm sampler for ``nn.Linear`` forms two matrices of [batch, tokens, tokens], and layers without a norm sampler
(convolutions, normalization layers) form all of their per-sample gradients. The samplers here compute the same norms
from pieces of these: tiles of the two matrices (Goodfellow 2015, arXiv 1510.01799; Li et al. 2022, arXiv 2110.05679),
or some rows of some samples' gradients, whichever takes fewer operations. A piece takes at most ``workspace_bytes``,
but at least one row, token or channel. Norms accumulate in float32 (float64 for float64).

All samplers have the interface of ``opacus.grad_sample.register_norm_sampler``:
``(layer, activations, backprops) -> {parameter: norms of shape [batch]}``.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator

import torch
import torch.nn as nn
import torch.nn.functional as F  # noqa: N812  # as everywhere in Opacus
from opacus.grad_sample import register_norm_sampler

from .linear_norm_sample import DEFAULT_WORKSPACE_BYTES, replace_lost_norms
from .linear_norm_sample import accumulation_dtype as _accumulation_dtype

INDEX_BYTES = 64  # of a token of an embedding: sorted indices, their order, slots, and what sorting needs
NORM_COPIES = 3  # of a normalization layer's input: the normalized one, a cast, and its product with the backprops

Norms = dict[nn.Parameter, torch.Tensor]


def compute_linear_norm_sample(
    layer: nn.Linear,
    activations: list[torch.Tensor],
    backprops: torch.Tensor,
    workspace_bytes: int = DEFAULT_WORKSPACE_BYTES,
) -> Norms:
    """Computes per-sample gradient norms of ``nn.Linear``, with any number of dimensions between batch and features.

    Args:
        layer: Layer
        activations: Activations, [batch, ..., in_features]
        backprops: Backpropagations, [batch, ..., out_features]
        workspace_bytes: ceiling on the temporaries
    """
    batch, tokens = len(backprops), backprops.shape[1:-1].numel()
    g = backprops.reshape(batch, tokens, layer.out_features)
    ret = {}
    if layer.weight.requires_grad:
        a = activations[0].to(backprops.dtype).reshape(batch, tokens, layer.in_features)
        ret[layer.weight] = _squared_norms_of_products(g.mT, a, workspace_bytes).sqrt_()
    if layer.bias is not None and layer.bias.requires_grad:
        ret[layer.bias] = _squared_norms(g.sum(1, dtype=_accumulation_dtype(g.dtype))).sqrt_()
    return ret


def compute_conv_norm_sample(
    layer: nn.Conv1d | nn.Conv2d,
    activations: list[torch.Tensor],
    backprops: torch.Tensor,
    workspace_bytes: int = DEFAULT_WORKSPACE_BYTES,
) -> Norms:
    """Computes per-sample gradient norms of ``nn.Conv1d`` and ``nn.Conv2d``.

    A group's norms are those of a linear layer on the unfolded input, which is unfolded for some samples, groups or
    channels at a time.

    Args:
        layer: Layer
        activations: Activations, [batch, in_channels, ...]
        backprops: Backpropagations, [batch, out_channels, ...]
        workspace_bytes: ceiling on the temporaries
    """
    batch, groups, tokens = len(backprops), layer.groups, backprops.shape[2:].numel()
    dtype = _accumulation_dtype(backprops.dtype)
    ret = {}
    if layer.weight.requires_grad:
        channels, taps = layer.in_channels // groups, math.prod(layer.kernel_size)
        x = activations[0].reshape(batch, groups, channels, *activations[0].shape[2:])
        g = backprops.reshape(batch, groups, layer.out_channels // groups, tokens)
        half = workspace_bytes // 2  # for the unfolded input, the other for the norms
        pads = layer._reversed_padding_repeated_twice
        sides = [side + pads[2 * i] + pads[2 * i + 1] for i, side in enumerate(reversed(x.shape[3:]))]
        channel_bytes = (taps * tokens + 2 * math.prod(sides)) * g.element_size()
        total = torch.zeros(batch, dtype=dtype, device=g.device)
        # Squared norms add up over groups and channels. Where a group fits, several groups (and samples) are one call.
        whole = channels * channel_bytes <= half
        for n, k in _tiles(batch, groups, channels * channel_bytes, half):
            for c in _slices(channels, channels if whole else max(1, half // channel_bytes)):
                a = _unfold(layer, x[n, k, c].to(g.dtype).flatten(0, 1)).mT
                norms = _squared_norms_of_products(g[n, k].flatten(0, 1), a, half)
                total[n] += norms.view(-1, k.stop - k.start).sum(1)
                del a
        ret[layer.weight] = total.sqrt_()
    if layer.bias is not None and layer.bias.requires_grad:
        ret[layer.bias] = _squared_norms(backprops.flatten(2).sum(2, dtype=dtype)).sqrt_()
    return ret


def compute_embedding_norm_sample(
    layer: nn.Embedding,
    activations: list[torch.Tensor],
    backprops: torch.Tensor,
    workspace_bytes: int = DEFAULT_WORKSPACE_BYTES,
) -> Norms:
    """Computes per-sample gradient norms of ``nn.Embedding``: backprops of a sample's equal indices are summed.

    As in PyTorch, the row at ``padding_idx`` has no gradient.

    Args:
        layer: Layer
        activations: Indices, [batch, ...]
        backprops: Backpropagations, [batch, ..., embedding_dim]
        workspace_bytes: ceiling on the temporaries
    """
    if not layer.weight.requires_grad:
        return {}
    batch, tokens, width = len(backprops), backprops.shape[1:-1].numel(), backprops.shape[-1]
    dtype = _accumulation_dtype(backprops.dtype)
    ids, g = activations[0].reshape(batch, tokens), backprops.reshape(batch, tokens, width)
    total = torch.zeros(batch, dtype=dtype, device=g.device)
    column_bytes = 2 * dtype.itemsize  # of one token: its sum, and a copy or cast of its backprop
    samples = workspace_bytes // max(1, tokens * (INDEX_BYTES + width * column_bytes))
    for n in _slices(batch, max(1, samples)):
        slots = _slots_of_equal_ids(ids[n])
        left = workspace_bytes - slots.numel() * INDEX_BYTES
        for c in _slices(width, max(1, min(width, left // max(1, slots.numel() * column_bytes)))):
            sums = torch.zeros(slots.numel(), c.stop - c.start, dtype=dtype, device=g.device)
            sums.index_add_(0, slots, g[n, :, c].flatten(0, 1).to(dtype))
            squares = _squared_norms(sums)
            del sums
            if layer.padding_idx is not None:
                squares[slots] *= ids[n].flatten() != layer.padding_idx
            total[n] += squares.view(-1, tokens).sum(1)
    return {layer.weight: total.sqrt_()}


def compute_layer_norm_norm_sample(
    layer: nn.LayerNorm | nn.RMSNorm,
    activations: list[torch.Tensor],
    backprops: torch.Tensor,
    workspace_bytes: int = DEFAULT_WORKSPACE_BYTES,
) -> Norms:
    """Computes per-sample gradient norms of ``nn.LayerNorm`` and ``nn.RMSNorm``.

    The input is normalized again for some tokens at a time.

    Args:
        layer: Layer
        activations: Activations, [batch, ..., *normalized_shape]
        backprops: Backpropagations, of the same shape
        workspace_bytes: ceiling on the temporaries
    """
    shape, batch, dtype = tuple(layer.normalized_shape), len(backprops), _accumulation_dtype(backprops.dtype)
    tokens = backprops.shape[1 : backprops.dim() - len(shape)].numel()
    g = backprops.reshape(batch, tokens, *shape)
    normalize = F.layer_norm if isinstance(layer, nn.LayerNorm) else F.rms_norm
    ret = {}
    if layer.weight.requires_grad:
        x = activations[0].reshape(g.shape)
        total = torch.zeros(batch, *shape, dtype=dtype, device=g.device)
        for n, t in _tiles(batch, tokens, NORM_COPIES * math.prod(shape) * g.element_size(), workspace_bytes):
            total[n] += normalize(x[n, t].to(g.dtype), shape, eps=layer.eps).mul_(g[n, t]).sum(1, dtype=dtype)
        ret[layer.weight] = _squared_norms(total).sqrt_()
    bias = getattr(layer, "bias", None)
    if bias is not None and bias.requires_grad:
        ret[bias] = _squared_norms(g.sum(1, dtype=dtype)).sqrt_()
    return ret


def compute_group_norm_norm_sample(
    layer: nn.GroupNorm,
    activations: list[torch.Tensor],
    backprops: torch.Tensor,
    workspace_bytes: int = DEFAULT_WORKSPACE_BYTES,
) -> Norms:
    """Computes per-sample gradient norms of ``nn.GroupNorm``. The input is normalized again for some groups at a time.

    Args:
        layer: Layer
        activations: Activations, [batch, num_channels, ...]
        backprops: Backpropagations, of the same shape
        workspace_bytes: ceiling on the temporaries
    """
    batch, positions, dtype = len(backprops), backprops.shape[2:].numel(), _accumulation_dtype(backprops.dtype)
    width = layer.num_channels // layer.num_groups
    g = backprops.reshape(batch, layer.num_channels, positions)
    ret = {}
    if layer.weight.requires_grad:
        x = activations[0].reshape(g.shape)
        total = torch.zeros(batch, layer.num_channels, dtype=dtype, device=g.device)
        group_bytes = NORM_COPIES * width * positions * g.element_size()
        for n, k in _tiles(batch, layer.num_groups, group_bytes, workspace_bytes):
            c = slice(k.start * width, k.stop * width)
            normalized = F.group_norm(x[n, c].to(g.dtype), k.stop - k.start, eps=layer.eps)
            total[n, c] = normalized.mul_(g[n, c]).sum(2, dtype=dtype)
            del normalized
        ret[layer.weight] = _squared_norms(total).sqrt_()
    if layer.bias is not None and layer.bias.requires_grad:
        ret[layer.bias] = _squared_norms(g.sum(2, dtype=dtype)).sqrt_()
    return ret


NORM_SAMPLERS: dict[type[nn.Module], Callable[..., Norms]] = {
    nn.Linear: compute_linear_norm_sample,
    nn.Embedding: compute_embedding_norm_sample,
    nn.LayerNorm: compute_layer_norm_norm_sample,
    nn.RMSNorm: compute_layer_norm_norm_sample,
    nn.Conv1d: compute_conv_norm_sample,
    nn.Conv2d: compute_conv_norm_sample,
    nn.GroupNorm: compute_group_norm_norm_sample,
}


def register_norm_samplers(workspace_bytes: int = DEFAULT_WORKSPACE_BYTES) -> None:
    """Registers all samplers of this module instead of Opacus' own for these layers.

    Args:
        workspace_bytes: ceiling on the temporaries of one layer's norm
    """
    for layer_type, sampler in NORM_SAMPLERS.items():
        register_norm_sampler(layer_type)(functools.partial(sampler, workspace_bytes=workspace_bytes))


def _squared_norms_of_products(g: torch.Tensor, a: torch.Tensor, workspace_bytes: int) -> torch.Tensor:
    """Squared norms, [N], of the matrices ``g[n] @ a[n]``, of which no N are formed at a time unless they fit.

    Args:
        g: [N, rows, tokens], any strides
        a: [N, tokens, columns], any strides
        workspace_bytes: ceiling on the temporaries
    """
    (count, rows, tokens), columns = g.shape, a.shape[2]
    if tokens == 1:  # squares of one factor may be out of range although the product is not
        norms = [torch.linalg.vector_norm(x.flatten(1), dim=1, dtype=torch.float64) for x in (g, a)]
        return (norms[0] * norms[1]).square().to(_accumulation_dtype(g.dtype))
    if (tokens + 1) * (rows + columns) <= 2 * rows * columns:  # half of the Gram product, by symmetry
        return _squared_norms_by_gram_tiles(g, a, workspace_bytes)
    total = torch.zeros(count, dtype=_accumulation_dtype(g.dtype), device=g.device)
    for n, r in _tiles(count, rows, columns * a.element_size(), workspace_bytes):
        total[n] += _squared_norms(torch.bmm(g[n, r], a[n]))
    return total


def _squared_norms_by_gram_tiles(g: torch.Tensor, a: torch.Tensor, workspace_bytes: int) -> torch.Tensor:
    """The same by ``sum_{t,u} (g_t . g_u)(a_t . a_u)``, from tiles of the lower triangle of both Gram matrices."""
    (count, rows, tokens), dtype = g.shape, _accumulation_dtype(g.dtype)
    # A low-precision product would round the tiles: then their four strips are cast first.
    strips = 0 if g.dtype == dtype else 2 * (rows + a.shape[2])
    samples = workspace_bytes // max(1, dtype.itemsize * (2 * tokens * tokens + strips * tokens))
    tile = tokens
    if samples == 0:  # one sample at a time; 2 tile² + strips tile = elements of the workspace
        half = strips / 4
        tile = max(1, int(math.sqrt(half * half + workspace_bytes / (2 * dtype.itemsize)) - half))
    total, absolute = torch.zeros(2, count, dtype=dtype, device=g.device).unbind()
    for n in _slices(count, max(1, samples)):
        for i in _slices(tokens, tile):
            g_i, a_i = g[n, :, i].mT.to(dtype), a[n, i].to(dtype)
            for j in _slices(i.stop, tile):
                gram = torch.bmm(g_i, g[n, :, j].to(dtype))
                gram.mul_(torch.bmm(a_i, a[n, j].mT.to(dtype)))
                times = 1 if i == j else 2
                total[n] += gram.sum((1, 2)).mul_(times)
                absolute[n] += torch.linalg.vector_norm(gram, 1, (1, 2)).mul_(times)
                del gram
    replace_lost_norms(total, absolute, g, a, workspace_bytes)
    return total


def _squared_norms(stack: torch.Tensor) -> torch.Tensor:
    """Squared norms, [N], of ``stack[n]``."""
    if stack.numel() == 0:
        return torch.zeros(len(stack), dtype=_accumulation_dtype(stack.dtype), device=stack.device)
    return torch.linalg.vector_norm(stack.flatten(1), dim=1, dtype=_accumulation_dtype(stack.dtype)).square_()


def _unfold(layer: nn.Conv1d | nn.Conv2d, x: torch.Tensor) -> torch.Tensor:
    """The unfolded input, [N, channels taps, tokens], of some channels, [N, channels, ...]."""
    kernel, stride, dilation = layer.kernel_size, layer.stride, layer.dilation
    mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
    x = F.pad(x, layer._reversed_padding_repeated_twice, mode=mode)
    if isinstance(layer, nn.Conv1d):
        x, kernel, stride, dilation = x.unsqueeze(2), (1, *kernel), (1, *stride), (1, *dilation)
    return F.unfold(x, kernel, stride=stride, dilation=dilation)


def _slots_of_equal_ids(ids: torch.Tensor) -> torch.Tensor:
    """For each token, an index that exactly the equal tokens of its sample share.

    Sorting, unlike ``torch.unique``, does not make the host wait for the device.
    """
    ordered, order = ids.sort(dim=1)
    new = torch.zeros_like(ordered)
    new[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
    slots = torch.empty_like(order).scatter_(1, order, new.cumsum(1))
    slots += torch.arange(len(ids), device=ids.device).unsqueeze(1) * ids.shape[1]
    return slots.flatten()


def _tiles(rows: int, columns: int, unit_bytes: int, workspace_bytes: int) -> Iterator[tuple[slice, slice]]:
    """Splits a grid of units into tiles that fit: several rows each or, where a row does not fit, parts of a row."""
    fit = workspace_bytes // max(1, columns * unit_bytes)
    width = columns if fit else workspace_bytes // unit_bytes
    for row in _slices(rows, max(1, fit)):
        for column in _slices(columns, max(1, width)):
            yield row, column


def _slices(count: int, size: int) -> Iterator[slice]:
    for start in range(0, count, size):
        yield slice(start, min(start + size, count))
