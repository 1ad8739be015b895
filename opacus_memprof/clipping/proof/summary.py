# SPDX-License-Identifier: Apache-2.0
"""Summaries of tensors in a proof: a few numbers for each sample.

They show whether another tensor has the same bits for a sample, and if not, how large the difference is. Also, a number
for whole tensors, by which they are known again in a later step.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import _disable_current_modes

from opacus_memprof.clipping.workspace import slices

_COLUMNS = 1 << 17  # columns that have random numbers of their own
_CHUNK_BYTES = 1 << 25
_PROJECTIONS = 4
_SEED = 0x5EED
_MOST_OF_A_MARK = 1 << 16
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Rows:
    """A summary of a tensor [B, ...], by sample.

    Attributes:
        shape: the shape of the tensor.
        dtype: the dtype of the tensor, or a coarser one in which a part of it was computed.
        bits: hashes of the bits, [B].
        projections: products with random vectors, [B, 4], whose differences are about as large as those of the samples.
        norms: Euclidean norms, [B].
        largest: the largest absolute values, [B].
        rounding: the largest relative difference of a sample between two runs of the same batch, if it was measured.
    """

    shape: torch.Size
    dtype: torch.dtype
    bits: torch.Tensor
    projections: torch.Tensor
    norms: torch.Tensor
    largest: torch.Tensor
    rounding: float = 0.0

    @classmethod
    @torch.no_grad()
    def of(cls, x: torch.Tensor, computed_in: torch.dtype | None = None) -> Rows:
        """Returns the summary of `x`, [B, ...], computed for a few samples at a time.

        `computed_in` is the dtype of its summary if it is coarser.
        """
        shape, dtype = x.shape, coarser(x.dtype, computed_in)
        x = x.detach()
        if x.is_complex():
            x = torch.view_as_real(x.resolve_conj())
        # Temporaries are small compared with a large tensor, and with the needs of a small model.
        at_once = min(_CHUNK_BYTES, max(x.numel() * x.element_size() // 4, 1 << 22))
        size = max(1, at_once // max(1, x[:1].numel() * x.element_size()))
        with torch.autocast(x.device.type, enabled=False):
            parts = [_summarize(x[n].reshape(n.stop - n.start, x[:1].numel())) for n in slices(len(x), size)]
        bits, projections, norms, largest = (torch.cat(each) for each in zip(*parts, strict=True))
        return cls(shape, dtype, bits, projections, norms, largest)

    def at(self, places: list[int]) -> Rows:
        """Returns the summary of some samples, in their order, which keeps the shape of all."""
        bits, projections, norms, largest = (
            part[places] for part in (self.bits, self.projections, self.norms, self.largest)
        )
        return Rows(self.shape, self.dtype, bits, projections, norms, largest, self.rounding)

    def is_finite(self) -> bool:
        """Returns whether all numbers are finite."""
        return bool(self.largest.isfinite().all())

    def measured(self, again: Rows) -> Rows:
        """Returns the summary with the rounding that another run of the same batch shows, if it is larger."""
        if not len(self.bits):
            return self
        return replace(self, rounding=max(self.rounding, float(self.differences(again).amax())))

    def differences(self, other: Rows) -> torch.Tensor:
        """Returns the samples' distances from those of `other`, relative to their norms, [B]; 0 for the same bits."""
        return relative_differences(self.projections - other.projections, self.norms, self.bits == other.bits)


def coarser(dtype: torch.dtype, other: torch.dtype | None) -> torch.dtype:
    """Returns the dtype of two that rounds more; the first if it does not round, as integers."""
    if other is None or not (dtype.is_floating_point or dtype.is_complex):
        return dtype
    return max(dtype, other, key=lambda each: torch.finfo(each).eps)


def relative_differences(of_projections: torch.Tensor, norms: torch.Tensor, is_same: torch.Tensor) -> torch.Tensor:
    """Returns the distances of samples relative to their norms, [...]; 0 for the same bits.

    Args:
        of_projections: differences of projections, [..., 4].
        norms: norms of the samples, [...].
        is_same: whether the bits are the same, [...].
    """
    distances = of_projections.abs().amax(-1) / norms.clamp(min=1e-30)
    # Infinities and NaN are compared by their bits.
    return distances.nan_to_num(nan=torch.inf, posinf=torch.inf).masked_fill(is_same, 0)


