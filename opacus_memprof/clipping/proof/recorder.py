# SPDX-License-Identifier: Apache-2.0
"""Replaces the bookkeeping while a proof runs backward: records the data that reaches each layer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from opacus_memprof.clipping.agreement import KeptRefusal
from opacus_memprof.clipping.forwards.repetition import Call
from opacus_memprof.clipping.layers import GenericLayer, Layer
from opacus_memprof.clipping.proof.summary import ManyRows, Rows
from opacus_memprof.clipping.workspace import Workspace


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

    def first(self, count: int, with_gradients: bool) -> Record:
        """Returns the record of the first samples alone, with or without gradients."""
        inputs, gradients, own = (
            [rows.first(count) for rows in each] for each in (self.inputs, self.gradients, self.own)
        )
        return Record(self.layer, inputs, gradients if with_gradients else [], own if with_gradients else [])


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

    Attributes:
        records: the records in the order of backward.
    """

    is_captured = False
    refusal = KeptRefusal()

    def __init__(self, workspace: Workspace) -> None:
        self.workspace = workspace
        self.records: list[Record] = []

    def add(self, layer: Layer, x: Any, g: Any, forward: int) -> None:
        """Does what `Bookkeeping.add` does."""
        found: dict[str, list[Rows]] = {"input": [], "gradient": [], "own": []}
        for kind, tensor in _recorded(layer, x, g, self.workspace):
            found[kind].append(Rows.of(tensor))
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

    def __init__(self, workspace: Workspace, batch: int) -> None:
        self.workspace = workspace
        self.rows = ManyRows(batch)
        self.places: list[tuple[Layer | None, str]] = []

    def note(self, layer: Layer | None, kind: str, x: torch.Tensor) -> None:
        """Adds a tensor with samples."""
        self.places.append((layer, kind))
        self.rows.add(x)

    def add(self, layer: Layer, x: Any, g: Any, forward: int) -> None:
        """Does what `Bookkeeping.add` does."""
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
        """Does what `Bookkeeping.add` does."""
        dtype = g[0].dtype if isinstance(layer, GenericLayer) else g.dtype
        for parameter, total in layer.sums_of_backward(x, g, self.weights, None, self.workspace).items():
            known = self.sums.get(parameter)
            if known is None:
                self.sums[parameter] = Sum(total.detach().clone(), [layer], dtype)
                continue
            known.total = known.total + total
            known.layers.append(layer)
