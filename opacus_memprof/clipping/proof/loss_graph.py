# SPDX-License-Identifier: Apache-2.0
"""Reads autograd's graph of a loss, from the tensors that backward starts from to the outputs of models.

It tells how the loss is reduced over the samples, whether it reaches a model beside its outputs, and whether the
gradient of one sample's output depends on the outputs of others.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge

from opacus_memprof.clipping.forwards.state import Arrangement
from opacus_memprof.clipping.proof.batches import ALIAS, Root, cotangents, edge_of, is_output
from opacus_memprof.clipping.proof.summary import halves

_ELEMENTWISE = re.compile(
    r"(Pow|Sub|Add|Neg|Abs|Exp|Log|Relu|Clone|ToCopy|View|UnsafeView|ReshapeAlias|Squeeze|Unsqueeze|Transpose|Permute|"
    r"LogSoftmax|Softplus|Gather|NllLoss|NllLoss2D|MseLoss|SmoothL1Loss|HuberLoss|BinaryCrossEntropyWithLogits|Mul|Div)"
    r"Backward\d"
)


def loss_of_backward() -> tuple[Sequence[torch.Tensor], Sequence[torch.Tensor | None], bool]:
    """Returns the losses of the running backward, their gradients, and whether it keeps its graph.

    There are none where a backward runs inside another one.
    """
    code = torch.autograd.graph._engine_run_backward.__code__
    roots = []
    frames: list[Any] = list(sys._current_frames().values())  # on a GPU autograd runs hooks in a thread of its own
    while frames:
        caller = frames.pop()
        while caller is not None and caller.f_code is not code:
            caller = caller.f_back
        roots += [] if caller is None else [(caller.f_locals["t_outputs"], caller.f_locals["args"])]
    caller = None  # one of them is this function's own frame, which would keep the losses alive in a circle
    if len(roots) != 1:
        return (), (), False
    ((losses, arguments),) = roots
    return losses, arguments[0] if arguments else [None] * len(losses), len(arguments) > 1 and bool(arguments[1])


def reductions_of_loss() -> set[str]:
    """Returns how the loss of the running backward is reduced over the samples: "mean", "sum", both, or not known.

    Autograd's graph tells, where the loss, or a term of it, is a mean or a sum of values without factors. A mean that
    is multiplied may be a sum, and a sum that is multiplied or divided may be a mean.
    """
    losses, given, _ = loss_of_backward()
    return reductions_of(losses, given)


def reductions_of(
    losses: Sequence[torch.Tensor], given: Sequence[torch.Tensor | None], outputs: Collection[Any] = ()
) -> set[str]:
    """Returns the same of losses whose backward has not begun.

    Args:
        losses: the tensors from which backward starts.
        given: their gradients.
        outputs: the nodes of autograd's graph of the model's outputs, where these are no aliases.
    """
    found: set[str] = set()
    nodes: list[tuple[Any, set[str]]] = [
        (loss.grad_fn, {"mean", "sum"})
        for loss, g in zip(losses, given, strict=False)
        if isinstance(loss, torch.Tensor)
        and loss.numel() == 1
        and loss.grad_fn is not None
        and (g is None or float(g) == 1)
    ]
    while nodes:
        node, kinds = nodes.pop()
        if node in outputs or (node.name() != ALIAS and is_output(node)):  # the model's own loss
            continue
        inner = [each for each, _ in node.next_functions if each is not None]
        if node.name() in ("AddBackward0", "SubBackward0", "NegBackward0", ALIAS):
            nodes += [(each, kinds) for each in inner]
        elif node.name() == "DivBackward0" and len(inner) == 1:
            nodes.append((inner[0], kinds - {"sum"}))  # by the number of accumulated batches, or of samples
        else:
            kind = _reduction(node, outputs)
            found |= kinds & {kind or ""}
    return found


def _reduction(node: Any, outputs: Collection[Any]) -> str | None:
    """Returns the kind of a node of autograd's graph that reduces all samples' losses; None if it is not known."""
    reduction = getattr(node, "_saved_reduction", None)
    if reduction is not None:
        try:
            has_weights = getattr(node, "_saved_weight", None) is not None
        except RuntimeError:  # released by the backward
            has_weights = True
        return {1: "mean", 2: None if has_weights else "sum"}.get(reduction)
    kind = {"MeanBackward0": "mean", "SumBackward0": "sum"}.get(node.name())
    waiting, seen = [each for each, _ in node.next_functions], set()
    while waiting and kind is not None:
        inside = waiting.pop()
        if inside is None or inside in seen or inside in outputs or is_output(inside):
            continue
        seen.add(inside)
        name, dims = inside.name(), getattr(inside, "_saved_dim", (0,))
        is_own = name in ("SumBackward1", "MeanBackward1") and 0 not in dims  # over a sample's numbers
        if not is_own and (
            not _ELEMENTWISE.fullmatch(name)
            or getattr(inside, "_saved_reduction", None)
            or (kind == "sum" and name in ("MulBackward0", "DivBackward0"))
        ):
            return None
        waiting += [each for each, _ in inside.next_functions]
    return kind


_SETTINGS = re.compile(r"_saved_(dim|reduction|axis|keepdim)")
"""The numbers by which nodes of one kind differ: whether a sum, for example, goes over samples."""
_settings_of: dict[type, list[str]] = {}
_MOST_WHOLE = 64
_DEPTH = 2
"""A pattern has so many generations of nodes below its own one."""
Places: TypeAlias = "Mapping[tuple[int, int], tuple[str, Arrangement | None]]"
"""Outputs of models: the name of a node and the position of samples, by the node's number and the output's there."""


@dataclass
class LossGraph:
    """The part of autograd's graph that is between losses and the outputs of models.

    Attributes:
        kinds: what its nodes do.
        below: where their edges lead: to a node by its index and the number there, or elsewhere (negative).
        outputs: the edges to outputs, with the position of samples there.
        beside: the edges that lead into a model, but not to one of its outputs.
        own_functions: the names of nodes of the program's own autograd functions.
    """

    kinds: list[tuple[Any, ...]]
    below: list[list[int]]
    outputs: list[tuple[GradientEdge, Arrangement | None]]
    beside: list[GradientEdge]
    own_functions: list[str]

    @classmethod
    def of(cls, losses: Sequence[Root], batch: int, known: Places, ranges: Sequence[tuple[int, int]]) -> LossGraph:
        """Reads the graph.

        Args:
            losses: the tensors, or edges, from which backward starts.
            batch: the number of samples.
            known: the outputs of models.
            ranges: the ranges of the numbers of nodes that were made while a model ran.
        """
        found = cls([], [], [], [], [])
        nodes: list[Any] = []
        indices: dict[Any, int] = {}

        def visit(node: Any, number: int) -> int:
            if node is None:
                return -1
            index = indices.get(node)
            if index is None:
                place = node._sequence_nr()
                output = known.get((place, number))
                if output is not None and output[0] == node.name():
                    edge = GradientEdge(node, number), output[1]
                    found.outputs.extend([] if edge in found.outputs else [edge])
                    return -2 - (output[1] is None)
                for begin, end in ranges:
                    if begin <= place < end and _reaches_layers(node, known):
                        inner = GradientEdge(node, number)
                        found.beside.extend([] if inner in found.beside else [inner])
                        return -4
                index = indices[node] = len(nodes)
                nodes.append(node)
            return index << 8 | number

        for loss in losses:
            visit(*edge_of(loss))
        for node in nodes:  # which grow
            found.kinds.append(_kind(node, batch))
            if isinstance(node, BackwardCFunction) and found.kinds[-1][0] != "_DDPSinkBackward":
                found.own_functions.append(found.kinds[-1][0])
            found.below.append([visit(*each) for each in node.next_functions])
        return found

    def sequence(self) -> int:
        """Returns a number that is the same for equal graphs."""
        return hash((*self.kinds, *map(tuple, self.below)))

    def patterns(self) -> set[int]:
        """Returns a number for each kind of node with what is below it. They do not depend on numbers and lengths."""
        numbers = kinds = [hash(kind) for kind in self.kinds]
        for _ in range(_DEPTH):
            numbers = [
                hash((kind, *[each if each < 0 else (numbers[each >> 8], each & 255) for each in below]))
                for kind, below in zip(kinds, self.below, strict=True)
            ]
        return set(numbers)

    def gradient_beside(self, losses: Sequence[Any], given: Sequence[torch.Tensor | None]) -> GradientEdge | None:
        """Returns an edge beside the outputs by which a gradient other than zero goes into a model, if there is one.

        Args:
            losses: the tensors from which backward starts.
            given: their gradients.
        """
        if not self.beside:
            return None
        edges = self.beside
        found = torch.autograd.grad(losses, edges, given, retain_graph=True, allow_unused=True)
        return next((edge for edge, g in zip(edges, found, strict=True) if g is not None and bool(g.any())), None)

    def mixes(self, losses: Sequence[Any], given: Sequence[torch.Tensor | None], batch: int, tried: int) -> bool:
        """Returns whether the gradient that a sample's outputs get depends on those of other samples.

        A sum of terms of one sample each has no second derivatives by two samples: these are exactly zero.

        Args:
            losses: see `gradient_beside`.
            given: see `gradient_beside`.
            batch: the number of samples.
            tried: how many graphs were tried before. Of many, each is tried with two selections of samples alone.

        Raises:
            NotImplementedError: it has functions of the program's own, whose backward may hide what it depends on.
        """
        if self.own_functions:
            raise NotImplementedError(f"{self.own_functions[0]} is of an autograd function of the program's own")
        edges, places = [edge for edge, _ in self.outputs], [where for _, where in self.outputs]
        options: Any = {"allow_unused": True, "retain_graph": True}
        found = torch.autograd.grad(losses, edges, given, create_graph=True, **options)
        pairs = [(g, where) for g, where in zip(found, places, strict=True) if g is not None and g.requires_grad]
        gradients, own = [g for g, _ in pairs], [where for _, where in pairs]
        plans: list[list[bool] | None] = [None] if None in own else []  # None: the outputs that all samples share
        selected = halves(batch)
        first = 2 * tried % len(selected)
        plans += selected if tried < _MOST_WHOLE else selected[first : first + 2]
        for plan in plans if pairs else ():
            kept = torch.tensor(plan or [False] * batch, dtype=torch.float64)
            weights = cotangents(gradients, own, batch, kept, plan is None)
            second = torch.autograd.grad(gradients, edges, weights, **options)
            for g, where in zip(second, places, strict=True):
                if g is None:
                    continue
                others = g if where is None or plan is None else where.by_sample(g, batch)[(kept == 0).to(g.device)]
                if bool((others.isfinite() & (others != 0)).any()):
                    return True
        return False


def _kind(node: Any, batch: int) -> tuple[Any, ...]:
    """Returns what a node does: its operation, its settings and the shape of its output.

    Overloads count as one operation: torch takes another one of some, such as ctc_loss, while a dispatch mode is on.
    """
    cls = type(node)
    names = _settings_of.get(cls)
    if names is None:
        names = _settings_of[cls] = [name for name in dir(cls) if _SETTINGS.match(name)]
    metadata = node._input_metadata
    has_shape = bool(metadata) and not metadata[0].is_cpp_nested_tensor
    shape: Sequence[int] = metadata[0].shape if has_shape else ()
    rows = 0 if not shape else 2 if shape[0] == batch else int(shape[0] == 1)
    return node.name().rstrip("0123456789"), len(shape), rows, *[_setting(node, name) for name in names]


def _setting(node: Any, name: str) -> Any:
    value = getattr(node, name, None)
    return value if isinstance(value, (int, tuple)) else None


def _reaches_layers(node: Any, known: Places) -> bool:
    """Returns whether a backward from a node reaches a layer of a private model before an output of one."""
    waiting, seen = [node], {node}
    while waiting:
        node = waiting.pop()
        if node.name().startswith(("GradientTap", "CallTap")):
            return True
        for each, number in node.next_functions:
            if each is not None and each not in seen and (each._sequence_nr(), number) not in known:
                seen.add(each)
                waiting.append(each)
    return False
