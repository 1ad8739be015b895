# SPDX-License-Identifier: Apache-2.0
"""Computes norms and clipped sums of many small layers at once.

With small layers the host is slower than the device: launching a kernel takes longer than the kernel. Their norms and
sums are therefore deferred to the optimizer's step, where one launch (or C++, on the CPU) computes all of them.
Consecutive products are computed in C++.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from opacus_memprof.clipping.kernels.native import group_alike, squared_norms_cpu, sum_outer_products, weighted_sums_cpu
from opacus_memprof.clipping.kernels.norm_bounds import least_product, product_squared_norms
from opacus_memprof.clipping.kernels.norms import has_kernels, is_small
from opacus_memprof.clipping.kernels.sums import add_lost, scale_single_samples
from opacus_memprof.clipping.layers import KeptTensors, Layer
from opacus_memprof.clipping.layers.base import SplitFactors, split_factors
from opacus_memprof.clipping.layers.linear import MatrixLayer
from opacus_memprof.clipping.workspace import KERNEL_DTYPES, Workspace, batches, sum_dtype

# Limit on sums that are formed at once, while their kept tensors still exist. Also the limit on a single sample's
# gradient that is scaled together with others; larger ones are scaled one by one while sums are sent to other ranks.
_MOST_BYTES = 1 << 20


# A deferred norm: where it belongs, the parameter, and the per-sample gradients, or the operands whose product they
# are. A tuple, because there are hundreds.
_Deferred = tuple[dict[nn.Parameter, torch.Tensor | None], nn.Parameter, tuple[torch.Tensor, ...]]


def find_deferred_norms(kept: dict[Layer, KeptTensors]) -> None:
    """Computes the deferred norms, which are None until then."""
    stacks: list[_Deferred] = []
    large: list[_Deferred] = []  # stacks of a single sample
    pairs: list[_Deferred] = []
    tokens: list[_Deferred] = []  # pairs of a single token
    owners: dict[int, KeptTensors] = {}  # by the id of their norms
    for layer, each in kept.items():
        for parameter, norms in each.norms.items():
            if norms is not None:
                continue
            stack = each.stacks.get(parameter)
            if stack is not None:
                is_large = stack.shape[0] == 1 and not is_small(stack)
                (large if is_large else stacks).append((each.norms, parameter, (stack,)))
                continue
            assert isinstance(layer, MatrixLayer)
            assert each.pair is not None
            owners[id(each.norms)] = each
            g, a = layer.operands(*each.pair)
            (tokens if g.shape[2] == 1 else pairs).append((each.norms, parameter, (g, a)))
    for group in _alike(large, whole_shapes=False):
        of_samples: Any = torch._foreach_norm([stack for _, _, (stack,) in group], 2, torch.float32)
        for (place, parameter, _), own in zip(group, torch.stack(of_samples).square_().view(-1, 1), strict=True):
            place[parameter] = own
    for group in _alike(stacks, whole_shapes=False):
        _set_norms(group, _squared_norms([stack for _, _, (stack,) in group]))
    for group in _alike(tokens, whole_shapes=False):
        _set_norms(group, _norms_of_outer_products([operands for _, _, operands in group]))
    for group in _alike(pairs, whole_shapes=True):
        from opacus_memprof.clipping.kernels.gram import gram_squared_norms_of_layers

        norms, lost = gram_squared_norms_of_layers([operands for _, _, operands in group])
        _set_norms(group, norms)
        for (place, _, _), own in zip(group, lost.unbind(), strict=True):
            owners[id(place)].lost = own


def _set_norms(group: list[_Deferred], norms: torch.Tensor) -> None:
    for (place, parameter, _), own in zip(group, norms.unbind(), strict=True):
        place[parameter] = own


def _squared_norms(stacks: list[torch.Tensor]) -> torch.Tensor:
    """Returns the squared norms of every `stack[n]` of small stacks, [stacks, N]."""
    if not has_kernels(stacks[0]):
        return squared_norms_cpu(stacks)
    from opacus_memprof.clipping.kernels.stacks import squared_norms_cuda

    return squared_norms_cuda(stacks)


def _norms_of_outer_products(pairs: list[tuple[torch.Tensor, ...]]) -> torch.Tensor:
    """Returns the squared norms of `g[n] @ a[n]` for small pairs with a single token, [pairs, N].

    The norm of an outer product of vectors is the product of their norms.
    """
    if has_kernels(pairs[0][0]):
        from opacus_memprof.clipping.kernels.formed import norms_of_outer_products_cuda

        return norms_of_outer_products_cuda(pairs)
    squares = squared_norms_cpu([x for pair in pairs for x in pair])
    squares = squares.view(len(pairs), 2, -1)
    norms = squares.prod(1)
    # One factor may underflow or overflow although the product does neither.
    least = least_product(squares.dtype) * max(x.numel() // len(x) for pair in pairs for x in pair)
    in_range = ((squares >= least) & (squares < torch.inf)).all(1).all(1)
    for i in in_range.logical_not_().nonzero().flatten().tolist():
        norms[i] = product_squared_norms(*pairs[i])
    return norms


def _alike(deferred: list[_Deferred], whole_shapes: bool) -> Iterator[list[_Deferred]]:
    """Groups norms that one launch can compute."""
    for group in group_alike([operands for _, _, operands in deferred], whole_shapes):
        yield [deferred[i] for i in group]


def pop_small_sums(
    kept: dict[Layer, KeptTensors], factors: torch.Tensor
) -> Iterator[tuple[nn.Parameter, torch.Tensor]]:
    """Removes the small per-sample gradients, and yields each parameter with its clipped sum.

    Args:
        kept: the kept tensors by layer.
        factors: clip factors, [B], of all parameters.
    """
    alike: dict[tuple[torch.device, torch.dtype, torch.dtype], list[tuple[KeptTensors, nn.Parameter]]] = {}
    scaled: dict[tuple[torch.device, torch.dtype], list[tuple[KeptTensors, nn.Parameter]]] = {}
    for layer, each in kept.items():
        for parameter, stack in each.stacks.items():
            by_kernels = has_kernels(stack)
            if by_kernels and layer.is_scaled_in_place(parameter, stack):
                if stack.nbytes <= _MOST_BYTES:
                    scaled.setdefault((stack.device, stack.dtype), []).append((each, parameter))
            elif is_small(stack) and (parameter.dtype in KERNEL_DTYPES or not by_kernels):
                alike.setdefault((stack.device, stack.dtype, sum_dtype(parameter.dtype)), []).append((each, parameter))
    for (device, _), members in scaled.items():
        stacks = [each.stacks.pop(p) for each, p in members]
        totals = scale_single_samples(stacks, factors.to(device))
        yield from zip([p for _, p in members], totals, strict=True)
    for (_, _, dtype), members in alike.items():
        for batch in batches(members, _MOST_BYTES, lambda member: _sum_bytes(member[1])):
            totals = _weighted_sums([each.stacks.pop(p) for each, p in batch], factors, dtype)
            yield from zip([p for _, p in batch], totals, strict=True)


def _sum_bytes(parameter: nn.Parameter) -> int:
    return parameter.numel() * sum_dtype(parameter.dtype).itemsize


def _weighted_sums(stacks: list[torch.Tensor], factors: torch.Tensor, dtype: torch.dtype) -> list[torch.Tensor]:
    """Returns `sum_n factors[n] stack[n]` for each of the small stacks, in `dtype`."""
    if not has_kernels(stacks[0]):
        return weighted_sums_cpu(stacks, factors.to(stacks[0]), dtype)
    from opacus_memprof.clipping.kernels.stacks import weighted_sums_cuda

    return weighted_sums_cuda(stacks, factors.to(stacks[0].device, torch.float32), dtype)


class Splits:
    """The clip factors of each layer's pair (x, g), split by sample: accurate Gram norms, and lost ones.

    Two launches split the factors of all layers. `KeptTensors.lost` says which samples of a layer are lost.

    Args:
        kept: the kept tensors by layer.
        factors: clip factors, [B], of all parameters.
    """

    def __init__(self, kept: dict[Layer, KeptTensors], factors: torch.Tensor) -> None:
        self.factors = factors
        self._places: dict[Layer, tuple[torch.device, int]] = {}
        self._splits: dict[torch.device, SplitFactors] = {}
        flags: dict[torch.device, list[torch.Tensor]] = {}
        for layer, each in reversed(kept.items()):  # in the order in which they are removed
            if each.lost is not None and each.pair is not None:
                rows = flags.setdefault(each.lost.device, [])
                self._places[layer] = each.lost.device, len(rows)
                rows.append(each.lost)
        for device, rows in flags.items():
            self._splits[device] = split_factors(factors.to(device, torch.float32), torch.stack(rows))

    def of(self, layer: Layer) -> SplitFactors:
        """Returns the factors of a layer, [B]."""
        rounded, lost = self.of_layers([layer])
        return SplitFactors(rounded if lost is None else rounded[0], None if lost is None else lost[0])

    def of_layers(self, layers: Sequence[Layer]) -> SplitFactors:
        """Returns the factors of consecutive layers.

        Their shape is [layers, B] if every layer has samples with a lost norm, and [B] if no layer has any.
        """
        if layers[0] not in self._places:
            return SplitFactors(self.factors, None)
        device, first = self._places[layers[0]]
        rounded, lost = self._splits[device]
        assert lost is not None
        own = slice(first, first + len(layers))
        return SplitFactors(rounded[own], lost[own])

    def are_alike(self, one: Layer, other: Layer) -> bool:
        """Returns whether `of_layers` accepts both layers together."""
        return self._places.get(one, (None,))[0] == self._places.get(other, (None,))[0]


def pop_small_products(
    kept: dict[Layer, KeptTensors], splits: Splits, workspace: Workspace
) -> list[tuple[nn.Parameter, torch.Tensor]]:
    """Removes the last layers while their clipped sums are small and each is one matmul of kept tensors.

    Returns their weights with the clipped sums; empty if the last layer is of another kind.

    Args:
        kept: the kept tensors by layer.
        splits: clip factors, of all parameters.
        workspace: limit on temporaries.
    """
    if len(splits.factors) < 2:  # a single sample's gradient is scaled instead
        return []
    layers: list[Layer] = []
    weights: list[nn.Parameter] = []
    pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
    size = 0
    for layer, each in reversed(kept.items()):
        if each.stacks or each.pair is None or not isinstance(layer, MatrixLayer):
            break
        pair, weight = layer.outer(*each.pair), layer.weight()
        size += _sum_bytes(weight)
        if pair is None or (pairs and (size > _MOST_BYTES or not splits.are_alike(layers[0], layer))):
            break
        layers.append(layer)
        weights.append(weight)
        pairs.append(pair)
    if not pairs:
        return []
    first = pairs[0][0]
    factors, lost = splits.of_layers(layers)
    totals = sum_outer_products(pairs, factors.to(first.device, sum_dtype(first.dtype)), workspace.bytes)
    if totals and lost is not None:
        add_lost(pairs[: len(totals)], totals, lost)
    for layer, _ in zip(layers, totals, strict=False):
        del kept[layer]
    return [(w, _as_weight(t, w)) for w, t in zip(weights, totals, strict=False)]


def _as_weight(total: torch.Tensor, weight: nn.Parameter) -> torch.Tensor:
    """Returns a matrix in the shape of a weight, and in the dtype of its sum."""
    total = total.to(sum_dtype(weight.dtype))
    return total if weight.dim() == 2 else total.view(weight.shape)
