# SPDX-License-Identifier: Apache-2.0
"""The data that a probe keeps of a forward.

Tensors are kept as sums over blocks of adjacent elements. Otherwise the first step, which the probe precedes, would
need more memory than later steps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from opacus_memprof.clipping.forwards.module_state import ModuleState
from opacus_memprof.clipping.forwards.random_state import RandomState
from opacus_memprof.clipping.layers import Layer

_BLOCK = 32  # elements
# The first signs of the Thue-Morse sequence: sums with them change when adjacent elements are swapped, or grow equally.
_SIGNS = [1 - 2 * (n.bit_count() % 2) for n in range(_BLOCK)]


@dataclass(frozen=True)
class TensorSummary:
    """A tensor's shape, and enough of its values to detect rows in which another tensor differs.

    Attributes:
        meta: a tensor of the same shape and dtype without data.
        sums: signed sums of blocks of adjacent elements in the last dimensions: [d0, d1, blocks] for [d0, d1, ...], and
            [d0, blocks] for [d0, d1]. Smaller tensors are kept as they are. Empty if only the shape is needed.
    """

    meta: torch.Tensor
    sums: torch.Tensor

    @classmethod
    def from_tensor(cls, x: torch.Tensor, shape_only: bool = False) -> TensorSummary:
        """Returns the summary of `x`."""
        x = x.detach()
        return cls(x.to("meta"), x.new_empty(0) if shape_only else _block_sums(x))


@dataclass
class Observation:
    """One call of a layer in a probe.

    Attributes:
        inputs: the leaves of the arguments, with summaries instead of tensors.
        outputs: the leaves of the output, with summaries instead of tensors.
        structure: the structure of the arguments; None if the layer is not a GenericLayer.
        random: the initial state of the random number generators, for a GenericLayer.
        draws: whether a GenericLayer has drawn random numbers.
        state: the initial state of the module, for a GenericLayer whose forward changes it.
        values: the leaves of arguments and output themselves, if the call will be repeated.
    """

    layer: Layer
    inputs: list[Any]
    outputs: list[Any]
    structure: Any
    random: RandomState | None
    draws: bool
    state: ModuleState | None
    values: tuple[list[Any], list[Any]] | None


def summaries(leaves: list[Any], shape_only: bool = False) -> list[Any]:
    """Returns the leaves, with summaries instead of tensors."""
    return [TensorSummary.from_tensor(leaf, shape_only) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]


def used_parameters(leaves: list[Any]) -> set[int]:
    """Returns the ids of the parameters in the autograd graphs of the tensors among `leaves`."""
    found: set[int] = set()
    seen: set[Any] = set()
    nodes = [leaf.grad_fn for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None]
    while nodes:
        node = nodes.pop()
        if node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            found.add(id(node.variable))
        nodes += [n for n, _ in node.next_functions if n is not None]
    return found


def _block_sums(x: torch.Tensor) -> torch.Tensor:
    if x.is_complex():
        x = torch.view_as_real(x)
    if x.dim() < 2 or (x.dim() == 2 and x.shape[1] <= _BLOCK):
        return x.clone()
    rows = x.flatten(2) if x.dim() > 2 else x
    whole = rows.shape[-1] // _BLOCK * _BLOCK
    blocks, rest = rows[..., :whole].reshape(*rows.shape[:-1], -1, _BLOCK), rows[..., whole:].unsqueeze(-2)
    sums = torch.cat([_signed_sums(blocks), _signed_sums(rest)], -1)
    if not x.is_floating_point() or sums.isfinite().all():
        return sums
    return torch.cat([*_sums_without_large(blocks), *_sums_without_large(rest)], -1)


def _signed_sums(blocks: torch.Tensor) -> torch.Tensor:
    """Returns signed sums, [..., n, b] -> [..., n], without a temporary as large as `blocks`."""
    if not blocks.is_floating_point():
        return blocks.sum(-1, dtype=torch.int64)
    if blocks.dtype.itemsize == 1:
        blocks = blocks.float()
    with torch.autocast(blocks.device.type, enabled=False):
        return blocks @ torch.tensor(_SIGNS[: blocks.shape[-1]], dtype=blocks.dtype, device=blocks.device)


def _sums_without_large(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns sums that ignore extreme numbers, and the counts of these numbers.

    Extreme are infinities and the lowest number of the dtype, as in masks.
    """
    is_large = ~(blocks.abs() < 1e4)
    return _signed_sums(blocks.masked_fill(is_large, 0)), is_large.sum(-1).to(blocks.dtype)
