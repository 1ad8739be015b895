# SPDX-License-Identifier: Apache-2.0
"""The program that a proof is about, and how it is run: forwards and backwards that record what the layers get."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from opacus_memprof.clipping.forwards.repetition import close
from opacus_memprof.clipping.forwards.state import Arrangement, Difference, ModuleState, RandomState, restoring_state
from opacus_memprof.clipping.kernels.native import graph_patterns
from opacus_memprof.clipping.layer_hooks import LayerHooks
from opacus_memprof.clipping.layers import Layer
from opacus_memprof.clipping.proof.batches import GENTLE, cached_tensors, cotangents, perturbed, tensors_in
from opacus_memprof.clipping.proof.recorder import ManyRecorder, MixingError, RowRecorder, Run
from opacus_memprof.clipping.proof.summary import Rows
from opacus_memprof.clipping.workspace import Workspace
from opacus_memprof.errors import MemprofError

_Recorded = TypeVar("_Recorded")


@dataclass
class Program:
    """The program that is proved.

    Attributes:
        module: the module that is called.
        run: calls it, with the hooks of layers.
        hooks: the hooks of the layers.
        args, kwargs: its arguments.
        batch: the number of samples.
        drawn: the number of samples for which gradients of outputs are drawn; larger than `batch` for a part of a
            batch.
        random: the initial state of the random number generators.
        arrangements: the position of samples in the output's tensors.
        trained: names of the trained parameters.
        leaves_caches_out: whether tensors in caches of keys and values get no gradients, as a loss that uses them is
            refused.
        computed_in: the coarsest dtype in which the module computes; None if that is the tensors' own.
        places: for a part of a batch, which of its samples it has, in order; None for the first.
    """

    module: nn.Module
    run: Callable[[tuple[Any, ...], dict[str, Any]], Any]
    hooks: LayerHooks
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    batch: int
    drawn: int
    random: RandomState
    arrangements: list[Arrangement | None]
    trained: dict[nn.Parameter, str]
    leaves_caches_out: bool = False
    computed_in: torch.dtype | None = None
    places: list[int] | None = None

    def leaves(self) -> tuple[list[Any], Any]:
        """Returns the arguments, flattened, and their structure."""
        return tree_flatten((self.args, self.kwargs))

    def is_on_cuda(self) -> bool:
        """Returns whether it trains parameters on a GPU."""
        return any(parameter.is_cuda for parameter in self.trained)


def saved_buffers(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the buffers that a checkpoint of the module has, with their names."""
    for path, owner in module.named_modules():
        for name, buffer in owner.named_buffers(recurse=False):
            if name not in owner._non_persistent_buffers_set:
                yield f"{path}.{name}" if path else name, buffer


def _copied(leaf: Any) -> Any:
    """Returns a leaf of the arguments for one forward, which may write to it."""
    return leaf.detach().clone().requires_grad_(leaf.requires_grad) if isinstance(leaf, torch.Tensor) else leaf


