# SPDX-License-Identifier: Apache-2.0
"""Watches the graph of a model's outputs between the call and backward(), where no proof is.

Hooks of the program there, and losses, must not mix samples.
"""

import functools
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import is_
from typing import Any

import torch
from torch.autograd.graph import GradientEdge
from torch.utils._pytree import tree_leaves, tree_map_only

from opacus_memprof.clipping.bookkeeping import Bookkeeping
from opacus_memprof.clipping.forwards.state import PLAIN, Arrangement, is_own
from opacus_memprof.clipping.kernels.native import OperationLog, is_backward_of_inputs
from opacus_memprof.clipping.module.calls import Outputs
from opacus_memprof.clipping.module.read_numbers import makes_no_values, unfollowed
from opacus_memprof.clipping.proof.batches import OUTPUT, Root, as_output, edge_of, graph_nodes, perturbed
from opacus_memprof.clipping.proof.loss_graph import LossGraph
from opacus_memprof.clipping.proof.model_state import without_compiled_autograd
from opacus_memprof.clipping.proof.recorder import far_apart
from opacus_memprof.clipping.proof.summary import Rows, halves
from opacus_memprof.errors import MemprofError

_MOST_SEQUENCES = 4096


class GraphHooks:
    """Watches the graph of a model's outputs after the call, where no proof is.

    Hooks that a program adds there must not change gradients inside of the model, nor mix those of its outputs. A loss
    must reach the model by its outputs. Where the graph from the outputs to the loss has a pattern that no checked step
    had, the loss must have no second derivatives by outputs of two samples.

    What the program computes after the call without gradients is in no graph. Where its operations, or their numbers,
    are not those of a checked step, the next steps are checked.

    Args:
        bookkeeping: gets the errors.
        check_next: called where only the next steps can show that a new loss does not mix samples by detached tensors.
    """

    def __init__(self, bookkeeping: Bookkeeping, check_next: Callable[[], None]) -> None:
        self.bookkeeping, self.check_next = bookkeeping, check_next
        self._begin = 0
        self._graphs: list[_Graph] = []
        self._inner: list[InnerOutput] = []
        self._known: set[int] = set()  # patterns of graphs between outputs and loss
        self._sequences: set[int] = set()  # those of whole graphs that have these patterns
        self._new: set[int] = set()  # those of this step
        self._tried = 0
        self._operations = OperationLog()  # from a call to the next one, or to backward
        self._is_recording = False

    def __getstate__(self) -> dict[str, Any]:
        empty: dict[str, Any] = {"_graphs": [], "_inner": [], "_known": set(), "_sequences": set(), "_new": set()}
        return {**vars(self), **empty, "_is_recording": False}

    def begin_call(self) -> None:
        """Called before a forward. Nodes of autograd's graph are numbered in the order in which they are made."""
        self._begin = torch._C._autograd._get_sequence_nr()

    def begin_record(self) -> None:
        """Called when the program goes on after a call: records its operations, if it will compute a loss."""
        if self._graphs and self._graphs[-1].is_followed is not None:
            self._is_recording = True
            self._operations.begin(with_inner=False)

    def end_record(self) -> bool:
        """Ends the record. Returns whether it has operations or numbers that no checked step of this model had."""
        if not self._is_recording:
            return False
        self._is_recording = False
        is_new = self._operations.end(True)
        if self._graphs and self._graphs[-1].is_followed:
            self._operations.learn()
        return is_new

    def note_new(self) -> None:
        """Notes that the program computes something new, after the latest call of this model or of another one."""
        if self._graphs and self._graphs[-1].is_followed is False and self._graphs[-1].batch > 1:
            self.check_next()

    def end_call(self, outputs: Outputs, batch: int, is_followed: bool | None) -> None:
        """Called when a call of the program is over.

        Args:
            outputs: its outputs with gradients.
            batch: the number of samples.
            is_followed: whether what the program computes from them is followed; None if it is too large for a check.
        """
        if outputs and all(x.grad_fn is not None for x, _ in outputs):
            places = [_number_of(x.grad_fn) for x, _ in outputs]
            end = max(torch._C._autograd._get_sequence_nr(), 1 + max(places))
            self._graphs.append(_Graph.of(self._begin, end, outputs, batch, is_followed))
            _follow_registrations(self)

    def add_inner(self, outputs: list[torch.Tensor]) -> "dict[int, InnerOutput]":
        """Returns a call's outputs from which other outputs are computed, by id. They cannot be replaced by aliases.

        The program may ask for the gradient that reaches them through the others: of an alias, which the others are
        not computed from, autograd has none.
        """
        found = {}
        for x in outputs:
            if x.grad_fn is not None and x.grad_fn in graph_nodes([each for each in outputs if each is not x]):
                found[id(x)] = InnerOutput(x)
        self._inner += found.values()
        return found

    def begin_backward(self, roots: Sequence[Root], gradients: Sequence[torch.Tensor | None]) -> list[Any]:
        """Called before a backward from these tensors. Returns handles of hooks, which are removed after it."""
        handles = []
        for node in graph_nodes(roots, stop_at_outputs=True) if self._inner else ():
            for each in self._inner:
                handles += each.follow(node)
        for each in self._inner:
            each.begin(roots, gradients)
        return handles

    def end_step(self) -> None:
        """Called when a step was checked: its loss is known from then on."""
        self._known |= self._new
        self.clear()

    def forget(self) -> None:
        """Called when a step is refused, or was a trial: its operations are not known."""
        self.clear()
        self._operations = OperationLog()

    def clear(self) -> None:
        """Forgets all calls, whose backward is over or does not count."""
        end_records()
        self._graphs.clear()
        self._inner.clear()
        self._new.clear()
        _watching.discard(self)
        if not _watching:
            _end_following()

    # --- the loss ---
    def batch(self) -> int:
        """Returns the number of samples of the last call."""
        return self._graphs[-1].batch if self._graphs else 0

    def graphs(self) -> list["_Graph"]:
        """Returns the graphs of the calls since the last step."""
        return self._graphs

    def is_known(self, graph: LossGraph) -> bool:
        """Returns whether a loss need not be checked."""
        if graph.beside:
            return False
        sequence = graph.sequence()
        if sequence in self._sequences:
            return True
        is_known = graph.patterns() <= self._known
        if is_known and len(self._sequences) < _MOST_SEQUENCES:
            self._sequences.add(sequence)
        return is_known

    def check_loss(self, graph: LossGraph, losses: Sequence[Any], given: Sequence[torch.Tensor | None]) -> None:
        """Checks the losses from which a backward is about to start.

        Args:
            graph: what is between them and outputs of models.
            losses: the tensors.
            given: their gradients.

        Raises:
            MemprofError: a loss reaches the model beside its outputs, or mixes samples.
            OutOfMemoryError: the second derivatives do not fit.
        """
        own = [each for each in self._graphs if any(each.has_output(edge) for edge, _ in graph.outputs)]
        edge = graph.gradient_beside(losses, given)
        if edge is not None and any(each.begin <= _number_of(edge.node) < each.end for each in self._graphs):
            self.bookkeeping.refusal.add(
                MemprofError(
                    f"a term of the loss reaches the model beside its outputs ({edge.node.name()}), through an "
                    "attribute, a list or a hook: return what the loss is computed from as outputs of the model; no "
                    "parameter was changed."
                )
            )
        patterns = graph.patterns()
        if not own or patterns <= self._known:
            return
        batch = own[-1].batch
        self._new |= patterns
        if batch < 2 or not all(each.is_followed is False for each in own):
            return
        try:
            is_mixing = graph.mixes(losses, given, batch, self._tried)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            self.bookkeeping.refusal.add(_without_derivatives(error))
            return
        self._tried += 1
        self.bookkeeping.loss_mixes |= is_mixing
        self.check_next()

    # --- hooks ---
    def watched(self, hook: Any, x: torch.Tensor | None) -> Any:
        """Returns what is registered instead of a hook: on a tensor or, without one, on a node that is not known."""
        if not callable(hook):
            return hook
        if x is not None and not any(each.is_inside(x) for each in self._graphs):
            places = [where for each in self._graphs for where in each.arrangements_of(x)]
            if not places and self is not _latest():
                return hook
            run = functools.partial(self._run_outside, hook, places[0] if places else PLAIN)
        else:
            run = functools.partial(self._run, hook, x is None)
        return functools.wraps(hook)(run)

    def _run(self, hook: Any, is_of_node: bool, *gradients: Any) -> Any:
        found, changed = _ran(hook, gradients)
        if changed and not is_backward_of_inputs():
            node = torch._C._current_autograd_node()
            is_input = len(gradients) == 1 and is_of_node
            if node is not None and any(each.has(_number_of(node), is_input) for each in self._graphs):
                self.bookkeeping.refusal.add(
                    MemprofError(
                        "a hook that the program has added between the model's call and backward() changes gradients "
                        f"inside of the model ({node.name()}), where no proof has seen it: add it in the model's "
                        "forward, to the tensor that it computes, or to the outputs of the model, if no other output "
                        "is computed from them."
                    )
                )
            elif is_of_node and self is _latest():
                self._check_outside(hook, PLAIN, gradients)
        return found

    def _run_outside(self, hook: Any, where: Arrangement | None, *gradients: Any) -> Any:
        found, changed = _ran(hook, gradients)
        if changed and where is not None and not is_backward_of_inputs():
            self._check_outside(hook, where, gradients)
        return found

    def _check_outside(self, hook: Any, where: Arrangement, gradients: Any) -> None:
        """Checks that what a hook makes of a sample's gradient of an output does not depend on those of others."""
        batch = self.batch()
        if batch < 2 or any(each.is_followed for each in self._graphs):
            return
        selected = halves(batch)
        self._tried += 1
        kept = torch.tensor(selected[self._tried % len(selected)])

        def given(by_sample: Callable[[torch.Tensor], torch.Tensor]) -> Any:
            return tree_map_only(torch.Tensor, lambda x: by_sample(x.detach()).clone(), gradients)

        def with_others(x: torch.Tensor) -> torch.Tensor:
            if where.rows(x, batch) is None:
                return x
            (rows,) = perturbed([where.by_sample(x, batch)], batch, kept, 0, self._tried)
            return as_output(rows, where, x)

        with unfollowed():
            own, other = given(lambda x: x), given(with_others)
            pairs = zip(tree_leaves(_result(hook, own)), tree_leaves(_result(hook, other)), strict=True)
            for a, b in pairs:
                if isinstance(a, torch.Tensor) and where.rows(a, batch) is not None:
                    x, y = (Rows.of(where.by_sample(each, batch)) for each in (a, b))
                    self.bookkeeping.loss_mixes |= far_apart(x, y, kept)


