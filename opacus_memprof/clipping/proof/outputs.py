# SPDX-License-Identifier: Apache-2.0
"""Finds the differentiable outputs of a model, and draws the output gradients that a proof starts from."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from opacus_memprof.clipping.forwards.state import Arrangement

_DEPTH = 4


def tensors_in(output: Any) -> list[torch.Tensor]:
    """Returns the tensors of an output in a fixed order: leaves of pytrees, and attributes of other objects."""
    return list(_tensors(output, _DEPTH, set()))


def _tensors(value: Any, depth: int, seen: set[int]) -> Iterator[torch.Tensor]:
    for leaf in tree_flatten(value)[0]:
        if isinstance(leaf, torch.Tensor):
            yield leaf
        elif depth and hasattr(leaf, "__dict__") and not isinstance(leaf, (type, torch.nn.Module)):
            if id(leaf) not in seen:
                seen.add(id(leaf))
                for attribute in vars(leaf).values():
                    yield from _tensors(attribute, depth - 1, seen)
        elif depth and isinstance(leaf, Mapping) and id(leaf) not in seen:
            seen.add(id(leaf))
            for item in leaf.values():
                yield from _tensors(item, depth - 1, seen)


def alias_leaves(output: Any, tensors: list[torch.Tensor]) -> tuple[Any, list[torch.Tensor]]:
    """Returns the output with views instead of these tensors, which are among its leaves, and the views."""
    leaves, structure = tree_flatten(output)
    views = [x.view_as(x) for x in tensors]
    for x, view in zip(tensors, views, strict=True):
        leaves[next(i for i, leaf in enumerate(leaves) if leaf is x)] = view
    return tree_unflatten(leaves, structure), views


def cotangents(
    outputs: list[torch.Tensor],
    wheres: list[Arrangement | None],
    drawn: int,
    weights: torch.Tensor,
    with_shared: bool,
) -> list[torch.Tensor]:
    """Returns random gradients of outputs. Equal shapes get equal gradients.

    Args:
        outputs: differentiable outputs.
        wheres: the position of samples in each output; None for outputs that all samples share, such as a loss.
        drawn: the number of samples for which numbers are drawn. A smaller batch uses the first of them.
        weights: the factors of the samples' gradients, [B].
        with_shared: whether outputs that all samples share get a gradient other than zero.
    """
    found = []
    for i, (output, where) in enumerate(zip(outputs, wheres, strict=True)):
        generator = torch.Generator(output.device).manual_seed(1000 + i)
        if where is None and not with_shared:
            found.append(torch.zeros_like(output))
            continue
        if where is None:
            g = torch.randn(output.shape, generator=generator, dtype=output.dtype, device=output.device)
        else:
            batch = len(weights)
            shape = drawn, *where.by_sample(output.detach(), batch).shape[1:]
            rows = torch.randn(shape, generator=generator, dtype=output.dtype, device=output.device)[:batch]
            scale = weights.to(rows.device).view(-1, *[1] * (rows.dim() - 1))
            g = as_output(rows.mul_(scale.to(rows.dtype)), where, output)  # a factor of 1 keeps all bits
        found.append(g)
    return found


def as_output(rows: torch.Tensor, where: Arrangement, output: torch.Tensor) -> torch.Tensor:
    """Inverts `Arrangement.by_sample`."""
    if where.dim == 1:
        return rows.squeeze(2).movedim(0, 1).reshape(output.shape)
    return (rows if where.sample_major else rows.transpose(0, 1)).reshape(output.shape)


def is_compiled(outputs: Iterable[torch.Tensor]) -> bool:
    """Returns whether the autograd graph of the outputs contains a function made by torch.compile."""
    waiting, seen = [x.grad_fn for x in outputs], set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        if "CompiledFunction" in node.name():
            return True
        seen.add(node)
        waiting += [each for each, _ in node.next_functions]
    return False
