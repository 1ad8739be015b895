# SPDX-License-Identifier: Apache-2.0
"""Records the data that reaches each layer while a proof runs backward, and compares the records of two runs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from opacus_memprof.clipping.agreement import KeptRefusal
from opacus_memprof.clipping.forwards.repetition import Call
from opacus_memprof.clipping.forwards.state import RandomState
from opacus_memprof.clipping.kernels.norm_bounds import uses_tf32
from opacus_memprof.clipping.layers import GenericLayer, Layer
from opacus_memprof.clipping.proof.summary import ManyRows, Rows, relative_differences
from opacus_memprof.clipping.workspace import Workspace
from opacus_memprof.errors import MemprofError

_MEASURED = 2
"""Runs that measure rounding. One may differ from the base by little, by chance."""

_DRAWS_BY_DATA = (
    "the model draws more or fewer random numbers for other data (as nn.RReLU and torch.poisson do), so that a "
    "sample's random numbers depend on the samples before it. Draw as many for all data and choose among them, as "
    "torch.where does, or use nn.LeakyReLU instead of nn.RReLU."
)


class MixingError(MemprofError):
    """Samples influence one another in the outputs of a model."""


@dataclass
class Doubt:
    """A layer whose gradients are not proved.

    Attributes:
        layer: the layer.
        reason: the observation, as the end of a sentence.
        moves: whether its rows may belong to other samples than assumed, so that repeating its module alone would not
            help.
    """

    layer: Layer
    reason: str
    moves: bool


@dataclass(frozen=True)
class Record:
    """The data of one backward of a layer.

    Attributes:
        layer: the layer.
        inputs: rows of the inputs that have samples.
        gradients: rows of the output gradients.
        own: rows of the per-sample gradients of its parameters, if these are computed for all samples at once.
    """

    layer: Layer
    inputs: list[Rows]
    gradients: list[Rows]
    own: list[Rows] = field(default_factory=list)

    def at(self, places: list[int], with_gradients: bool) -> Record:
        """Returns the record of some samples, in their order, with or without gradients."""
        inputs, gradients, own = (
            [rows.at(places) for rows in each] for each in (self.inputs, self.gradients, self.own)
        )
        return Record(self.layer, inputs, gradients if with_gradients else [], own if with_gradients else [])

    def is_finite(self) -> bool:
        """Returns whether all numbers are finite."""
        return all(rows.is_finite() for each in (self.inputs, self.gradients, self.own) for rows in each)

    def measured(self, again: Record) -> Record:
        """Returns the record with the rounding that another run of the same batch shows."""
        pairs = ((self.inputs, again.inputs), (self.gradients, again.gradients), (self.own, again.own))
        return Record(self.layer, *(measured(mine, others) for mine, others in pairs))


def measured(rows: list[Rows], again: list[Rows]) -> list[Rows]:
    """Returns summaries with the rounding that another run of the same batch shows, if it has as many."""
    if len(rows) != len(again):
        return rows
    return [mine.measured(other) for mine, other in zip(rows, again, strict=True)]


def _recorded(layer: Layer, x: Any, g: Any, workspace: Workspace) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the data of a layer's backward by sample, with its kind; see Record."""
    if not isinstance(layer, GenericLayer):
        if x is not None:
            yield "input", x
        yield "gradient", g
        return
    call: Call = x
    for leaf, where in zip(call.leaves, call.arrangements, strict=True):
        if where is not None:
            yield "input", where.by_sample(leaf, call.batch)
    if layer.way == "whole":
        for stack in layer.keep(call, g, workspace, norms=False).stacks.values():
            yield "own", stack
    for each in call.sample_gradients(g):
        yield "gradient", each


class RowRecorder:
    """Records the data of each layer's backward by sample.

    Args:
        workspace: limit on temporaries.
        computed_in: see `Rows.of`.

    Attributes:
        records: the records in the order of backward.
    """

    is_captured = False
    refusal = KeptRefusal()

    def __init__(self, workspace: Workspace, computed_in: torch.dtype | None = None) -> None:
        self.workspace, self.computed_in = workspace, computed_in
        self.records: list[Record] = []

    def add(self, layer: Layer, x: Any, g: Any, forward: int) -> None:
        """Records the data that reaches one layer in backward. The arguments are those of `Bookkeeping.add`."""
        found: dict[str, list[Rows]] = {"input": [], "gradient": [], "own": []}
        for kind, tensor in _recorded(layer, x, g, self.workspace):
            found[kind].append(Rows.of(tensor, self.computed_in))
        self.records.append(Record(layer, found["input"], found["gradient"], found["own"]))

    def of_layer(self, layer: Layer) -> list[Record]:
        """Returns the records of a layer."""
        return [record for record in self.records if record.layer is layer]