def _ran(hook: Any, gradients: Any) -> tuple[Any, bool]:
    """Runs a hook. Returns what it returns, and whether it changes gradients."""
    given = [x for x in tree_leaves(gradients) if isinstance(x, torch.Tensor)]
    versions = [x._version for x in given]
    found = hook(*gradients)
    changed = [x._version for x in given] != versions
    if found is not None:
        changed |= not all(map(is_, tree_leaves(found), tree_leaves(gradients[0])))
    return found, changed


def _result(hook: Any, gradients: Any) -> Any:
    """Returns the gradients that a hook makes of these."""
    found = hook(*gradients)
    return gradients[0] if found is None else found


def _without_derivatives(error: Exception) -> MemprofError:
    reason = str(error).strip().partition("\n")[0]
    return MemprofError(
        "the loss is computed by other operations than in the steps that were checked, and its second derivatives, by "
        f"which it is seen whether it mixes samples, cannot be computed ({type(error).__name__}: {reason}): compute it "
        "by the same operations from the first step on, or use check='always'."
    )


class InnerOutput:
    """An output of a call from which other outputs are computed, and the gradient that the program's own use gives it.

    Args:
        x: the output. Only its place in the graph is kept: hooks of the graph hold this object.
    """

    def __init__(self, x: torch.Tensor) -> None:
        node: Any = x.grad_fn
        node.metadata[OUTPUT] = True
        self._place = _number_of(node), x.output_nr
        self._end = torch._C._autograd._get_sequence_nr()
        self.gradient: torch.Tensor | None = None

    def begin(self, roots: Sequence[Root], gradients: Sequence[torch.Tensor | None]) -> None:
        """Begins a backward from these tensors, of which it may be one."""
        self.gradient = None
        for (node, nr), gradient in zip(map(edge_of, roots), gradients, strict=False):
            if node is not None and (_number_of(node), nr) == self._place:
                self._add(gradient)

    def follow(self, node: Any) -> list[Any]:
        """Adds the gradient that a node of the program's graph will give to it. Returns the handles of hooks."""
        if _number_of(node) < self._end:
            return []
        places = [i for i, (x, nr) in enumerate(node.next_functions) if x and (_number_of(x), nr) == self._place]
        return [node.register_hook(functools.partial(self._add_of, i)) for i in places]

    def _add_of(self, place: int, gradients: Sequence[torch.Tensor | None], _: Any) -> None:
        self._add(gradients[place])

    def _add(self, gradient: torch.Tensor | None) -> None:
        if gradient is not None:
            self.gradient = gradient if self.gradient is None else self.gradient + gradient

    def of_program(self, hook: Callable[[torch.Tensor], None]) -> Callable[[torch.Tensor], None]:
        """Returns a hook for the tensor that passes on what the program's own use of it gives, if it uses it."""

        def run(_: torch.Tensor) -> None:
            if self.gradient is not None:
                hook(self.gradient)

        return run


