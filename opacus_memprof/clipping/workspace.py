# SPDX-License-Identifier: Apache-2.0
"""The limit on temporaries, and functions that split work to stay below it."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TypeVar

import torch

from opacus_memprof.errors import MemprofError

MIB = 1 << 20
KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)  # dtypes that Triton's kernels support
CPU_DTYPES = (torch.float32, torch.float64)  # dtypes for which C++ processes many small stacks at once
T = TypeVar("T")


@dataclass(frozen=True)
class Workspace:
    """Limit on the bytes of temporaries that are live at a time, excluding tensors that are kept or returned."""

    bytes: int

    @classmethod
    def from_mib(cls, mib: float) -> Workspace:
        """Returns a workspace of `mib` MiB. Raises MemprofError unless it is positive."""
        if not mib > 0:
            raise MemprofError(f"flash_clip_workspace_mb is {mib}; give a positive number of MiB, such as 256.")
        return cls(int(mib * MIB))

    def half(self) -> Workspace:
        """Returns half of this workspace."""
        return Workspace(self.bytes // 2)

    def fit(self, unit_bytes: int, count: int) -> int:
        """Returns how many of `count` units, of `unit_bytes` each, fit at once."""
        return max(0, min(count, self.bytes // max(1, unit_bytes)))

    def fit_at_least_one(self, unit_bytes: int, count: int, unit: str) -> int:
        """Does the same as `fit`; raises MemprofError if not even one unit fits. `unit` is its name in the message."""
        units = self.fit(unit_bytes, count)
        if units == 0 and count > 0:
            raise MemprofError(
                f"flash_clip_workspace_mb is {self.bytes / MIB:g} (of this part of the work), but {unit} needs "
                f"{unit_bytes / MIB:.3g} MiB; raise flash_clip_workspace_mb."
            )
        return max(1, units)

    def tiles(self, rows: int, columns: int, unit_bytes: int, unit: str) -> Iterator[tuple[slice, slice]]:
        """Splits a grid of units into tiles that fit the workspace.

        A tile has several rows or, if a row does not fit, a part of one row.

        Raises:
            MemprofError: not even one unit fits.
        """
        fit = self.fit(columns * unit_bytes, rows)
        width = max(1, columns) if fit else self.fit_at_least_one(unit_bytes, columns, unit)
        for row in slices(rows, max(1, fit)):
            for column in slices(columns, width):
                yield row, column


def slices(count: int, size: int) -> Iterator[slice]:
    """Splits `range(count)` into slices of `size`; the last one may be shorter."""
    for start in range(0, count, size):
        yield slice(start, min(start + size, count))


def batches(items: Iterable[T], most: int, bytes_of: Callable[[T], int]) -> Iterator[list[T]]:
    """Splits `items` into lists of consecutive items of at most `most` bytes each; a larger item is alone."""
    batch: list[T] = []
    size = 0
    for item in items:
        more = bytes_of(item)
        if batch and size + more > most:
            yield batch
            batch, size = [], 0
        batch.append(item)
        size += more
    if batch:
        yield batch


@functools.cache
def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype in which norms and sums of `dtype` accumulate: float32, or float64 for float64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def is_low_precision(dtype: torch.dtype) -> bool:
    """Returns whether a product in this dtype is too imprecise for a clipped sum."""
    return dtype in (torch.bfloat16, torch.float16)


@functools.cache
def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype of the clipped sum of a parameter of `dtype`, which is rounded only after noise is added.

    Complex numbers become pairs of real ones.
    """
    return torch.float32 if is_low_precision(dtype) else dtype.to_real()


def rounded_target(parameter: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    """Returns the tensor that a parameter's clipped sum with noise is rounded to; the sum itself if it is not."""
    if parameter.is_complex() or total.dtype == parameter.dtype:
        return total
    return torch.empty_like(total, dtype=parameter.dtype)


@functools.cache
def has_triton() -> bool:
    """Returns whether Triton is installed. PyTorch's CUDA wheels for Linux depend on it; others do not."""
    return importlib.util.find_spec("triton") is not None