class ManyRecorder:
    """Records the same data as RowRecorder, for all layers at once.

    Attributes:
        rows: rows of all tensors.
        places: layer and kind of each tensor: "input", "gradient", or "own".
    """

    is_captured = False
    refusal = KeptRefusal()

    def __init__(self, workspace: Workspace, batch: int, computed_in: torch.dtype | None = None) -> None:
        self.workspace = workspace
        self.rows = ManyRows(batch, computed_in)
        self.places: list[tuple[Layer | None, str]] = []

    def note(self, layer: Layer | None, kind: str, x: torch.Tensor) -> None:
        """Adds a tensor with samples."""
        self.places.append((layer, kind))
        self.rows.add(x)

    def add(self, layer: Layer, x: Any, g: Any, forward: int) -> None:
        """Records the data that reaches one layer in backward. The arguments are those of `Bookkeeping.add`."""
        for kind, tensor in _recorded(layer, x, g, self.workspace):
            self.note(layer, kind, tensor)


@dataclass
class Sum:
    """The sum of a parameter's per-sample gradients, as its layers compute it.

    Attributes:
        total: the sum, in float32 (float64 for float64).
        layers: the layers that contributed.
        dtype: the dtype of the output gradients.
    """

    total: torch.Tensor
    layers: list[Layer]
    dtype: torch.dtype


@dataclass
class SumRecorder:
    """Forms the sums of the layers' per-sample gradients.

    Attributes:
        workspace: limit on temporaries.
        weights: the factors of the samples' gradients, [B].
        sums: the sums by parameter.
    """

    workspace: Workspace
    weights: torch.Tensor
    sums: dict[nn.Parameter, Sum] = field(default_factory=dict)
    is_captured = False
    refusal = KeptRefusal()

    def add(self, layer: Layer, x: Any, g: Any, forward: int) -> None:
        """Adds the sums of one layer's backward. The arguments are those of `Bookkeeping.add`."""
        dtype = g[0].dtype if isinstance(layer, GenericLayer) else g.dtype
        for parameter, total in layer.sums_of_backward(x, g, self.weights, None, self.workspace).items():
            known = self.sums.get(parameter)
            if known is None:
                self.sums[parameter] = Sum(total.detach().clone(), [layer], dtype)
                continue
            known.total = known.total + total
            known.layers.append(layer)


# Kernels that add with atomic operations, such as those of attention's backward, round differently each time. In many
# layers of low precision, that grows to more than the tolerance. So it is measured in other runs of the same batch, and
# so many times as much is allowed, up to so many times the tolerance, which a batch of another size may cause as well.
_MORE = 8
_TOLERANCES = {torch.float64: 1e-9, torch.complex128: 1e-9, torch.bfloat16: 2e-2, torch.float16: 2e-3}


# A batch of another size is multiplied by other kernels. Where rounding changes the sign of an input of ReLU, a unit
# gets its gradient or loses it. With n units that is 1 / sqrt(n) of a sample's gradient, in few samples.
_JUMP = 5e-2
_JUMPS = 5e-3  # root mean square of the samples


def agree(
    base: ManyRecorder, other: ManyRecorder, kept: torch.Tensor, no_leak: bool, again: ManyRecorder | None = None
) -> bool:
    """Returns whether two runs agree in all data of the kept samples.

    With `no_leak`, also requires that no other sample gets a gradient. The host waits once, not for every layer.
    `again` is another run of the batch of `base`, which shows how differently kernels round.
    """
    if any(base.places != each.places or base.rows.kinds != each.rows.kinds for each in (other, again or base)):
        return False
    if not base.places:
        return True
    bits, projections, norms, _ = base.rows.numbers()
    other_bits, other_projections, _, largest = other.rows.numbers()
    device = norms.device
    kept = kept.to(device)
    tolerances = torch.tensor([_tolerance(dtype, device) for _, dtype in base.rows.kinds], device=device)
    if again is not None:
        again_bits, again_projections, *_ = again.rows.numbers()
        rounding = relative_differences(projections - again_projections, norms, bits == again_bits).amax(1)
        tolerances = tolerances.maximum(_MORE * rounding.minimum(tolerances))
    differences = relative_differences(projections - other_projections, norms, bits == other_bits)
    is_far = (differences > tolerances.unsqueeze(1)) & kept
    if no_leak:
        is_gradient = torch.tensor([kind == "gradient" for _, kind in other.places], device=device)
        is_far |= (largest > 0) & ~kept & is_gradient.unsqueeze(1)
    return not bool(is_far.any())