@dataclass
class _Graph:
    """The graph of a call.

    Attributes:
        begin, end: the range of its nodes' numbers.
        places: the numbers of its outputs' nodes.
        edges: the names of these nodes and the positions of samples, by the node's number and the output's there.
        outputs: the outputs, with the positions of samples.
        batch: the number of samples.
        is_followed: see `GraphHooks.end_call`.
    """

    begin: int
    end: int
    places: list[int]
    edges: dict[tuple[int, int], tuple[str, Arrangement | None]]
    outputs: list[tuple[weakref.ref[torch.Tensor], Arrangement | None]]
    batch: int
    is_followed: bool | None

    @classmethod
    def of(cls, begin: int, end: int, outputs: Outputs, batch: int, is_followed: bool | None) -> "_Graph":
        edges: dict[tuple[int, int], tuple[str, Arrangement | None]] = {}
        for x, where in outputs:
            base = x._base if x._is_view() else None  # an output that is written to is computed from it
            for each in (base, x) if base is not None and base.numel() == x.numel() else (x,):
                if (node := each.grad_fn) is not None:
                    edges[_number_of(node), each.output_nr] = node.name(), where
        places = [_number_of(x.grad_fn) for x, _ in outputs]
        return cls(begin, end, places, edges, [(weakref.ref(x), y) for x, y in outputs], batch, is_followed)

    def has(self, number: int, is_input: bool) -> bool:
        """Returns whether a node is in the graph, and its hook not behind the one output."""
        is_last = is_input and self.places == [number]
        return self.begin <= number < self.end and not is_last

    def has_output(self, edge: GradientEdge) -> bool:
        """Returns whether an edge leads to one of its outputs."""
        return (_number_of(edge.node), edge.output_nr) in self.edges

    def arrangements_of(self, x: torch.Tensor) -> list["Arrangement | None"]:
        """Returns the position of samples in an output, as a list; of another tensor, an empty one."""
        return [where for each, where in self.outputs if each() is x]

    def is_inside(self, x: torch.Tensor) -> bool:
        """Returns whether a tensor is in the graph, and not at its end."""
        if x.grad_fn is None or not self.begin <= _number_of(x.grad_fn) < self.end:
            return False
        outputs = [each() for each, _ in self.outputs]
        if not any(each is x for each in outputs):
            return True
        others = [each for each in outputs if each is not None and each is not x]
        return len(others) + 1 < len(outputs) or x.grad_fn in graph_nodes(others)


