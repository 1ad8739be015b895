# SPDX-License-Identifier: Apache-2.0
"""Proves the calls of a model: finds the situation of each call, and whether it is new or due for another proof."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from opacus_memprof.clipping.arguments import Check, is_checked, is_explained
from opacus_memprof.clipping.bookkeeping import Bookkeeping
from opacus_memprof.clipping.forwards.state import ModuleState, RandomState, restoring_state
from opacus_memprof.clipping.kernels import native
from opacus_memprof.clipping.layer_hooks import LayerHooks, first_input
from opacus_memprof.clipping.layers import GenericLayer
from opacus_memprof.clipping.layers.registry import (
    LayerRegistry,
    check_model,
    refuse_cached_parameters,
    refuse_context_parallel,
)
from opacus_memprof.clipping.module.calls import Call, batch_size
from opacus_memprof.clipping.proof.batches import is_compiled, leaves_of_call, tensors_in, tensors_of_call
from opacus_memprof.clipping.proof.certificate import Certificate, Description
from opacus_memprof.clipping.proof.explanation import RecordedForward
from opacus_memprof.clipping.proof.model_state import ModelState, context_key, saved_tensors_hooks, size_class
from opacus_memprof.clipping.proof.probe import CannotRunError
from opacus_memprof.clipping.proof.program import LeftByCalls
from opacus_memprof.clipping.proof.situations import JointProofs, Order, Situation, Situations, order_of
from opacus_memprof.errors import MemprofError

_CHANGES_EACH_TIME = (
    "the model calls its layers in another order each time, or computes its output by other operations, also from the "
    "same random numbers, so that its clipping cannot be proved: make what it computes depend on torch's, NumPy's or "
    "Python's random numbers alone."
)


class CallProofs:
    """The proofs of a model's calls.

    Args:
        registry: the layers of the model.
        hooks: the hooks of the layers.
        bookkeeping: the tensors that backward keeps.
        certificate: the record of all proofs.
        check: how often a situation is checked.
        run: calls a module with arguments, with the hooks of layers.
        attach: adds hooks to modules that have become layers.

    Attributes:
        joint: proofs that all ranks run together, under FSDP2; otherwise None.
        last_situation: the situation of the last call.
    """

    def __init__(
        self,
        registry: LayerRegistry,
        hooks: LayerHooks,
        bookkeeping: Bookkeeping,
        certificate: Certificate,
        check: Check,
        run: Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], Any],
        attach: Callable[[], None],
    ) -> None:
        self.hooks, self.bookkeeping, self.certificate = hooks, bookkeeping, certificate
        self.run, self.attach = run, attach
        self.joint = JointProofs(registry.model) if registry.is_sharded else None
        self.last_situation: Situation | None = None
        self.follow(registry, check)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_state"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._state = ModelState(nn.Module())  # of no model: the copy of a model is followed at its first call

    def follow(self, registry: LayerRegistry, check: Check) -> None:
        """Starts again with the layers of a model. Forgets all situations."""
        self.registry = registry
        self.hooks.layouts, self.hooks.plain = {}, {}  # an empty batch, which proves nothing, would find earlier layers
        self._state = ModelState(registry.model)
        self._checked_backward = -1  # its number in this process; -1 also where compiled autograd runs
        self.left = LeftByCalls(registry.model, self.hooks, self.run)
        self._structure: tuple[Any, ...]
        self._modes: tuple[Any, ...]
        self._structure, self._modes = self.modes()
        trained = registry.parameter_names()
        agreement = None if self.joint is None else self.joint.agreement
        self.situations = Situations(
            registry, self.hooks, self.bookkeeping.workspace, check, self.run, self.attach, trained, agreement
        )

    def modes(self) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """Returns the model's structure, and its modes, hooks, replaced forwards and attributes."""
        return self._state.structure(), self._state.modes()

    def has_new_structure(self) -> bool:
        """Returns whether the model's layers or trained parameters have changed since `follow`."""
        return self._state.structure() != self._structure

    def check_layers(self) -> None:
        """Checks that the model has the layers and parameters of its last forward, when a backward begins.

        Called for each output that a backward reaches, and checks once. Under FSDP2, which exchanges parameters
        meanwhile, it does nothing.

        Raises:
            MemprofError: a layer or a parameter was added, removed or replaced.
        """
        backward = torch._C._current_graph_task_id()
        if self.joint is not None or backward == self._checked_backward != -1:
            return
        self._checked_backward = backward
        if self._state.structure()[:3] != self._structure[:3]:
            raise MemprofError(
                "a layer or a parameter of the model was added, removed or replaced between its forward and "
                "backward(), so that it is not known whose gradient is whose: replace it before the forward or "
                "after optimizer.step()."
            )

    def is_frozen(self) -> bool:
        """Returns whether no parameter of the model is trained, as while its input or another model is optimized."""
        known = next(iter(self.situations.trained), None)
        if known is not None and known.requires_grad:
            return False
        return not any(parameter.requires_grad for parameter in self.registry.model.parameters())

    def follow_modes(self) -> bool:
        """Returns whether the model's modes, hooks or attributes have changed, so that another proof is needed.

        Raises:
            MemprofError: the model cannot be clipped exactly any more.
        """
        modes = self._state.modes()
        if modes == self._modes:
            return False
        check_model(self.registry.model)
        self._modes = modes
        return True

    def held(self) -> tuple[list[torch.Tensor], list[tuple[dict[str, Any], str]]]:
        """Returns the tensors and numbers that the model may read beside its parameters and arguments."""
        return self._state.held_tensors(), self._state.held_numbers()

    def settle(self) -> None:
        """Ends a forward; see `ModelState.settle`."""
        self._state.settle()

    def prepare(self, call: Call, error: MemprofError | None) -> None:
        """Finds the situation of a call, and proves it if it is new or due.

        Args:
            call: the call, whose situation is set.
            error: under FSDP2, the error that this rank has raised; all ranks must learn of it.

        Raises:
            MemprofError: clipping would not be exact.
        """
        refuse_cached_parameters(self.registry.model)
        hooks, batch, random = self.hooks, self.hooks.batch, call.random
        signature = self.situations.arguments.signature(call.args, call.kwargs, batch)
        call.key = call.entry, self._modes, signature, size_class(batch), context_key(call.modes, ("cpu", "cuda"))
        is_new = call.key not in self.situations.known
        given = tensors_of_call(call.args, call.kwargs)
        try:
            if self.joint is not None:
                self._prove_on_all_ranks(call, self.joint, (signature, size_class(batch)), error)
            elif call.key not in self.situations.known and batch and random is not None:
                self.situations.known[call.key] = self._prove(call.entry, call.args, call.kwargs, random)
                call.is_proved = True
        except CannotRunError as cause:  # raised after the forward, which may fail for the same reason
            call.cannot_run = cause.__cause__ or cause
        finally:
            hooks.batch = batch
        if [*map(id, given)] != [*map(id, tensors_of_call(call.args, call.kwargs))]:
            self.situations.known.pop(call.key, None)
            raise MemprofError(
                f"{type(call.entry).__name__} writes tensors into an object among its arguments, such as a cache, "
                "which cannot be proved to have no data of other samples: pass tensors to the model, and return new "
                "ones."
            )
        known = self.situations.known.get(call.key)
        if known is None:
            if self.bookkeeping.is_captured and batch:
                raise MemprofError(
                    "compute_loss runs the model in another way than before its capture in a CUDA graph, and nothing "
                    "can be proved while it is captured: run the model in the same way each time."
                )
            return
        if not all(each.is_empty() for each in known.emptied):
            names = ", ".join(sorted({str(each.key) for each in known.emptied if not each.is_empty()}))
            raise MemprofError(
                f"the model's forward reads what an earlier one has left in it ({names}), unless the program sets it "
                "to None before, as it did when this was proved: do so before each call of the model, also where a "
                "step has several, or pass what is carried on as an argument."
            )
        known.forwards += bool(batch)
        if known.record is None:
            self._certify(call, known)
        if known.record is not None and batch:
            known.record.begin_forward(batch)
            if is_new:
                self._note_proof(known)
        if batch and random is not None and self._is_explained(call, known.forwards):
            call.record = RecordedForward.begin(call.entry, call.args, call.kwargs, batch, random)
        is_due = known.forwards > 1 and batch and is_checked(self.situations.check, known.forwards)
        if is_due and random is not None and self.joint is None:
            before = known
            try:
                known = self.situations.recheck(call.key, call.entry, call.args, call.kwargs, random)
            except CannotRunError as cause:
                call.cannot_run = cause.__cause__ or cause
                return
            call.is_proved |= known is not before
        if not known.is_finite:
            self.situations.known.pop(call.key, None)
        call.situation = self.last_situation = known
        hooks.layouts, hooks.plain = known.layouts, known.plain

    def _certify(self, call: Call, situation: Situation) -> None:
        """Adds a proved situation to the certificate."""
        units, batch = self.registry, batch_size(call.args, call.kwargs)
        description = Description.of(
            units.model, call.entry, call.args, call.kwargs, batch, units.layers(), self.situations.trained
        )
        situation.record = self.certificate.situation(description)

    def _note_proof(self, situation: Situation) -> None:
        """Records in the certificate that a situation was proved on all samples of the current forward."""
        if situation.record is not None and self.situations.check != "off":
            situation.record.note("mixing", situation.share)
            if not self.registry.is_sharded:
                situation.record.note("sums", situation.share)

    def _prove(self, entry: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], random: RandomState) -> Situation:
        refuse_context_parallel()
        for layer in self.registry.at.get(entry, ()):
            if not isinstance(layer, GenericLayer):
                layer.check_input(first_input(layer, args, kwargs)[1])
        return self.situations.prove(entry, args, kwargs, random)

    def _prove_on_all_ranks(
        self, call: Call, shared: JointProofs, description: object, error: MemprofError | None
    ) -> None:
        """Runs a proof on all ranks, with the same samples, if any rank needs one for its situation."""
        hooks, batch, is_checked_again = self.hooks, self.hooks.batch, False
        while True:
            known = self.situations.known.get(call.key)
            need = 2 * bool(batch) if known is None else 0
            if known is not None and batch and not is_checked_again:
                need = int(is_checked(self.situations.check, known.forwards + 1) and known.forwards > 0)
            trained = self.situations.trained.values()
            next_proof = shared.next(call.args, call.kwargs, batch, description, trained, need, call.random, error)
            if next_proof is None:
                return
            hooks.batch = next_proof.batch
            new = self._prove(call.entry, next_proof.args, next_proof.kwargs, next_proof.random)
            hooks.batch = batch
            is_checked_again |= not next_proof.is_new
            if next_proof.is_new and next_proof.is_own:
                self.situations.known[call.key] = new
                call.is_proved = True

    def _is_explained(self, call: Call, forward: int) -> bool:
        check = self.situations.check
        if self.registry.is_sharded or check == "off":
            return False
        # A mode, or hooks of saved tensors, may change what they do in each step; torch's own give tensors back.
        hooks = saved_tensors_hooks()
        is_own = hooks is not None and not str(getattr(hooks[0], "__module__", "")).startswith("torch.")
        return is_explained(check, forward) or bool(call.modes) or is_own

    def begin_forward(self, call: Call) -> None:
        """Begins to record the operations of a call. Not under FSDP2, where all ranks must prove the same forward."""
        situation = call.situation
        if situation is None or not self.hooks.batch or self.situations.check == "off" or self.joint is not None:
            return
        if situation.changes_state and call.state is None:
            call.state = ModuleState(call.entry)
        call.operations = situation.operations
        call.operations.begin()

    def end_forward(self, call: Call) -> None:
        """Ends the record, also where the forward has raised an error."""
        if call.operations is not None and call.situation is not None:
            call.has_new_operations = call.operations.end(not call.situation.draws)

    def is_unproved(self, call: Call, situation: Situation, output: Any) -> bool:
        """Returns whether the forward used an order of layers, operations or numbers that no proof covers.

        The cause of the difference, such as a global variable, need not be known.
        """
        hooks = self.hooks
        if not hooks.batch or self.situations.check == "off":
            return False
        if call.has_new_operations and not call.is_proved:
            return True
        return order_of(hooks.trace) not in situation.traces or self._has_new_patterns(call, situation, output)

    def _has_new_patterns(self, call: Call, situation: Situation, output: Any) -> bool:
        outputs = [x for x in tensors_in(output) if x.requires_grad]
        inputs = [x for x in leaves_of_call(call.args, call.kwargs) if isinstance(x, torch.Tensor)]
        patterns = native.graph_patterns(outputs, inputs, self.hooks.batch)
        if situation.patterns.issuperset(patterns):
            return False
        if call.is_proved and is_compiled(outputs):  # proofs run uncompiled, with other operations
            situation.patterns.update(patterns)
            return False
        return True

    def prove_order_on_all_ranks(self, call: Call, random: RandomState, output: Any) -> None:
        """Proves on all ranks what a forward on one of them has done in a new order or by new operations (FSDP2).

        All ranks call it after each forward.

        Raises:
            MemprofError: clipping would not be exact, or a layer would have to be followed in another way.
        """
        assert self.joint is not None
        hooks, situation = self.hooks, call.situation
        if self.situations.check == "off":
            return
        batch, order = hooks.batch, order_of(hooks.trace)
        is_new = situation is not None and self.is_unproved(call, situation, output)
        description = call.key[2:4], [(layer and layer.describe(), once) for layer, once in order]
        error: MemprofError | None = None
        while True:
            need = 2 * is_new
            trained = self.situations.trained.values()
            next_proof = self.joint.next(call.args, call.kwargs, batch, description, trained, need, random, error)
            if next_proof is None:
                break
            hooks.batch = next_proof.batch
            new = self._prove(call.entry, next_proof.args, next_proof.kwargs, next_proof.random)
            hooks.batch = batch
            if situation is None or not (is_new and next_proof.is_own):
                continue
            is_new, call.is_proved = False, True
            if any(situation.layouts.get(layer) != layout for layer, layout in new.layouts.items()):
                error = MemprofError(
                    "the model calls its layers in a new order, in which they have their samples elsewhere, which "
                    "flash_clip cannot follow under FSDP2: make what it computes depend on its arguments and modes "
                    "alone."
                )
            elif order not in new.traces or self._has_new_patterns(call, new, output):
                error = MemprofError(_CHANGES_EACH_TIME)
            else:
                self._add_order(situation, order, new)
        if situation is not None:
            hooks.layouts, hooks.plain = situation.layouts, situation.plain

    def prove_order(self, call: Call, situation: Situation, random: RandomState) -> Any:
        """Proves a forward that has called its layers in a new order, or computed its output by new operations.

        The forward is then run again, and only what that run does is known from then on: what a forward does once, as
        by a counter outside of the model, the proof may not have seen.

        Returns:
            The output of the forward that was run again, with the same random numbers.

        Raises:
            MemprofError: clipping would not be exact, or the order changes from call to call.
        """
        hooks, situations = self.hooks, self.situations
        try:
            if call.state is not None:
                call.state.restore()
            new = situations.prove(call.entry, call.args, call.kwargs, random)
            is_same = situations.known.get(call.key) is situation and all(
                situation.layouts.get(layer) == layout for layer, layout in new.layouts.items()
            )
            versions = _versions(call)
            with random.restored(), restoring_state(call.entry) if call.state is None else nullcontext():
                hooks.layouts, hooks.plain = new.layouts, new.plain
                hooks.trace, hooks.kept_bytes = [], 0
                call.situation = situation if is_same else new
                self.begin_forward(call)
                try:
                    output = self.run(call.entry, call.args, call.kwargs)
                finally:
                    self.end_forward(call)
        except CannotRunError as error:
            raise MemprofError(
                "the model has called its layers in a new order, and cannot run on other samples in it "
                f"({error.__cause__ or error})."
            ) from error
        if versions != _versions(call):
            raise MemprofError(
                "the model writes to its inputs and has run other operations than before, which cannot be proved: "
                "clone the inputs before the model writes to them."
            )
        call.is_proved = True
        order = order_of(hooks.trace)
        if order not in new.traces or self._has_new_patterns(call, new, output):
            raise MemprofError(_CHANGES_EACH_TIME)
        if is_same:
            self._add_order(situation, order, new)
            hooks.layouts, hooks.plain = situation.layouts, situation.plain
        else:
            situations.known[call.key] = call.situation = new
            self._certify(call, new)
            if new.record is not None:
                new.record.begin_forward(hooks.batch)
                self._note_proof(new)
        return output

    def _add_order(self, situation: Situation, order: Order, proof: Situation) -> None:
        """Adds to a situation an order of layer calls, and operations, that a proof has seen."""
        if order not in situation.traces:
            situation.traces.append(order)
        situation.patterns |= proof.patterns
        situation.emptied += proof.emptied
        if situation.record is not None:
            situation.record.orders += 1
            self._note_proof(situation)


def _versions(call: Call) -> list[int]:
    """Returns how often each tensor in the call's arguments was written to."""
    leaves = leaves_of_call(call.args, call.kwargs)
    return [leaf._version for leaf in leaves if isinstance(leaf, torch.Tensor) and not leaf.is_inference()]