def far_apart(a: Rows, b: Rows, kept: torch.Tensor, may_jump: bool = False) -> bool:
    """Returns whether kept samples differ by more than rounding.

    With `may_jump`, rounding may also have changed the sign of some inputs of ReLU, or the place of some maximums. That
    of float64 does not.
    """
    differences, rounding, kept = a.differences(b), _rounding_of(a, b), kept.to(a.norms.device)
    is_far = bool(((differences > rounding) & kept).any())
    if not is_far or not may_jump or a.dtype == torch.float64:
        return is_far
    differences = differences[kept]
    of_all = float(differences.norm()) / math.sqrt(len(differences))
    return of_all > max(rounding, _JUMPS) or float(differences.amax()) > max(rounding, _JUMP)


def differing(a: Rows, b: Rows) -> torch.Tensor:
    """Returns which samples differ by more than rounding, [B]."""
    return a.differences(b) > _rounding_of(a, b)


def mixes_rows(x: torch.Tensor, others: Sequence[torch.Tensor], kept: Sequence[torch.Tensor]) -> bool:
    """Returns whether rows of samples that stay change with other samples, wherever in a tensor the samples are.

    Args:
        x: the tensor.
        others: what it is where other samples change.
        kept: for each of these, which samples stay, [B].
    """
    if not x.numel():
        return False
    count = len(kept[0])
    ways = {(d, tiled) for d in range(min(2, x.dim())) if x.shape[d] % count == 0 for tiled in (True, False)}
    has_rows = any(d == 0 for d, _ in ways)
    of_all = torch.ones(len(x) if x.dim() else 1, dtype=torch.bool, device=x.device)
    for other, stay in zip(others, kept, strict=False):
        for d, tiled in list(ways):
            times = x.shape[d] // count
            rows = stay.repeat(times) if tiled else stay.repeat_interleave(times)
            if far_apart(Rows.of(x.transpose(0, d)), Rows.of(other.transpose(0, d)), rows):
                ways.discard((d, tiled))
        if not has_rows:
            of_all &= differing(*(Rows.of(each.reshape(len(of_all), -1)) for each in (x, other)))
    return not ways and (has_rows or bool(of_all.any()))


def _rounding_of(a: Rows, b: Rows) -> float:
    tolerance = _tolerance(a.dtype, a.norms.device)
    return max(tolerance, _MORE * (min(a.rounding, tolerance) if a.shape == b.shape else tolerance))


def _tolerance(dtype: torch.dtype, device: torch.device) -> float:
    """Returns the largest relative difference that rounding may cause."""
    if uses_tf32(dtype, device):
        return 2e-3
    dtypes = [dtype, *([torch.get_autocast_dtype(device.type)] if torch.is_autocast_enabled(device.type) else [])]
    return max(_TOLERANCES.get(each, 2e-5) for each in dtypes)


def first_difference(
    base: list[Record], other: list[Record], kept: torch.Tensor, no_leak: bool, may_jump: bool = False
) -> str | None:
    """Returns a description of the first difference between kept samples, or None.

    With `may_jump`, gradients may differ by jumps; see `far_apart`.
    """
    if len(base) != len(other):
        return "is called another number of times when other samples change"
    for a, b in zip(base, other, strict=True):
        pairs = [*zip(a.inputs, b.inputs, strict=False), *zip(a.gradients, b.gradients, strict=False)]
        if any(x.shape[1:] != y.shape[1:] for x, y in pairs):
            return "gets other shapes when other samples change"
        if any(far_apart(x, y, kept) for x, y in zip(a.inputs, b.inputs, strict=False)):
            return "gets another input for a sample when other samples of the batch change"
        if any(far_apart(x, y, kept, may_jump) for x, y in zip(a.gradients, b.gradients, strict=False)):
            return "gets another output gradient for a sample when other samples of the batch change"
        if any(far_apart(x, y, kept, may_jump) for x, y in zip(a.own, b.own, strict=False)):
            return "gives a sample another gradient when other samples of the batch change"
        if no_leak and any(bool((g.largest[~kept.to(g.largest.device)] > 0).any()) for g in b.gradients):
            return "gets an output gradient for a sample from the outputs of other samples"
    return None


