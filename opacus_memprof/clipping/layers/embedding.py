# SPDX-License-Identifier: Apache-2.0
"""nn.Embedding: the gradient of a sample is the sum of its output gradients over equal indices.

As in PyTorch, the row at `padding_idx` has no gradient. (Opacus' own samplers give it one.)
"""

import torch
from torch import nn

from opacus_memprof.clipping import cost
from opacus_memprof.clipping.cost import Choice, Cost
from opacus_memprof.clipping.kernels.native import embedding_squared_norms_cpu
from opacus_memprof.clipping.kernels.norm_bounds import has_digits
from opacus_memprof.clipping.kernels.norms import is_small
from opacus_memprof.clipping.layers.base import KeptTensors, Layer
from opacus_memprof.clipping.workspace import Workspace, accumulation_dtype, slices


class EmbeddingLayer(Layer):
    """nn.Embedding, for which the pair is always kept.

    It is smaller than per-sample gradients unless a sample has more tokens than the table has rows. The norm can be
    computed from it.
    """

    module: nn.Embedding
    any_arrangement = True

    def min_dimensions(self) -> int:
        return 1

    def small_gradients(self, x: torch.Tensor | None, g: torch.Tensor, workspace: Workspace) -> dict[str, torch.Tensor]:
        return {}

    def choose(self, x: torch.Tensor, g: torch.Tensor, keep: bool) -> Choice:
        width = g.shape[-1]
        moved = 4 * x.numel() * width * g.element_size() + x.numel() * cost.INDEX_BYTES
        norm_cost = Cost(4 * x.numel() * width, moved)
        kept = g.numel() * g.element_size() + x.numel() * x.element_size() if keep else 0
        return Choice("gram", "pair", norm_cost, kept)

    def terms(self, x: torch.Tensor) -> int:
        return x.shape[1:].numel()

    def weight_gradients(self, x: torch.Tensor, g: torch.Tensor, workspace: Workspace) -> torch.Tensor:
        weight = self.weight()
        stack = torch.zeros(len(x) * len(weight), weight.shape[1], dtype=g.dtype, device=g.device)
        if stack.numel():
            ids = x.reshape(len(x), -1) + len(weight) * torch.arange(len(x), device=x.device).unsqueeze(1)
            stack.index_add_(0, ids.flatten(), g.reshape(-1, weight.shape[1]))
        stack = stack.view(len(x), *weight.shape)
        if self.module.padding_idx is not None:
            stack[:, self.module.padding_idx] = 0
        return stack

    def weight_squared_norms(
        self,
        x: torch.Tensor,
        g: torch.Tensor,
        choice: Choice,
        workspace: Workspace,
        lost: torch.Tensor | None = None,
    ) -> torch.Tensor:
        # Sums may cancel. The host knows this only on the CPU, where it then uses float64.
        dtype = torch.float64 if lost is not None else accumulation_dtype(g.dtype)
        total = torch.zeros(len(x), dtype=accumulation_dtype(g.dtype), device=g.device)
        ids = x.reshape(len(x), -1) if len(x) else x
        tokens, width = ids.shape[1:].numel(), g.shape[-1]
        if total.numel() == 0 or tokens == 0:
            if lost is not None:
                lost.zero_()
            return total
        copied = 0 if g.is_contiguous() else width * g.element_size()
        cast = 0 if g.dtype == dtype else dtype.itemsize
        sample_bytes = cost.embedding_sample_bytes(tokens, width, g.element_size(), dtype.itemsize, copied > 0)
        if lost is not None:
            most = cost.embedding_workspace(len(x), tokens, width, g.element_size(), sample_bytes, workspace.bytes)
            workspace = Workspace(most)
        # Processes some samples at a time, and for these some columns at a time.
        samples = max(1, workspace.fit(sample_bytes, len(x)))
        remaining = Workspace(workspace.bytes - samples * tokens * (cost.INDEX_BYTES + copied))
        column_bytes = samples * tokens * (dtype.itemsize + cast)
        columns = remaining.fit_at_least_one(column_bytes, width, f"one column of {self.describe()}")
        if g.is_cpu and is_small(g):
            own = ids.to(torch.int64).contiguous()
            return embedding_squared_norms_cpu(own, g.view(len(x), -1, width), self.module.padding_idx)
        for n in slices(len(x), samples):
            rows = g[n].reshape(-1, width)
            slots, padding = self._slots(ids[n])
            for c in slices(width, columns):
                sums = torch.zeros(len(rows), c.stop - c.start, dtype=dtype, device=g.device)
                sums.index_add_(0, slots, rows[:, c].to(dtype))
                squares = torch.linalg.vector_norm(sums, dim=1).square_()
                del sums
                squares[slots] *= ~padding
                total[n] += squares.view(-1, tokens).sum(1)
        if lost is not None:
            torch.logical_not(has_digits(total, g, ids), out=lost)
        return total

    def _slots(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns for each token an index that it shares with equal tokens of its sample, and whether it is padding.

        Unlike `unique`, sorting does not make the host wait for the device.
        """
        ordered, order = ids.sort(dim=1)
        new = torch.zeros_like(ordered)
        new[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
        slot = torch.empty_like(order).scatter_(1, order, new.cumsum(1))
        slot += torch.arange(len(ids), device=ids.device).unsqueeze(1) * ids.shape[1]
        padding = torch.zeros_like(ids, dtype=torch.bool)
        if self.module.padding_idx is not None:
            padding = ids == self.module.padding_idx
        return slot.flatten(), padding.flatten()

    def weight_sum(
        self,
        x: torch.Tensor,
        g: torch.Tensor,
        factors: torch.Tensor,
        workspace: Workspace,
        lost: torch.Tensor | None = None,
    ) -> torch.Tensor:
        dtype = accumulation_dtype(g.dtype)
        total = torch.zeros(self.weight().shape, dtype=dtype, device=g.device)
        ids = x.reshape(len(x), -1) if len(x) else x
        tokens, width = ids.shape[1:].numel(), g.shape[-1]
        if len(x) == 0 or tokens == 0:
            return total
        g = g.reshape(len(x), tokens, width)
        token_bytes = 2 * width * dtype.itemsize
        for n, t in workspace.tiles(len(x), tokens, token_bytes, f"one token of {self.describe()}"):
            source = g[n, t].to(dtype) * factors[n].view(-1, 1, 1)
            total.index_add_(0, ids[n, t].flatten(), source.flatten(0, 1))
            del source
        if lost is not None:
            from opacus_memprof.clipping.kernels.formed import add_rows_cuda

            add_rows_cuda(ids, g, lost, total, self.module.padding_idx)
        if self.module.padding_idx is not None:
            total[self.module.padding_idx] = 0
        return total


class ScaledEmbeddingLayer(EmbeddingLayer):
    """An embedding whose output is multiplied by a constant."""

    def __init__(self, name: str, module: nn.Module, scale: float) -> None:
        super().__init__(name, module)
        self.scale = scale

    def keep(self, x: torch.Tensor | None, g: torch.Tensor, workspace: Workspace, norms: bool = True) -> KeptTensors:
        return super().keep(x, g * self.scale, workspace, norms)

    def keep_norms(self, x: torch.Tensor | None, g: torch.Tensor, workspace: Workspace) -> KeptTensors:
        return super().keep_norms(x, g * self.scale, workspace)

    def sums_of_backward(
        self,
        x: torch.Tensor | None,
        g: torch.Tensor,
        factors: torch.Tensor,
        samples: torch.Tensor | None,
        workspace: Workspace,
        first: KeptTensors | None = None,
    ) -> dict[nn.Parameter, torch.Tensor]:
        return super().sums_of_backward(x, g * self.scale, factors, samples, workspace, first)