def _number_of(node: Any) -> int:
    return int(node._sequence_nr())


_watching: weakref.WeakSet[GraphHooks] = weakref.WeakSet()
_replaced: dict[tuple[Any, str], tuple[Any, Any]] = {}
"""What stands in torch's place, as (torch's own function, the one that stands for it), by owner and name."""


def _follow_registrations(owner: GraphHooks) -> None:
    """Makes hooks of the program, and backwards, known to the owners of graphs.

    Autograd's nodes register their hooks by `_register_hook`.
    """
    _watching.add(owner)
    if _replaced:
        return
    on_tensor: Any = torch.Tensor.register_hook
    on_node: Any = torch.autograd.Function._register_hook
    run: Any = torch.autograd._engine_run_backward  # type: ignore[attr-defined]

    @functools.wraps(on_tensor)
    def watched(self: torch.Tensor, hook: Any) -> Any:
        return on_tensor(self, _watched(hook, self))

    @functools.wraps(run)
    def watched_backward(roots: Sequence[Root], *args: Any, **kwargs: Any) -> Any:
        inputs, accumulates = args[3] if len(args) > 3 else None, bool(kwargs.get("accumulate_grad"))
        handles = _begin_backward(roots, args[0], inputs, accumulates=accumulates)
        try:
            return run(roots, *args, **kwargs)
        finally:
            for handle in handles:
                handle.remove()

    by_node = staticmethod(lambda hooks, hook: on_node(hooks, _watched(hook, None)))
    for place, name, own, other in (
        (torch.Tensor, "register_hook", on_tensor, watched),
        (torch.autograd, "_engine_run_backward", run, watched_backward),
        (torch.autograd.Function, "_register_hook", None, by_node),
    ):
        setattr(place, name, other)
        _replaced[place, name] = own, getattr(place, name)


