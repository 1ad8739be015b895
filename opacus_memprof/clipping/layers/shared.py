# SPDX-License-Identifier: Apache-2.0
"""The gradient of a parameter that a forward uses more than once.

The uses come from a layer that runs twice, from tied layers, or from two forwards for one backward. The norm of a sum
of gradients is not the sum of their norms: `|G + H|^2 = |G|^2 + 2 <G, H> + |H|^2`. Several uses by linear layers are
treated as one use with the tokens of all; likewise uses by embeddings. The product of an embedding's gradient `sum_t
e(i_t) d_t^T` (indices i, output gradients d) and a linear layer's `sum_u g_u a_u^T` is `sum_{t,u} g_u[i_t] (d_t .
a_u)`, which is computed in tiles, like the norms. Where the three terms cancel, the norm is computed from the gradient
instead (see kernels/norm_bounds.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

from opacus_memprof.clipping.kernels.norm_bounds import is_below, least_product, least_share, pair_for_sums
from opacus_memprof.clipping.kernels.norms import has_kernels, replace_lost_norms, squared_norms
from opacus_memprof.clipping.kernels.sums import sum_stack
from opacus_memprof.clipping.layers import Layer
from opacus_memprof.clipping.layers.base import KeptTensors, split_factors
from opacus_memprof.clipping.layers.embedding import EmbeddingLayer
from opacus_memprof.clipping.layers.linear import LinearLayer
from opacus_memprof.clipping.workspace import Workspace, accumulation_dtype, slices, sum_dtype


class Use(NamedTuple):
    """The input and the output gradient of one layer that used the parameter as its weight."""

    layer: Layer
    x: torch.Tensor
    g: torch.Tensor

    def numel(self) -> int:
        return self.x.numel() + self.g.numel()

    def in_float64(self) -> Use:
        return Use(self.layer, self.x.double() if self.x.is_floating_point() else self.x, self.g.double())

    def of_samples(self, n: slice | torch.Tensor) -> Use:
        return Use(self.layer, self.x[n], self.g[n])


class SharedGradient:
    """The tensors that are kept for a parameter that is used more than once.

    These are pairs (x, g) while they are smaller than per-sample gradients, then the sum of the per-sample gradients.
    On the CPU pairs become float64 if uses cancel so much that rounding to float32 would change a sample's gradient.

    Attributes:
        parameter: the parameter.
        name: the name of the layer that used it first in backward.
        uses: the pairs.
        stack: the sum of per-sample gradients that are not among the pairs, [B, *shape].
        noted_version: the sum of the versions that the tensors had when they were added; see `version`.
        kept_norms: the squared norms, once they are known, and on CUDA the samples whose tokens cancel.
    """

    def __init__(self, parameter: nn.Parameter, layer: Layer) -> None:
        self.parameter = parameter
        self.name, self.describe = layer.name, layer.describe
        self.uses: list[Use] = []
        self.stack: torch.Tensor | None = None
        self.kept_norms = KeptTensors()
        self._owns_stack = False
        self._kept_numbers = 0  # in `uses`, which may be hundreds: one for each step of a recurrent layer
        self._noted_uses = self._noted_stack = 0

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields the tensors: (the profiler's category, tensor)."""
        if self.stack is not None:
            yield "per_sample_gradients", self.stack
        for use in self.uses:
            yield "activation_hooks", use.x
            yield "backprop_copies", use.g

    @property
    def noted_version(self) -> int:
        return self._noted_uses + (0 if self.stack is None else self._noted_stack)

    def version(self) -> int:
        """Returns a number that grows when a program writes to one of the tensors."""
        return sum([tensor._version for _, tensor in self.tensors()])

    def add(self, layer: Layer, kept: KeptTensors, workspace: Workspace) -> None:
        """Adds the tensors that a layer has kept for this parameter."""
        if self.parameter in kept.stacks:
            self._add_stack(kept.stacks[self.parameter])
        elif kept.pair is not None:
            new = Use(layer, *kept.pair)
            self.uses.append(new)
            self._kept_numbers += new.numel()
            self._noted_uses += new.x._version + new.g._version
            if self._kept_numbers > len(new.x) * self.parameter.numel():
                while self.uses:
                    use = self.uses.pop()
                    self._add_stack(use.layer.weight_gradients(use.x, use.g, workspace))
                self._kept_numbers = self._noted_uses = 0

    def _add_stack(self, stack: torch.Tensor) -> None:
        if self.stack is None:
            self.stack = stack
        elif self._owns_stack:
            self.stack += stack
        else:  # the first one may be a view of a gradient that autograd uses
            self.stack, self._owns_stack = self.stack.to(accumulation_dtype(stack.dtype)) + stack, True
        self._noted_stack = self.stack._version

    def squared_norms(self, workspace: Workspace) -> torch.Tensor:
        """Returns the exact squared norms, [B]."""
        norms = self._squared_norms(workspace)
        if any(pair_for_sums(use.x, use.g, norms, use.layer.terms(use.x))[1] is not use.g for use in self.uses):
            self.uses = [use.in_float64() for use in self.uses]
            norms = self._squared_norms(workspace).to(norms.dtype)
        self.kept_norms.norms[self.parameter] = norms
        return norms

    def _squared_norms(self, workspace: Workspace) -> torch.Tensor:
        if not self.uses:
            assert self.stack is not None
            return squared_norms(self.stack)
        linear = [use for use in self.uses if type(use.layer) is LinearLayer]
        embeddings = [use for use in self.uses if isinstance(use.layer, EmbeddingLayer)]
        paddings = {use.layer.module.padding_idx for use in embeddings}
        if self.stack is not None or len(linear) + len(embeddings) < len(self.uses) or len(paddings) > 1:
            return self._norms_of_gradients(workspace)
        share = Workspace(workspace.bytes // 2)
        total = torch.zeros(
            len(self.uses[0].g), dtype=accumulation_dtype(self.uses[0].g.dtype), device=self.uses[0].g.device
        )
        lost: torch.Tensor | None = None
        if has_kernels(self.uses[0].g):
            lost = self.kept_norms.lost = torch.zeros(len(total), dtype=torch.bool, device=total.device)
        sample = sum(use.numel() * use.g.element_size() for use in self.uses) // max(1, len(total))
        for n in slices(len(total), max(1, share.fit(sample, len(total)))):
            merged = [_merge([use.of_samples(n) for use in uses]) for uses in (linear, embeddings) if uses]
            for layer, x, g in merged:
                choice = layer.choose(x, g, keep=False)
                assert choice is not None
                own = None if lost is None else torch.empty_like(lost[n])
                total[n] += layer.weight_squared_norms(x, g, choice, share, own)
                if lost is not None and own is not None:
                    lost[n] |= own
            if len(merged) == 2:
                own = None if lost is None else lost[n]
                total[n] = squared_norms_of_sum(merged[1], merged[0], total[n], share, own)
        return total

    def _norms_of_gradients(self, workspace: Workspace) -> torch.Tensor:
        """Returns the squared norms from per-sample gradients, formed for as many samples at a time as fit."""
        batch, parts = len(self.uses[0].g), []
        dtype = accumulation_dtype(self.uses[0].g.dtype)  # the dtype of the clipped sum, too
        item = dtype.itemsize
        for n in slices(batch, max(1, workspace.fit(2 * self.parameter.numel() * item, batch))):
            total = None if self.stack is None else self.stack[n]
            for use in self.uses:
                part = use.layer.weight_gradients(use.x[n], use.g[n].to(dtype), workspace)
                total = part if total is None else total + part
            assert total is not None
            parts.append(squared_norms(total))
        return torch.cat(parts) if parts else self.uses[0].g.new_zeros(0)

    def select(self, samples: torch.Tensor) -> None:
        """Drops all samples except those with these indices."""
        self.uses = [use.of_samples(samples.to(use.g.device)) for use in self.uses]
        self.stack = None if self.stack is None else self.stack[samples.to(self.stack.device)]
        self.kept_norms.select(samples)

    def release(self) -> None:
        """Drops the kept tensors."""
        self.uses.clear()
        self.stack = None

    def clipped_sum(self, factors: torch.Tensor, workspace: Workspace) -> torch.Tensor:
        """Returns the clipped sum, in float32 for a parameter of low precision. Releases kept tensors after use."""
        total: torch.Tensor | None = None
        dtype = sum_dtype(self.parameter.dtype)
        if self.stack is not None:
            total = sum_stack(self.stack, factors.to(self.stack.device), dtype, workspace)
            self.stack = None
        while self.uses:
            use = self.uses.pop()
            split = split_factors(factors, self.kept_norms.lost)
            part = use.layer.weight_sum(use.x, use.g, split.rounded, workspace, split.lost)
            total = part if total is None else total + part
        assert total is not None
        return total.to(dtype)


def _merge(uses: list[Use]) -> Use:
    """Returns one use with the tokens of all uses."""
    if len(uses) == 1:
        return uses[0]
    layer, batch = uses[0].layer, len(uses[0].g)

    def tokens(x: torch.Tensor, last: int) -> torch.Tensor:
        return x.reshape(batch, x.shape[1 : x.dim() - last].numel(), *x.shape[x.dim() - last :])

    features = 0 if isinstance(layer, EmbeddingLayer) else 1
    x = torch.cat([tokens(use.x if features == 0 else use.x.to(use.g.dtype), features) for use in uses], 1)
    return Use(layer, x, torch.cat([tokens(use.g, 1) for use in uses], 1))


def squared_norms_of_sum(
    embedding: Use, linear: Use, own: torch.Tensor, workspace: Workspace, lost: torch.Tensor | None = None
) -> torch.Tensor:
    """Returns the squared norms `|G + H|^2`, [B], of the weight gradients of an embedding and of a linear layer.

    Args:
        embedding: the use by the embedding; its x are indices.
        linear: the use by a layer whose weight is the embedding's table.
        own: `|G|^2 + |H|^2`, [B].
        workspace: limit on temporaries.
        lost: on CUDA, booleans [B]; set for samples whose gradients are formed.
    """
    batch, width = len(embedding.g), embedding.g.shape[-1]
    ids = embedding.x.reshape(batch, embedding.x.shape[1:].numel())
    d = embedding.g.reshape(batch, ids.shape[1], width)
    a = linear.x.reshape(batch, linear.x.shape[1:-1].numel(), width)
    g = linear.g.reshape(batch, a.shape[1], linear.g.shape[-1])
    padding: Any = embedding.layer.module.padding_idx
    if padding is not None:
        ids = ids.masked_fill(ids == padding, -1)
    cross = cross_products(ids, d, g, a, workspace, f"one token of {linear.layer.describe()}")
    norms = own + 2 * cross.total
    least = (own + 2 * cross.absolute) * least_share(g, width, width) + cross.factors * (width * least_product(g.dtype))
    below = is_below(norms, least)
    if lost is not None:
        lost |= below
    return replace_lost_norms(norms, below, g.mT, a, workspace, (ids, d))


class CrossProducts(NamedTuple):
    """Sums over the tokens of each sample, [B], for the weight gradients G of a linear layer and H of an embedding.

    Attributes:
        total: the products `<G, H>`.
        absolute: the absolute values of their terms.
        factors: the absolute values of one of the two factors of each term: G at the embedding's rows.
    """

    total: torch.Tensor
    absolute: torch.Tensor
    factors: torch.Tensor


def cross_products(
    ids: torch.Tensor, d: torch.Tensor, g: torch.Tensor, a: torch.Tensor, workspace: Workspace, token: str
) -> CrossProducts:
    """Returns the products of the weight gradients of an embedding and of a linear layer.

    Args:
        ids: indices of the embedding, [B, S]. Negative ones have no gradient.
        d: its output gradients, [B, S, columns].
        g: output gradients of the linear layer, [B, T, rows].
        a: its inputs, [B, T, columns].
        workspace: limit on temporaries.
        token: the name of a token in errors.
    """
    dtype, width = accumulation_dtype(g.dtype), d.shape[2]
    sums = CrossProducts(*torch.zeros(3, len(ids), dtype=dtype, device=g.device).unbind())
    has_row = ids >= 0
    cast = 0 if d.dtype == a.dtype == dtype else 2 * width
    unit = ids.shape[1] * (3 * dtype.itemsize + g.element_size()) + cast * dtype.itemsize
    for n, u in workspace.tiles(len(ids), a.shape[1], unit, token):
        rows = ids[n].clamp(min=0).unsqueeze(1).expand(-1, u.stop - u.start, -1)
        factor = g[n, u].gather(2, rows).to(dtype)
        factor *= has_row[n].unsqueeze(1)
        sums.factors[n] += torch.linalg.vector_norm(factor, 1, (1, 2))
        factor *= torch.bmm(a[n, u].to(dtype), d[n].to(dtype).mT)
        sums.total[n] += factor.sum((1, 2))
        sums.absolute[n] += torch.linalg.vector_norm(factor, 1, (1, 2))
        del factor
    return sums
