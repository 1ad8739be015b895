# SPDX-License-Identifier: Apache-2.0
"""The ceiling on temporaries, and how loops are cut to stay under it."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from opacus_memprof.errors import MemprofError

MIB = 1 << 20


@dataclass(frozen=True)
class Workspace:
    """At most ``bytes`` of temporaries at a time, beside what is kept or returned."""

    bytes: int

    @classmethod
    def of_megabytes(cls, megabytes: float) -> Workspace:
        """Raises MemprofError unless ``megabytes`` (of 2**20 bytes) is positive."""
        if not megabytes > 0:
            raise MemprofError(f"flash_clip_workspace_mb is {megabytes}; give a positive number of MiB, such as 256.")
        return cls(int(megabytes * MIB))

    def half(self) -> Workspace:
        return Workspace(self.bytes // 2)

    def fit(self, unit_bytes: int, count: int) -> int:
        """How many units fit at once: 0 to ``count``."""
        return max(0, min(count, self.bytes // max(1, unit_bytes)))

    def require(self, unit_bytes: int, count: int, what: str) -> int:
        """As ``fit``, at least one. Raises MemprofError where not even one unit fits."""
        units = self.fit(unit_bytes, count)
        if units == 0 and count > 0:
            raise MemprofError(
                f"flash_clip_workspace_mb is {self.bytes / MIB:g} (of this part of the work), but {what} needs "
                f"{unit_bytes / MIB:.3g} MiB; raise flash_clip_workspace_mb."
            )
        return max(1, units)

    def tiles(self, rows: int, columns: int, unit_bytes: int, what: str) -> Iterator[tuple[slice, slice]]:
        """Cuts a grid of units into whole rows where one fits, else into parts of each. Raises as ``require``
        does."""
        fit = self.fit(columns * unit_bytes, rows)
        width = max(1, columns) if fit else self.require(unit_bytes, columns, what)
        for row in pieces(rows, max(1, fit)):
            for column in pieces(columns, width):
                yield row, column


def pieces(count: int, size: int) -> Iterator[slice]:
    """Cuts ``range(count)`` into slices of ``size``; the last may be shorter."""
    for start in range(0, count, size):
        yield slice(start, min(start + size, count))


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Norms and sums accumulate in float32, or in float64 for float64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


@functools.cache
def has_triton() -> bool:
    """Whether Triton is installed: PyTorch's CUDA wheels for Linux bring it, others may not."""
    return importlib.util.find_spec("triton") is not None