def _end_following() -> None:
    if any(getattr(place, name) is not other for (place, name), (_, other) in _replaced.items()):
        return  # somebody else has replaced it since
    for (place, name), (own, _) in _replaced.items():
        if own is None:
            delattr(place, name)
        else:
            setattr(place, name, own)
    _replaced.clear()


def _begin_backward(roots: Sequence[Root], gradients: Any, inputs: Any, *, accumulates: bool) -> list[Any]:
    """Checks the losses of a backward that the program begins, and tells the models that wait for one.

    Returns:
        Handles of the hooks that these models need during it, to be removed after it.
    """
    if torch._C._current_graph_task_id() != -1:
        return []
    end_records()
    if accumulates and not inputs:
        _check_losses(roots, gradients)
    return [each for owner in _watching for each in owner.begin_backward(roots, gradients)]


def end_records() -> None:
    """Called before what the program does not compute itself: a call, a backward, a step.

    The model that was called last has the record. What is computed then can be of the outputs of any that waits.
    """
    owners = list(_watching)
    are_new = [owner.end_record() for owner in owners]
    if any(are_new):
        for owner in owners:
            owner.note_new()


def _check_losses(losses: Sequence[Any], given: Sequence[torch.Tensor | None]) -> None:
    """Checks the losses from which a backward is about to start, with all models that wait for one."""
    owners = list(_watching)
    graphs = [graph for owner in owners for graph in owner.graphs()]
    if not graphs or makes_no_values():
        return
    known: dict[tuple[int, int], tuple[str, Arrangement | None]] = {}
    for each in graphs:
        known |= each.edges
    batch = max(each.batch for each in graphs)
    graph = LossGraph.of(losses, batch, known, [(each.begin, each.end) for each in graphs])
    owners = [] if not graph.outputs and not graph.beside else [each for each in owners if not each.is_known(graph)]
    if owners:
        with unfollowed(), torch.enable_grad(), without_compiled_autograd():
            for owner in owners:
                owner.check_loss(graph, losses, given)


def _latest() -> GraphHooks | None:
    """Returns the owner of the last call, which checks what belongs to no call."""
    return max(_watching, key=lambda owner: max((each.end for each in owner.graphs()), default=-1), default=None)


def _watched(hook: Any, x: torch.Tensor | None) -> Any:
    if torch._C._current_graph_task_id() == -1 and not is_own(hook):
        for owner in _watching:
            hook = owner.watched(hook, x)
    return hook
