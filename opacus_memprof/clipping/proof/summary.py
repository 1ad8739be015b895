# SPDX-License-Identifier: Apache-2.0
"""What a proof keeps of a tensor: a few numbers for each sample, which tell whether another tensor has the same bits
there, and if not, how far it is away."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from opacus_memprof.clipping.workspace import slices

_CHUNK_BYTES = 1 << 25
_PROJECTIONS = 4
_SEED = 0x5EED
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Rows:
    """A summary of a tensor [B, ...], by sample.

    Attributes:
        shape: of the tensor.
        dtype: of the tensor.
        bits: hashes of the bits, [B].
        projections: products with random vectors, [B, 4], whose differences are about as large as those of the samples.
        norms: Euclidean norms, [B].
        largest: the largest absolute values, [B].
    """

    shape: torch.Size
    dtype: torch.dtype
    bits: torch.Tensor
    projections: torch.Tensor
    norms: torch.Tensor
    largest: torch.Tensor

    @classmethod
    @torch.no_grad()
    def of(cls, x: torch.Tensor) -> Rows:
        """The summary of ``x``, [B, ...], computed for a few samples at a time."""
        shape, dtype = x.shape, x.dtype
        x = x.detach()
        if x.is_complex():
            x = torch.view_as_real(x.resolve_conj())
        size = max(1, _CHUNK_BYTES // max(1, x[:1].numel() * x.element_size()))
        with torch.autocast(x.device.type, enabled=False):
            parts = [_summarize(x[n].reshape(n.stop - n.start, x[:1].numel())) for n in slices(len(x), size)]
        bits, projections, norms, largest = (torch.cat(each) for each in zip(*parts, strict=True))
        return cls(shape, dtype, bits, projections, norms, largest)

    def first(self, count: int) -> Rows:
        """The summary of the first samples, which keeps the shape of all."""
        parts = (self.bits, self.projections, self.norms, self.largest)
        return Rows(self.shape, self.dtype, *(part[:count] for part in parts))

    def differences(self, other: Rows) -> torch.Tensor:
        """The distances of the samples from those of ``other``, relative to their norms, [B]: 0 for the same bits."""
        distances = (self.projections - other.projections).abs().amax(1) / self.norms.clamp(min=1e-30)
        # Infinities and NaN are compared by their bits.
        distances = distances.nan_to_num(nan=torch.inf, posinf=torch.inf)
        return distances.masked_fill(self.bits == other.bits, 0)


def _summarize(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    device, width = x.device, x.shape[1]
    if not x.is_floating_point():
        x = x.to(torch.int64)
        bits, values = x, x.to(torch.float64)
    else:
        x = x + torch.zeros((), dtype=x.dtype, device=device)  # -0.0 becomes 0.0
        bits = x.view(_INTEGERS[x.dtype.itemsize])
        values = x if x.dtype == torch.float64 else x.float()
    odd, vectors = _random(width, bits.dtype, values.dtype, device)
    largest = values.abs().amax(1) if width else values.new_zeros(len(x))
    hashes = (bits * odd).sum(1, dtype=torch.int64)
    return hashes, values @ vectors, torch.linalg.vector_norm(values, dim=1), largest


@functools.lru_cache(maxsize=8)
def _random(
    width: int, integer: torch.dtype, real: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Odd integers, [width], and random vectors, [width, 4]."""
    generator = torch.Generator().manual_seed(_SEED)
    odd = torch.randint(0, torch.iinfo(integer).max // 2, (width,), generator=generator, dtype=integer) * 2 + 1
    vectors = torch.randn(width, _PROJECTIONS, generator=generator, dtype=real)
    return odd.to(device), vectors.to(device)


def halves(batch: int) -> list[list[bool]]:
    """For each binary digit of the samples' indices, and for 0 and 1: which samples have it. Every ordered pair of
    samples is separated by one of these."""
    count = max(1, (batch - 1).bit_length())
    return [[(n >> b) & 1 == v for n in range(batch)] for b in range(count) for v in (0, 1)]
