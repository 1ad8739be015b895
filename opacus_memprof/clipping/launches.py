# SPDX-License-Identifier: Apache-2.0
"""Norms and clipped sums of many layers with few kernel launches, on CUDA.

Small layers keep the host waiting, not the device: launching a kernel takes longer than the kernel. So what backward
keeps of them waits for the optimizer's step, where one launch does it for all.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import nn

from opacus_memprof.clipping.layers import KeptTensors, Layer
from opacus_memprof.clipping.layers.linear import LinearLayer
from opacus_memprof.clipping.norms import is_small
from opacus_memprof.clipping.workspace import KERNEL_DTYPES, batches

_MOST_BYTES = 1 << 20  # of sums that are formed at once, while what they are formed from is still there


class _Waiting(NamedTuple):
    """Norms that have to be found.

    Attributes:
        kept: what they belong to.
        parameter: whose gradients' norms these are.
        operands: per-sample gradients, or operands whose product these are.
    """

    kept: KeptTensors
    parameter: nn.Parameter
    operands: tuple[torch.Tensor, ...]


def find_waiting_norms(kept: dict[Layer, KeptTensors]) -> None:
    """Finds the norms that backward has left to be found, which are None."""
    stacks: dict[object, list[_Waiting]] = {}
    pairs: dict[object, list[_Waiting]] = {}
    for layer, each in kept.items():
        for parameter, norms in each.norms.items():
            if norms is not None:
                continue
            stack = each.stacks.get(parameter)
            if stack is not None:
                alike = (stack.device, stack.dtype, stack.shape[0])
                stacks.setdefault(alike, []).append(_Waiting(each, parameter, (stack,)))
                continue
            assert isinstance(layer, LinearLayer)
            assert each.pair is not None
            g, a = layer.operands(*each.pair)
            waiting = _Waiting(each, parameter, (g, a))
            if g.shape[2] == 1:  # the norm of a product of vectors is the product of their norms
                stacks.setdefault((g.device, g.dtype, g.shape[0]), []).append(waiting)
            else:
                strides = (g.stride(), a.stride())
                pairs.setdefault((g.device, g.dtype, g.shape, a.shape, strides), []).append(waiting)
    if not stacks and not pairs:
        return
    from opacus_memprof.clipping.gram_triton import gram_squared_norms_of_layers
    from opacus_memprof.clipping.stacks_triton import squared_norms_cuda

    for group in stacks.values():
        found = iter(squared_norms_cuda([x for waiting in group for x in waiting.operands]).unbind())
        for waiting in group:
            norms = next(found)
            waiting.kept.norms[waiting.parameter] = norms if len(waiting.operands) == 1 else norms * next(found)
    for group in pairs.values():
        of_layers = gram_squared_norms_of_layers([waiting.operands for waiting in group])
        for waiting, norms in zip(group, of_layers.unbind(), strict=True):
            waiting.kept.norms[waiting.parameter] = norms


def pop_small_sums(
    kept: dict[Layer, KeptTensors], factors: torch.Tensor
) -> Iterator[tuple[nn.Parameter, torch.Tensor]]:
    """Removes the small per-sample gradients, and yields each parameter with its clipped sum.

    Args:
        kept: by layer.
        factors: clip factors, [B], of all parameters.
    """
    alike: dict[tuple[torch.device, torch.dtype, torch.dtype], list[tuple[KeptTensors, nn.Parameter]]] = {}
    for each in kept.values():
        for parameter, stack in each.stacks.items():
            if is_small(stack) and parameter.dtype in KERNEL_DTYPES:
                alike.setdefault((stack.device, stack.dtype, parameter.dtype), []).append((each, parameter))
    for (device, _, dtype), members in alike.items():
        from opacus_memprof.clipping.stacks_triton import weighted_sums_cuda

        own_factors = factors.to(device, torch.float32)
        for batch in batches(members, _MOST_BYTES, lambda member: member[1].numel() * member[1].element_size()):
            totals = weighted_sums_cuda([each.stacks.pop(p) for each, p in batch], own_factors, dtype)
            yield from zip([p for _, p in batch], totals, strict=True)