class ProgramRuns:
    """Runs a program, with its own samples or with others instead of some of them, and records what its layers get.

    Args:
        program: the model's forward and its arguments.
        workspace: limit on the temporaries of a layer.

    Attributes:
        trace: the layers that a forward has called, in order.
        patterns: the patterns of its graph; see `graph_patterns`.
        changes_state: whether a forward has changed the module's buffers or attributes.
    """

    def __init__(self, program: Program, workspace: Workspace) -> None:
        self.program, self.workspace = program, workspace
        self.trace: list[Layer | None] = []
        self.patterns: list[int] = []
        self.changes_state = False
        self._given: list[Any] = []  # the arguments of the last forward
        self._tensors: list[torch.Tensor] = []  # its outputs that have gradients, those in caches included

    def run_with_others(
        self,
        run: Callable[[list[Any], Any, torch.Tensor, bool], _Recorded],
        leaves: list[Any],
        structure: Any,
        kept: torch.Tensor,
        variant: int,
        seed: int,
        shared: bool,
    ) -> _Recorded:
        """Runs the program with other values for the samples that are not kept."""
        for kind in (variant, *GENTLE):
            new = perturbed(leaves, self.program.batch, kept, kind, seed)
            try:
                return run(new, structure, kept, shared)
            except (MemprofError, torch.OutOfMemoryError):
                raise
            except Exception:
                if kind == GENTLE[-1]:
                    raise
        raise AssertionError

    def backward(self, leaves: list[Any], structure: Any, kept: torch.Tensor, shared: bool) -> Run:
        """Runs a forward and a backward, and returns what the layers got of each sample.

        Args:
            leaves: the arguments, flattened.
            structure: their structure.
            kept: which samples keep their values, [B]; the outputs of the others get no gradients.
            shared: whether outputs that all samples share get gradients.
        """
        computed_in = self.program.computed_in
        recorder = RowRecorder(self.workspace, computed_in)
        with self.running(recorder) as trace:
            outputs, arrangements = self.outputs(leaves, structure)
            trace = list(trace)  # backward adds layers that checkpoints run again
            patterns = self._patterns()
            batch, random = self.program.batch, self.program.random
            end = random.later()
            draws, draws_outside = not random.is_same(end), not random.is_same_outside_torch(end)
            known = [w.by_sample(o, batch) for o, w in zip(outputs, arrangements, strict=True) if w is not None]
            rows = [Rows.of(x, computed_in) for x in known]
            drawn, places = self.program.drawn, self.program.places
            given = cotangents(outputs, arrangements, drawn, kept.to(torch.float64), shared, places)
            torch.autograd.backward(outputs, given)
        return Run(batch, rows, None in arrangements, shared, draws, draws_outside, end, recorder, trace, patterns)

    def record(self, leaves: list[Any], structure: Any, kept: torch.Tensor, shared: bool) -> ManyRecorder:
        """Does the same as `backward`, with a recorder for many samples."""
        batch = self.program.batch
        recorder = ManyRecorder(self.workspace, batch, self.program.computed_in)
        with self.running(recorder):
            outputs, arrangements = self.outputs(leaves, structure)
            for output, where in zip(outputs, arrangements, strict=True):
                if where is not None:
                    recorder.note(None, "output", where.by_sample(output, batch))
            given = cotangents(outputs, arrangements, self.program.drawn, kept.to(torch.float64), shared)
            torch.autograd.backward(outputs, given)
        return recorder

    def _patterns(self) -> list[int]:
        inputs = [leaf for leaf in self._given if isinstance(leaf, torch.Tensor)]
        return graph_patterns(self._tensors, inputs, self.program.batch)

    def outputs(self, leaves: list[Any], structure: Any) -> tuple[list[torch.Tensor], list[Arrangement | None]]:
        """Runs a forward, and returns the tensors of its output that have gradients, and where their samples are.

        Raises:
            MixingError: the number of tensors is not that of the first forward.
        """
        self._given = [_copied(leaf) for leaf in leaves]
        args, kwargs = tree_unflatten(self._given, structure)
        output = self.program.run(args, kwargs)
        tensors = tensors_in(output)
        if len(tensors) != len(self.program.arrangements):
            raise MixingError(
                "the number of tensors that the model returns depends on its inputs, so that it cannot be seen which "
                "sample they belong to: return the same outputs for every batch."
            )
        pairs = [
            (o, w)
            for o, w in zip(tensors, self.program.arrangements, strict=True)
            if o.requires_grad and (o.is_floating_point() or o.is_complex())
        ]
        self._tensors = [o for o, _ in pairs]
        if self.program.leaves_caches_out:
            cached = set(map(id, cached_tensors(output)))
            pairs = [(o, w) for o, w in pairs if id(o) not in cached]
        return [o for o, _ in pairs], [w for _, w in pairs]

    @contextmanager
    def running(self, bookkeeping: Any) -> Iterator[list[Layer | None]]:
        """Inside of the context, layers report to this bookkeeping. Restores the program's state at its end.

        Yields:
            The layers that forwards inside of it call, in order.
        """
        hooks, program = self.program.hooks, self.program
        before = hooks.bookkeeping, hooks.batch, hooks.trace
        hooks.bookkeeping, hooks.batch, hooks.trace = bookkeeping, program.batch, []
        try:
            with program.random.restored(), restoring_state(program.module) as state, torch.enable_grad():
                yield hooks.trace
                self.changes_state = self.changes_state or state.has_changed()
        finally:
            hooks.called.update(hooks.trace)
            hooks.bookkeeping, hooks.batch, hooks.trace = before
            self._tensors = []  # releases the graph

    def follow(self) -> None:
        """Runs a forward to record the order of layer calls and the patterns of its graph."""
        leaves, structure = self.program.leaves()
        with self.running(RowRecorder(self.workspace)) as trace:
            self.outputs(leaves, structure)
            self.trace, self.patterns = list(trace), self._patterns()