@dataclass
class Run:
    """The results of one forward and backward of a proof.

    Attributes:
        batch: the number of samples.
        outputs: the outputs that have samples.
        has_shared: whether there are other outputs.
        with_shared: whether the other outputs had gradients.
        draws: whether random numbers were drawn.
        draws_outside: whether some of these were Python's or NumPy's.
        end: the generators after the forward; None if others would be expected from the whole batch.
        recorder: the data that reached the layers.
        trace: the order in which layers were called.
        patterns: the patterns of the outputs' graph.
        is_measured: whether the rounding of its kernels was measured.
    """

    batch: int
    outputs: list[Rows]
    has_shared: bool
    with_shared: bool
    draws: bool
    draws_outside: bool
    end: RandomState | None
    recorder: RowRecorder
    trace: list[Layer | None]
    patterns: list[int]
    is_measured: bool = False

    def measure_rounding(self, again: Callable[[], Run]) -> None:
        """Stores the differences from more runs of the same batch, as far as these run the same layers."""
        self.is_measured = True
        for other in (again() for _ in range(_MEASURED)):
            mine, others = self.recorder.records, other.recorder.records
            if [each.layer for each in mine] == [each.layer for each in others]:
                self.outputs = measured(self.outputs, other.outputs)
                self.recorder.records = [a.measured(b) for a, b in zip(mine, others, strict=True)]

    def at(self, places: list[int]) -> Run:
        """Returns the results of some samples, in their order.

        Gradients of a loss that all samples share are left out if some are missing, because they depend on the number.
        """
        recorder = RowRecorder(self.recorder.workspace)
        is_kept = len(places) == self.batch or not (self.has_shared and self.with_shared)
        recorder.records = [each.at(places, is_kept) for each in self.recorder.records]
        return replace(self, outputs=[rows.at(places) for rows in self.outputs], end=None, recorder=recorder)

    def is_finite(self) -> bool:
        """Returns whether all numbers are finite."""
        outputs, records = self.outputs, self.recorder.records
        return all(rows.is_finite() for rows in outputs) and all(record.is_finite() for record in records)

    def compare(self, other: Run, kept: torch.Tensor, no_leak: bool, again: Callable[[], Run]) -> list[Doubt]:
        """Returns the layers whose data for kept samples differs, by more than rounding.

        If there is a difference, rounding is measured first, by more runs of this batch, which `again` makes.

        Raises:
            MixingError: an output differs.
        """
        try:
            doubts = self.differences(other, kept, no_leak)
        except MixingError:
            if self.is_measured:
                raise
        else:
            if not doubts or self.is_measured:
                return doubts
        self.measure_rounding(again)
        return self.differences(other, kept, no_leak)

    def differences(self, other: Run, kept: torch.Tensor, no_leak: bool, may_jump: bool = False) -> list[Doubt]:
        """Does the same as `compare`, but measures no rounding.

        With `may_jump`, for runs of other sizes, gradients may differ by jumps; see `far_apart`.

        Raises:
            MixingError: an output differs.
        """
        for a, b in zip(self.outputs, other.outputs, strict=True):
            if a.shape[1:] != b.shape[1:] or far_apart(a, b, kept):
                if other.end is not None and self.end is not None and not self.end.is_same(other.end):
                    raise MixingError(_DRAWS_BY_DATA)
                raise MixingError(
                    f"an output of the model, of shape {tuple(a.shape)}, changes for a sample when other samples of "
                    "the batch change, are missing or come in another order, so that per-sample gradients do not "
                    "exist. Use layers that treat samples separately (GroupNorm or LayerNorm instead of statistics "
                    "over the batch), and return outputs whose first dimension is the batch."
                )
        doubts = []
        layers = list(dict.fromkeys(r.layer for r in reversed(self.recorder.records)))
        for layer in layers:
            mine, others = self.recorder.of_layer(layer), other.recorder.of_layer(layer)
            reason = first_difference(mine, others, kept, no_leak, may_jump)
            if reason is not None:
                doubts.append(Doubt(layer, reason, moves=True))
        known = set(layers)
        doubts += [
            Doubt(layer, "is called or not depending on other samples", moves=True)
            for layer in dict.fromkeys(r.layer for r in other.recorder.records)
            if layer not in known
        ]
        return doubts
