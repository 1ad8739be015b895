# SPDX-License-Identifier: Apache-2.0
"""The position of a batch's samples in a tensor."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Arrangement:
    """The position of samples in a tensor.

    Attributes:
        dim: the dimension that has the samples, 0 or 1.
        sample_major: for a dimension with several rows per sample (windows of an image, tokens of a text): whether all
            rows of the first sample come first. Otherwise the first rows of all samples come first.
    """

    dim: int = 0
    sample_major: bool = True

    def rows(self, x: torch.Tensor, batch: int) -> int | None:
        """Returns the number of rows per sample in `x`, for `batch` samples; None if this arrangement does not fit."""
        if x.dim() <= self.dim or (batch and x.shape[self.dim] % batch):
            return None
        rows = x.shape[self.dim] // batch if batch else 1
        return rows if rows > 0 and (self.dim == 0 or rows == 1) else None

    def by_sample(self, x: torch.Tensor, batch: int) -> torch.Tensor:
        """Returns `x` as [batch, *shape of x in a batch of one sample]."""
        if self.dim == 1:
            return x.movedim(1, 0).unsqueeze(2)
        rows = x.shape[0] // batch if batch else 1
        if self.sample_major:
            return x.reshape(batch, rows, *x.shape[1:])
        return x.reshape(rows, batch, *x.shape[1:]).transpose(0, 1)


PLAIN = Arrangement()
CANDIDATES = (PLAIN, Arrangement(sample_major=False), Arrangement(dim=1))


def expand_over_batch(x: torch.Tensor, batch: int) -> torch.Tensor:
    """Returns a view of `x`, which has no batch dimension, with a batch dimension in front.

    A first dimension of size 1 is expanded; any other dimension stays behind the new one.
    """
    return (x if x.dim() and x.shape[0] == 1 else x.unsqueeze(0)).expand(batch, *[-1] * _rank(x))


def _rank(x: torch.Tensor) -> int:
    return x.dim() - 1 if x.dim() and x.shape[0] == 1 else x.dim()