class ManyRows:
    """Summaries of R tensors of shape [B, ...]. Tensors of the same shape are stacked, so that few kernels run.

    Args:
        batch: B.
        computed_in: see `Rows.of`.

    Attributes:
        kinds: shape and dtype of each tensor, in the order in which they were added.
    """

    _MOST_BYTES = 1 << 27

    def __init__(self, batch: int, computed_in: torch.dtype | None = None) -> None:
        self._computed_in = computed_in
        self.kinds: list[tuple[torch.Size, torch.dtype]] = []
        self._batch = batch
        self._waiting: dict[Any, list[tuple[int, torch.Tensor]]] = {}
        self._bytes = 0
        self._places: list[int] = []
        self._parts: list[tuple[torch.Tensor, ...]] = []

    def add(self, x: torch.Tensor) -> None:
        """Adds a tensor, which must not change until it is summarized.

        It is summarized when `numbers` is called, or when the waiting tensors take too much memory.

        Raises:
            ValueError: its first dimension is not the batch.
        """
        if not x.dim() or len(x) != self._batch:
            raise ValueError(f"a tensor of shape {tuple(x.shape)} has no rows for {self._batch} samples")
        self._waiting.setdefault((x.shape, x.dtype, x.device), []).append((len(self.kinds), x.detach()))
        self.kinds.append((x.shape, coarser(x.dtype, self._computed_in)))
        self._bytes += x.numel() * x.element_size()
        if self._bytes > self._MOST_BYTES:
            self._summarize()

    def numbers(self) -> tuple[torch.Tensor, ...]:
        """Hashes [R, B], projections [R, B, 4], norms [R, B] and largest absolute values [R, B]; see Rows.

        They are in float64, on the device of the first tensor.
        """
        self._summarize()
        device = self._parts[0][0].device
        order = torch.tensor(self._places).argsort().to(device)
        bits, *others = (
            torch.cat([part.to(device) for part in each])[order] for each in zip(*self._parts, strict=True)
        )
        return bits, *(each.to(torch.float64) for each in others)

    def _summarize(self) -> None:
        for group in self._waiting.values():
            size = max(1, _CHUNK_BYTES // max(1, group[0][1].numel() * group[0][1].element_size()))
            for n in slices(len(group), size):
                some = group[n]
                rows = Rows.of(torch.stack([x for _, x in some]).flatten(0, 1))
                self._places += [place for place, _ in some]
                parts = (rows.bits, rows.projections, rows.norms, rows.largest)
                self._parts.append(tuple(part.view(len(some), self._batch, *part.shape[1:]) for part in parts))
        self._waiting, self._bytes = {}, 0


def _summarize(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    n, width = x.shape
    dtype = torch.float64 if x.dtype == torch.float64 or not x.is_floating_point() else torch.float32
    hashes = torch.zeros(n, dtype=torch.int64, device=x.device)
    projections = torch.zeros(n, _PROJECTIONS, dtype=dtype, device=x.device)
    largest = torch.zeros(n, dtype=dtype, device=x.device)
    whole = width // _COLUMNS
    for first, part in (
        (0, x[:, : whole * _COLUMNS].reshape(n, whole, min(width, _COLUMNS))),
        (whole, x[:, whole * _COLUMNS :].unsqueeze(1)),
    ):
        if not part.numel():
            continue
        part = part + torch.zeros((), dtype=x.dtype, device=x.device) if x.is_floating_point() else part.to(torch.int64)
        bits = part.view(_INTEGERS[x.dtype.itemsize]) if x.is_floating_point() else part  # -0.0 became 0.0 above
        values = part.to(dtype)
        odd, vectors = _random(min(_COLUMNS, 1 << width.bit_length()), bits.dtype, dtype, x.device)
        of_block, scales = _of_blocks(first, part.shape[1], dtype, x.device)
        hashes += ((bits * odd[: part.shape[2]]).sum(2, dtype=torch.int64) * of_block).sum(1)
        projections += ((values @ vectors[: part.shape[2]]) * scales).sum(1)
        largest = torch.maximum(largest, values.abs().amax((1, 2)))
    norms = torch.linalg.vector_norm(x, dim=1, dtype=dtype) if x.is_floating_point() else x.double().norm(dim=1)
    return hashes, projections, norms, largest


@functools.lru_cache(maxsize=64)
def _random(
    columns: int, integer: torch.dtype, real: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns odd integers, [columns], and random vectors, [columns, 4]."""
    generator = torch.Generator().manual_seed(_SEED)
    with _disable_current_modes():  # such as one that replaces random numbers
        odd = torch.randint(0, torch.iinfo(integer).max // 2, (columns,), generator=generator, dtype=integer) * 2 + 1
        vectors = torch.randn(columns, _PROJECTIONS, generator=generator, dtype=real)
        return odd.to(device), vectors.to(device)


@functools.lru_cache(maxsize=64)
def _of_blocks(first: int, count: int, real: torch.dtype, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns numbers that distinguish blocks of columns: odd integers, [count], and projection factors, [count, 4]."""
    generator = torch.Generator().manual_seed(_SEED + 1)
    with _disable_current_modes():
        odd = torch.randint(0, 2**61, (first + count,), generator=generator) * 2 + 1
        scales = torch.randn(first + count, _PROJECTIONS, generator=generator, dtype=real)
        return odd[first:].to(device), scales[first:].to(device)


def release() -> None:
    """Releases the random numbers, which would otherwise take device memory between proofs."""
    _random.cache_clear()
    _of_blocks.cache_clear()


def halves(batch: int) -> list[list[bool]]:
    """Returns, for each binary digit of the samples' indices and for 0 and 1, which samples have this digit.

    One of these selections separates each ordered pair of samples.
    """
    count = max(1, (batch - 1).bit_length())
    return [[(n >> b) & 1 == v for n in range(batch)] for b in range(count) for v in (0, 1)]


class Counts:
    """What a program may have counted in all samples of a step, and the whole numbers that it may divide by.

    Args:
        constants: numbers that it divided by in earlier steps, which had other counts.
    """

    def __init__(self, constants: frozenset[int] = frozenset()) -> None:
        self._constants = constants
        self._divisors: set[int] = set()
        self._counts: dict[Any, list[torch.Tensor]] = {}

    def add(self, leaves: Sequence[Any], batch: int, first: int = 0) -> None:
        """Adds the arguments of a call, or others, of which the first one is at the place `first`."""
        for place, leaf in enumerate(leaves, first):
            if not (isinstance(leaf, torch.Tensor) and leaf.dim()):
                self.divide_by(leaf)
            elif len(leaf) == batch:
                self._count(place, leaf)

    def _count(self, place: int, x: torch.Tensor) -> None:
        """Counts what programs count in the rows of labels and masks: the elements that are not ignored, or not 0."""
        if x.is_floating_point() or x.is_complex() or x.dim() < 2:
            return
        for kind, chosen in enumerate((x != -100, x[:, 1:] != -100, x != 0, x[:, 1:] != 0)):
            self._counts.setdefault((place, kind), []).append(chosen.flatten(1).sum(1))

    def divide_by(self, x: Any) -> None:
        """Notes a number by which a loss may be divided, or which is the inverse of one."""
        if isinstance(x, torch.Tensor) and x.numel() == 1 and not x.is_complex():
            x = x.item()
        if not (isinstance(x, (int, float)) and math.isfinite(x) and x > 0):
            return
        if x < 1:
            if math.isclose(x, float(f"{x:.2g}"), rel_tol=1e-6):  # a weight that somebody chose, such as 0.1
                return
            x = 1 / x
        if abs(x - round(x)) < 1e-6:
            self._divisors.add(round(x))

    def is_divided_by_counts(self) -> bool:
        """Returns whether a loss may be divided by what all samples have together, and not all as much."""
        for counts in self._per_sample():
            total = int(counts.sum())
            is_new = total in self._divisors and total not in self._constants
            if len(counts) < total and is_new and bool((counts != counts[0]).any()):
                return True
        return False

    def after_step(self) -> Counts:
        """Returns those of the next step, in which a divisor that is none of this step's counts is a constant."""
        counted = {int(counts.sum()) for counts in self._per_sample()}
        return Counts(self._constants | (self._divisors - counted))

    def _per_sample(self) -> list[torch.Tensor]:
        return [torch.cat(counts) for counts in self._counts.values()] if self._divisors else []


class Tensors:
    """Tensors that a program has from elsewhere, by their values, and by their places in memory while these live.

    A tensor whose values change in its place is the program's own, such as an average of weights. A batch is a new one.

    Attributes:
        numbers: the numbers that it computes with.
        counts: those of the step.
    """

    def __init__(self, counts: Counts | None = None) -> None:
        self.numbers: set[float] = set()
        self.counts = counts or Counts()
        self._marks: set[Any] = set()
        self._places: dict[Any, StorageWeakRef] = {}

    def add_computed(self, x: torch.Tensor) -> None:
        """Adds the memory of a tensor that an operation has returned."""
        storage = x.untyped_storage()
        self._places[storage._cdata] = StorageWeakRef(storage)  # type: ignore[no-untyped-call]

    def add(self, x: torch.Tensor) -> None:
        """Adds a tensor."""
        self._marks.add(self._mark(x))
        self._places[self._place(x)] = StorageWeakRef(x.untyped_storage())  # type: ignore[no-untyped-call]

    def update(self, other: Tensors) -> None:
        """Adds the tensors of another instance."""
        self._marks |= other._marks
        self.numbers |= other.numbers
        both = {**self._places, **other._places}
        self._places = {place: known for place, known in both.items() if not known.expired()}  # type: ignore[no-untyped-call]

    def has(self, x: torch.Tensor) -> bool:
        """Returns whether a tensor is there, or was with other values."""
        places = (self._places.get(place) for place in (self._place(x), x.untyped_storage()._cdata))
        is_kept = any(known is not None and not known.expired() for known in places)  # type: ignore[no-untyped-call]
        return is_kept or self._mark(x) in self._marks

    @staticmethod
    def _place(x: torch.Tensor) -> Any:
        return x.untyped_storage()._cdata, x.storage_offset(), x.shape

    @staticmethod
    @torch.no_grad()
    def _mark(x: torch.Tensor) -> Any:
        """Returns what is the same for equal tensors, and hardly for others."""
        numbers = torch.view_as_real(x).flatten() if x.is_complex() else x.flatten()
        numbers = numbers[:: 1 + len(numbers) // _MOST_OF_A_MARK]
        places = torch.arange(1, len(numbers) + 1, device=x.device, dtype=torch.float64)
        return x.shape, x.dtype, float((numbers.double().nan_to_num() * places.sqrt()).sum())


@torch.no_grad()
def sample_hashes(given: Sequence[torch.Tensor], batch: int) -> torch.Tensor:
    """Returns numbers that are the same for samples with the same inputs, [B], on the CPU."""
    total = torch.zeros(batch, dtype=torch.int64)
    for x in given:
        total = total * 1000003 + Rows.of(x.detach()).bits.cpu()
    return total


class KnownSamples:
    """The samples that calls had, by their inputs, and in which of two plans with other samples they stay."""

    def __init__(self) -> None:
        self._stays: dict[int, tuple[bool, bool]] = {}
        self._hashes: list[torch.Tensor] = []  # of the calls of this step

    def add(self, given: Sequence[torch.Tensor], batch: int) -> None:
        """Notes which samples a call has, so that a later step knows them again."""
        self._hashes.append(sample_hashes(given, batch))

    def end_step(self, plans: Sequence[torch.Tensor]) -> None:
        """Notes which of the samples of its calls stay in each of the two plans."""
        for hashes in self._hashes:
            for sample, (first, second) in zip(hashes.tolist(), zip(*plans, strict=True), strict=True):
                before = self._stays.get(sample, (True, True))
                self._stays[sample] = before[0] and bool(first), before[1] and bool(second)
        self._hashes = []

    def staying(self, given: Sequence[torch.Tensor], batch: int) -> list[torch.Tensor]:
        """Returns which samples of a call must stay in each plan, and in the one in which no earlier sample stays.

        A sample that an earlier step had, too, may depend on what it has left there itself.
        """
        known = [self._stays.get(each) for each in sample_hashes(given, batch).tolist()]
        halves = [[each is None or each[i] for each in known] for i in (0, 1)]
        return [torch.tensor(each) for each in (*halves, [each is None for each in known])]


def may_be_table(x: torch.Tensor) -> bool:
    """Returns whether a tensor may have rows of its own, instead of those of the samples, as far as one step tells."""
    return x.is_floating_point() or x.is_complex() or len(torch.unique(x, dim=0)) == len(x)


def is_regular(x: torch.Tensor) -> bool:
    """Returns whether integers are numbers of the rows, as torch.arange returns them."""
    is_integer = not (x.is_floating_point() or x.is_complex() or x.dtype == torch.bool)
    return is_integer and 2 < x.numel() == len(x) and not bool(x.flatten().diff(n=2).any())


def has_unequal_weights(target: torch.Tensor, weight: torch.Tensor | None, ignored: int, batch: int) -> bool:
    """Returns whether samples have different weights in the mean of a cross entropy, which all of them share."""
    weights = (target != ignored).double()
    if weight is not None:
        weights *= weight.double()[target.clamp(0, len(weight) - 1)]
    if weights.numel() % batch:
        return False
    sums = weights.reshape(batch, -1).sum(1), weights.reshape(-1, batch).sum(0)
    return all(float(each.max() - each.min()) > 1e-9 * float(each.max()) for each in sums)