class LeftByCalls:
    """What calls without gradients have left in a model, such as statistics of their samples, and who reads it.

    Args:
        model: the model.
        hooks: the hooks of its layers.
        run: calls a module with arguments, without the hooks of a call of the program.
    """

    def __init__(self, model: nn.Module, hooks: LayerHooks, run: Callable[..., Any]) -> None:
        self.model, self.hooks, self.run = model, hooks, run
        self._before: tuple[ModuleState, RandomState] | None = None
        self._left: list[Difference] = []

    def begin(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Called before a call without gradients."""
        tensors = [x for x in tree_flatten((args, kwargs))[0] if isinstance(x, torch.Tensor)]
        self._before = ModuleState(self.model), RandomState.now(*{x.device for x in tensors})

    def end(self, entry: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], batch: int) -> None:
        """Called after it. Where it has changed the model, it runs again on other samples, for what these leave."""
        before, self._before = self._before, None
        if before is None or not before[0].has_changed():
            return
        leaves, structure = tree_flatten((args, kwargs))
        kept, after = torch.zeros(batch, dtype=torch.bool), ModuleState(self.model)
        self._left = []
        for kind in (0, *GENTLE):
            before[0].restore()
            try:
                others = tree_unflatten(perturbed(leaves, batch, kept, kind, 0), structure)
                with self.hooks.off(), before[1].restored():
                    self.run(entry, *others)
                self._left = after.differences()
                return
            except Exception:  # not for these samples
                continue
            finally:
                after.restore()

    def check(self, entry: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], others: list[Difference]) -> None:
        """Checks that a call with gradients does not read it.

        Args:
            entry: the module that is called.
            args: its positional arguments.
            kwargs: its keyword arguments.
            others: what else depends on samples of earlier calls, with the values for others.

        Raises:
            MemprofError: it does.
        """
        left, self._left = [each for each in self._left if each.is_as_then()], []
        for found, whose in ((left, "a call without gradients has"), (others, "earlier calls have")):
            if not found:
                continue
            leaves, structure = tree_flatten((args, kwargs))
            random = RandomState.now(*{x.device for x in leaves if isinstance(x, torch.Tensor)})
            outputs: list[list[torch.Tensor]] = []
            try:
                for changes in ([], found):
                    with restoring_state(self.model), _applied(changes), self.hooks.off(), random.restored():
                        given = tree_unflatten(list(map(_copied, leaves)), structure)
                        outputs.append([x.detach() for x in tensors_in(self.run(entry, *given))])
            except Exception:  # not with these values
                continue
            if len(outputs[0]) != len(outputs[1]) or not all(map(close, *outputs)):
                buffers = {id(x): name for name, x in self.model.named_buffers()}
                names = {buffers.get(id(each.holder), each.key) for each in found} - {None}
                raise MemprofError(
                    f"the model reads what {whose} computed from samples and left in it"
                    f"{' (' + ', '.join(sorted(map(str, names))[:3]) + ')' if names else ''}, such as statistics of a "
                    "batch: these samples change the gradients of others, which no clipping bounds. Compute it from "
                    "public data, or do not change it while the model is trained: call eval() before."
                )


@contextmanager
def _applied(changes: list[Difference]) -> Iterator[None]:
    for each in changes:
        each.apply()
    try:
        yield
    finally:
        for each in changes:
            each.undo()
