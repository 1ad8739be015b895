# SPDX-License-Identifier: Apache-2.0
"""The GradSampleModule and the GradSampleHooks of grad_sample_mode="flash_clip"."""

from __future__ import annotations

import functools
import sys
import weakref
from dataclasses import dataclass
from types import MethodType
from typing import Any, Literal

import torch
from opacus.grad_sample.gsm_base import AbstractGradSampleHooks, AbstractGradSampleModule
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.hooks import RemovableHandle

from opacus_memprof.clipping.arguments import CHECKS, Check
from opacus_memprof.clipping.arrangement import PLAIN, Arrangement
from opacus_memprof.clipping.autograd_functions import (
    TwoPassBackward,
    is_compiled_autograd_enabled,
    run_two_passes,
)
from opacus_memprof.clipping.bookkeeping import Bookkeeping, Nonfinite
from opacus_memprof.clipping.cost import DEFAULT_WORKSPACE_MB
from opacus_memprof.clipping.kernels.workspace import Workspace
from opacus_memprof.clipping.layer_hooks import LayerHooks, first_input
from opacus_memprof.clipping.layers import GenericLayer
from opacus_memprof.clipping.module_state import restoring_state
from opacus_memprof.clipping.owners import remember_owner
from opacus_memprof.clipping.parallel.agreement import inner_model, let_reducer_run
from opacus_memprof.clipping.parallel.fsdp_model import SharedSamples, refuse_context_parallel
from opacus_memprof.clipping.proof.certificate import Certificate, Description
from opacus_memprof.clipping.proof.contexts import without_compiled_autograd, without_saved_tensors_hooks
from opacus_memprof.clipping.proof.explanation import RecordedForward, check_explained
from opacus_memprof.clipping.proof.hooks_of_users import run_hooks, run_pre_hooks
from opacus_memprof.clipping.proof.model_state import ModelState, autocast_key, size_class
from opacus_memprof.clipping.proof.outputs import alias_leaves, tensors_in
from opacus_memprof.clipping.proof.probe import CannotRunError
from opacus_memprof.clipping.proof.schedule import is_checked
from opacus_memprof.clipping.proof.situations import Situation, Situations, order_of
from opacus_memprof.clipping.repetition import RandomState, is_repeating
from opacus_memprof.clipping.rules import Clipping, ClipRule
from opacus_memprof.clipping.units import Units
from opacus_memprof.clipping.validate import check_model, refuse_capture
from opacus_memprof.errors import MemprofError

Passes = Literal["auto", 1, 2]


@dataclass
class _Call:
    """A call of the model, or of a part of it, by the program.

    Attributes:
        entry: the module that is called.
        args, kwargs: what it is called with.
        is_off: whether nothing is followed: without gradients, or in eval mode.
        depth: how often the module is running, as one that calls itself is.
        random: what the random number generators began with; None while a CUDA graph is captured.
        key: of the situation.
        situation: the situation.
        cannot_run: why the module cannot run on other samples.
        record: what is needed to repeat the forward, if its step is going to be explained.
    """

    entry: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    is_off: bool
    depth: int = 1
    random: RandomState | None = None
    key: Any = None
    situation: Situation | None = None
    cannot_run: BaseException | None = None
    record: RecordedForward | None = None


class FlashClipHooks(AbstractGradSampleHooks):  # type: ignore[misc]
    """The hooks of flash_clip on a model, without a wrapper around it.

    While a trainable layer runs, its parameters do not require grad, so that autograd forms no weight gradients, which
    differential privacy could not use. A node on the layer's output (``tap_gradient``) passes on what is needed.

    Args:
        m: the model.
        batch_first: must be True.
        loss_reduction: "mean" or "sum", of the loss over the batch.
        strict: for compatibility with Opacus; unsupported layers are always refused.
        max_grad_norm: the bound of a sample's gradient, or one for each parameter; see ClipRule.
        clipping: how the bound is applied; see ClipRule.
        workspace_mb: ceiling, in MiB, on the temporaries of one layer's norm or clipped sum.
        passes: 1 keeps what the clipped sums need during a single backward; 2 keeps nothing, and runs backward through
            the model twice; "auto" is 1 unless what it keeps would not fit in device memory.
        check: when it is proved that clipping is exact: "first" in each situation, "sometimes" again (2nd, 4th, 8th, …
            forward), "always" or "off".
        nonfinite: what a sample does whose gradient norm is not finite (NaN, infinity, overflow). "refuse": the step
            raises MemprofError, which depends on the data. "drop": the sample adds nothing to the sum, as if its
            gradient were zero; see DPOptimizerFlashClip.dropped_samples. On CUDA the host then waits for the norms.

    Raises:
        MemprofError: the model or an argument is not supported.
    """

    def __init__(
        self,
        m: nn.Module,
        *,
        batch_first: bool = True,
        loss_reduction: str = "mean",
        strict: bool = True,
        max_grad_norm: float | list[float] = 1.0,
        clipping: Clipping = "flat",
        workspace_mb: float = DEFAULT_WORKSPACE_MB,
        passes: Passes = "auto",
        check: Check = "sometimes",
        nonfinite: Nonfinite = "refuse",
    ) -> None:
        if not batch_first:
            raise MemprofError("flash_clip needs batch_first=True: transpose the inputs so that the batch comes first.")
        if loss_reduction not in ("mean", "sum"):
            raise MemprofError(f"loss_reduction is {loss_reduction!r}; it must be 'mean' or 'sum'.")
        if passes not in ("auto", 1, 2):
            raise MemprofError(f"flash_clip_passes is {passes!r}; it must be 'auto', 1 or 2.")
        if check not in CHECKS:
            raise MemprofError(f"check is {check!r}; it must be one of {', '.join(map(repr, CHECKS))}.")
        if nonfinite not in ("refuse", "drop"):
            raise MemprofError(f"flash_clip_nonfinite is {nonfinite!r}; it must be 'refuse' or 'drop'.")
        rule = ClipRule(clipping, max_grad_norm)
        if passes == 2 and rule.by_parameter:
            raise MemprofError("flash_clip_passes=2 finds one clip factor for all parameters; use 1 with 'per_layer'.")
        bookkeeping = Bookkeeping(rule, loss_reduction, Workspace.from_mib(workspace_mb), nonfinite)
        units = Units(inner_model(m))
        if units.is_sharded and passes == 2:
            raise MemprofError("flash_clip_passes=2 runs backward twice, which FSDP2 does not expect; use 1.")
        super().__init__(m, batch_first=batch_first, loss_reduction=loss_reduction)
        self.bookkeeping = bookkeeping
        self.passes: Passes = 1 if rule.by_parameter or units.is_sharded else passes
        self._shared_samples = SharedSamples(units.model) if units.is_sharded else None
        self.units = units
        self.certificate = Certificate("flash_clip", units.model, check, nonfinite)
        self.layer_hooks = LayerHooks(bookkeeping)
        self.hooks_enabled = True
        self._entries: dict[nn.Module, tuple[int, int]] = {}  # the hooks of what the program may call, by their ids
        self._taps: dict[nn.Module, int] = {}
        self._watched: dict[int, RemovableHandle] = {}  # by id of the parameter
        self._call: _Call | None = None
        self.last_situation: Situation | None = None
        self._records: dict[int, RecordedForward] = {}
        self._allocated_before = 0
        self._state = ModelState(self.units.model)
        self._structure, self._modes = self._state.structure(), self._state.modes()
        self.situations = self._new_situations(check)
        self.autograd_grad_sample_hooks: list[RemovableHandle] = []
        self._attach()
        remember_owner(self, m.parameters())

    @property
    def per_sample_gradient_norms(self) -> torch.Tensor:
        """[B] of the last batch. Not private: for debugging only."""
        if self.bookkeeping.norms is None:
            raise AttributeError("per_sample_gradient_norms is set by optimizer.step(), after forward and backward.")
        return self.bookkeeping.norms

    def _new_situations(self, check: Check) -> Situations:
        workspace = self.bookkeeping.workspace
        return Situations(
            self.units, self.layer_hooks, workspace, check, self._run, self._attach, self.parameter_names()
        )

    def modes(self) -> tuple[Any, ...]:
        """What a program may change in the model between two forwards, and what a proof depends on: modes, hooks,
        replaced forwards and attributes."""
        return self._state.structure(), self._state.modes()

    @property
    def trained(self) -> dict[nn.Parameter, str]:
        """The names of the parameters that were trained in the last forward."""
        return self.situations.trained

    def parameter_names(self) -> dict[nn.Parameter, str]:
        return {p: name for name, p in self.units.model.named_parameters() if p.requires_grad}

    def forbid_grad_accumulation(self) -> None:
        self.bookkeeping.accumulation_allowed = False

    def allow_grad_accumulation(self) -> None:
        self.bookkeeping.accumulation_allowed = True

    def disable_hooks(self) -> None:
        self.hooks_enabled = False

    def enable_hooks(self) -> None:
        self.hooks_enabled = True

    def remove_hooks(self) -> None:
        """Removes the hooks, and drops what backward has kept."""
        self.disable_hooks()
        while self.autograd_grad_sample_hooks:
            self.autograd_grad_sample_hooks.pop().remove()
        self._entries.clear()
        self._taps.clear()
        self._watched.clear()
        self._records.clear()
        self.bookkeeping.clear()
        let_reducer_run(self._module, True)

    def _attach(self) -> None:
        """Puts hooks on what has none yet: on all modules with trained parameters, to see which of them the program
        calls,
        and on those of layers."""
        for module in self.units.model.modules():
            if module not in self._entries and any(each in self.units.at for each in module.modules()):
                self._attach_entry(module)
        for module in self.units.at:
            if module not in self._taps:
                self._attach_layer(module)
        self._refuse_gradients_beside_layers()

    def _attach_entry(self, module: nn.Module) -> None:
        """What the program calls is prepared before, and finished behind, all hooks that are there."""
        before = module.register_forward_pre_hook(_untraced(self._before_entry), with_kwargs=True, prepend=True)
        after = module.register_forward_hook(_untraced(self._after_entry), with_kwargs=True, always_call=True)
        self._entries[module] = before.id, after.id
        self.autograd_grad_sample_hooks += [before, after]

    def _attach_layer(self, module: nn.Module) -> None:
        """A layer's output is tapped before any other hook, of users or of the profiler, can change it."""
        before = module.register_forward_pre_hook(_untraced(self._before_module), with_kwargs=True)
        tap = module.register_forward_hook(
            _untraced(self._after_module), with_kwargs=True, always_call=True, prepend=_is_tapped_first(module)
        )
        self._taps[module] = tap.id
        _hooks_of(module).move_to_end(self._entries[module][1])  # behind a tap that is not the first
        self.autograd_grad_sample_hooks += [before, tap]

    def _refuse_gradients_beside_layers(self) -> None:
        """Autograd gives a trained parameter no gradient, unless it is used beside the layers that are followed."""
        if self.units.is_sharded:
            return
        for parameter, name in self.parameter_names().items():
            watched = self._watched.get(id(parameter))
            if watched is None or watched.hooks_dict_ref() is None:
                handle = parameter.register_post_accumulate_grad_hook(_NoteGradient(self, name))  # type: ignore[no-untyped-call]
                self._watched[id(parameter)] = handle
                self.autograd_grad_sample_hooks.append(handle)

    def _active(self) -> bool:
        hooks, call = self.layer_hooks, self._call
        if not self.hooks_enabled or hooks.is_off or is_repeating():
            return False
        if call is None:  # a checkpoint runs a layer again, in backward
            return self.units.model.training
        if call.is_off or call.cannot_run is not None:
            return False
        return hooks.observe is not None if hooks.is_probing else True

    # --- a layer ---
    def _before_module(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if not self._active():
            return None
        plain = self.layer_hooks.plain.get(module)
        if plain is not None and plain.before(args, kwargs):
            return None
        changed = None
        for layer in self.units.at.get(module, ()):
            try:
                changed = self.layer_hooks.before(layer, args, kwargs) or changed
            except MemprofError as error:
                self._refuse(error)
        return changed

    def _after_module(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        # Also called if forward raises (then output is None), so that parameters always become trainable again.
        plain = self.layer_hooks.plain.get(module)
        result = None
        try:
            if plain is not None and plain.is_running:
                return plain.after(args, kwargs, output)
            for layer in self.units.at.get(module, ()):
                changed = self.layer_hooks.after(layer, args, kwargs, output)
                if changed is not None:
                    result = output = changed
        except MemprofError as error:
            self._refuse(error)
        return result

    def _refuse(self, error: MemprofError) -> None:
        """Raises an error of the program's forward or, where several ranks train the model, keeps it for the step. In a
        proof, which tries what may fail, it is raised."""
        hooks = self.layer_hooks
        if hooks.is_probing or hooks.bookkeeping is not self.bookkeeping:
            raise error
        self.bookkeeping.refusal.add(error)

    # --- what the program calls: the model, or a part of it by itself ---
    def _before_entry(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if self._call is not None:
            self._call.depth += module is self._call.entry
            return None
        if not self.hooks_enabled or self.layer_hooks.is_off or is_repeating():
            return None
        if torch._C._current_graph_task_id() != -1 and module is not self.units.model:
            return None  # a checkpoint runs a part of the model again, in backward
        is_off = not module.training or not self.units.model.training or not torch.is_grad_enabled()
        self._call = _Call(module, args, kwargs, is_off)
        if is_off:
            return None
        was_layer = module in self._taps
        try:
            self._begin(self._call)
        except MemprofError as error:
            self.certificate.refuse(error)
            if self._shared_samples is not None:  # all ranks have raised one
                raise
            self.bookkeeping.refusal.add(error)
            self._call.is_off = True
            return None
        # A hook that a call's hooks add to the module does not run in that call.
        is_new = module in self._taps and not was_layer
        return self._before_module(module, args, kwargs) if is_new else None

    def _begin(self, call: _Call) -> None:
        hooks = self.layer_hooks
        if not self.bookkeeping.is_captured:
            refuse_capture()
        if not self.bookkeeping.is_captured:
            call.random = RandomState.now(_device_of(call.args, call.kwargs))
        error: MemprofError | None = None
        try:
            if self._shared_samples is not None:
                self._shared_samples.reshard()
            self._follow_changes()
            hooks.batch = _batch_size(call.args, call.kwargs)
        except MemprofError as raised:
            if self._shared_samples is None:
                raise
            error = raised
        self._prepare(call, error)
        hooks.for_compiled_autograd = is_compiled_autograd_enabled()
        hooks.forward += 1
        hooks.trace = []
        hooks.kept_bytes = 0
        if self.passes == "auto" and torch.cuda.is_available():
            self._allocated_before = _allocated_bytes()

    def _follow_changes(self) -> None:
        """Follows what the program has changed in the model: layers, what is trained, modes and hooks.

        Raises:
            MemprofError: the model cannot be clipped exactly any more.
        """
        structure = self._state.structure()
        if structure != self._structure:
            self._rebuild()
        modes = self._state.modes()
        if modes != self._modes:
            check_model(self.units.model)
            self._modes = modes
            self._keep_taps_first()

    def _rebuild(self) -> None:
        """Finds the layers anew, in a model that has others or trains others."""
        units = Units(self.units.model)
        self.remove_hooks()
        self.enable_hooks()
        self.units = units
        self._state = ModelState(self.units.model)
        self._structure, self._modes = self._state.structure(), self._state.modes()
        self.situations = self._new_situations(self.situations.check)
        self._attach()

    def _keep_taps_first(self) -> None:
        """Hooks that the program has put before those of layers come behind them again."""
        for module, tap in self._taps.items():
            if _is_tapped_first(module):
                _hooks_of(module).move_to_end(tap, last=False)

    def _prepare(self, call: _Call, error: MemprofError | None) -> None:
        """Finds the situation of a call, and proves it if it is new or due. ``error`` is what was raised before, under
        FSDP2, where all ranks hear of it."""
        hooks, batch, random = self.layer_hooks, self.layer_hooks.batch, call.random
        signature = self.situations.arguments.signature(call.args, call.kwargs, batch)
        call.key = call.entry, self._modes, signature, size_class(batch), autocast_key(("cpu", "cuda"))
        is_new = call.key not in self.situations.known
        try:
            if self._shared_samples is not None:
                self._prove_on_all_ranks(call, self._shared_samples, (signature, size_class(batch)), error)
            elif call.key not in self.situations.known and batch and random is not None:
                self.situations.known[call.key] = self._prove(call.entry, call.args, call.kwargs, random)
        except CannotRunError as cause:  # raised after the forward, which may fail for the same reason
            call.cannot_run = cause.__cause__ or cause
        finally:
            hooks.batch = batch
        known = self.situations.known.get(call.key)
        if known is None:
            if self.bookkeeping.is_captured and batch:
                raise MemprofError(
                    "compute_loss runs the model in another way than before its capture in a CUDA graph, and nothing "
                    "can be proved while it is captured: run the model in the same way each time."
                )
            return
        known.forwards += bool(batch)
        if known.record is None:
            self._certify(call, known)
        if known.record is not None and batch:
            known.record.begin_forward(batch)
            if is_new:
                self._note_proof(known)
        if batch and random is not None and self._is_explained(known.forwards):
            call.record = RecordedForward.begin(call.entry, call.args, call.kwargs, batch, random)
        is_due = known.forwards > 1 and batch and is_checked(self.situations.check, known.forwards)
        if is_due and random is not None and self._shared_samples is None:
            try:
                known = self.situations.recheck(call.key, call.entry, call.args, call.kwargs, random)
            except CannotRunError as cause:
                call.cannot_run = cause.__cause__ or cause
                return
        if not known.is_finite:
            self.situations.known.pop(call.key, None)
        call.situation = self.last_situation = known
        hooks.layouts, hooks.plain = known.layouts, known.plain

    def _certify(self, call: _Call, situation: Situation) -> None:
        """Has a situation that was proved recorded."""
        units, batch = self.units, _batch_size(call.args, call.kwargs)
        description = Description.of(
            units.model, call.entry, call.args, call.kwargs, batch, units.layers(), self.situations.trained
        )
        situation.record = self.certificate.situation(description)

    def _note_proof(self, situation: Situation) -> None:
        """Records that a situation was proved, on all samples of the current forward."""
        if situation.record is not None and self.situations.check != "off":
            situation.record.note("mixing", situation.share)
            if not self.units.is_sharded:
                situation.record.note("sums", situation.share)

    def _prove(self, entry: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], random: RandomState) -> Situation:
        refuse_context_parallel()
        for layer in self.units.at.get(entry, ()):
            if not isinstance(layer, GenericLayer):
                layer.check_input(first_input(layer, args, kwargs)[1])
        return self.situations.prove(entry, args, kwargs, random)

    def _prove_on_all_ranks(
        self, call: _Call, shared: SharedSamples, description: object, error: MemprofError | None
    ) -> None:
        """Proves, on all ranks and for the same samples, what any of them has not proved yet or has to check again."""
        hooks, batch, is_checked_again = self.layer_hooks, self.layer_hooks.batch, False
        while True:
            known = self.situations.known.get(call.key)
            need = 2 * bool(batch) if known is None else 0
            if known is not None and batch and not is_checked_again:
                need = int(is_checked(self.situations.check, known.forwards + 1) and known.forwards > 0)
            next_proof = shared.next(call.args, call.kwargs, batch, description, need, call.random, error)
            if next_proof is None:
                return
            hooks.batch = next_proof.batch
            new = self._prove(call.entry, next_proof.args, next_proof.kwargs, next_proof.random)
            hooks.batch = batch
            is_checked_again |= not next_proof.is_new
            if next_proof.is_new and next_proof.is_own:
                self.situations.known[call.key] = new

    def _is_explained(self, forward: int) -> bool:
        """Returns whether a step is compared with what its outputs explain: when a situation is checked, but with
        "sometimes" only at the 1st, 8th, 64th, 512th and then every 1000th of the checked forwards, since it takes as
        long as a step."""
        check = self.situations.check
        if self.units.is_sharded or not is_checked(check, forward):
            return False
        return check != "sometimes" or forward % 1000 == 0 or (forward.bit_length() - 1) % 3 == 0

    def _run(self, entry: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Calls a module as the program does: between the hooks of layers, and with the hooks of users."""
        before, after = self._entries[entry]
        args, kwargs = run_pre_hooks(entry, before, args, kwargs)
        args, kwargs = self._before_module(entry, args, kwargs) or (args, kwargs)
        output = None
        try:
            output = entry.forward(*args, **kwargs)
        finally:
            changed = self._after_module(entry, args, kwargs, output)
        return run_hooks(entry, after, args, kwargs, output if changed is None else changed)

    def _after_entry(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        call = self._call
        if call is None or module is not call.entry:
            return None
        call.depth -= 1
        if call.depth:
            return None
        self._call = None
        if output is None or call.is_off or not self.hooks_enabled:
            return None
        try:
            return self._finish(call, output)
        except MemprofError as error:
            self.certificate.refuse(error)
            self.bookkeeping.refusal.add(error)
            return None

    def _finish(self, call: _Call, output: Any) -> Any:
        hooks = self.layer_hooks
        if call.cannot_run is not None:
            raise MemprofError(
                "flash_clip needs inputs whose first dimension is the batch, of the same length in all of them: this "
                "model ran on its whole input, but not on some samples of it "
                f"({type(call.cannot_run).__name__}: {call.cannot_run}). Pass the batch first in every tensor that has "
                "it."
            ) from call.cannot_run
        situation = call.situation
        if situation is not None and call.random is not None and self._is_unproved(situation):
            output = self._prove_trace(call, situation, call.random, output)
        tensors = tensors_in(output)
        wheres = call.situation.wheres if call.situation is not None else self._wheres_by_shape(tensors)
        outputs = [(x, where) for x, where in zip(tensors, wheres, strict=False) if x.requires_grad]
        if not outputs and hooks.trace:
            raise MemprofError(
                f"no gradient leads from the output of the model (a {type(output).__name__}) to its layers: return "
                "tensors, "
                "or tuples, lists, dictionaries or data classes of them, that are not detached."
            )
        # Tensors in other objects, such as a cache of keys and values, are not what a loss is computed from.
        leaves = {id(leaf) for leaf in tree_flatten(output)[0]}
        others = [(x, where) for x, where in outputs if id(x) not in leaves]
        output, outputs = self._two_passes(output, [(x, where) for x, where in outputs if id(x) in leaves])
        if hooks.for_compiled_autograd:
            return output
        record = call.record if outputs else None
        if record is not None and call.random is not None:
            # Of an output from which others are computed, only what the program does with it counts.
            output, aliases = alias_leaves(output, [x for x, _ in outputs])
            outputs = list(zip(aliases, [where for _, where in outputs], strict=True))
            record.wheres = [where for _, where in outputs]
            record.draws = call.random.has_moved()
            proof = None if call.situation is None else call.situation.record
            record.proof = None if proof is None else (proof, proof.forwards)
            self._records[hooks.forward] = record
        for place, (x, _) in enumerate(outputs):
            begin = functools.partial(self._begin_backward, hooks.forward, record, place)
            x.register_hook(begin)  # type: ignore[no-untyped-call]
        for x, _ in others:
            x.register_hook(functools.partial(self._begin_backward, hooks.forward, None, 0))  # type: ignore[no-untyped-call]
        return output

    def _is_unproved(self, situation: Situation) -> bool:
        """Whether the forward has called its layers in an order that no proof has seen."""
        hooks = self.layer_hooks
        return bool(hooks.batch) and self.situations.check != "off" and order_of(hooks.trace) not in situation.traces

    def _wheres_by_shape(self, tensors: list[torch.Tensor]) -> list[Arrangement | None]:
        """Where the outputs of an empty batch have the samples, before any other batch."""
        batch = self.layer_hooks.batch
        return [PLAIN if x.dim() and len(x) == batch else None for x in tensors]

    def _begin_backward(self, forward: int, record: RecordedForward | None, place: int, gradient: torch.Tensor) -> None:
        self.bookkeeping.begin_backward(forward)
        if record is not None and forward in self._records:
            record.add(place, gradient)

    def check_explained(self) -> None:
        """Compares what recorded steps have kept with what their outputs explain. Called before sums are formed.

        Raises:
            MemprofError: a gradient has come beside the outputs.
        """
        records, self._records = self._records, {}
        for each in self.bookkeeping.backward_passes():
            own = [records[forward] for forward in each.forwards if forward in records]
            if own and len(own) == len(each.forwards) and each.samples is None:
                try:
                    with self.layer_hooks.off(), without_compiled_autograd(), without_saved_tensors_hooks():
                        check_explained(each, own, self.trained, self.bookkeeping.workspace)
                except torch.OutOfMemoryError:  # beside what the step needs; a later forward is explained instead
                    continue
                for proof, forward in (record.proof for record in own if record.proof is not None):
                    proof.note("explained", forward=forward)
        for record in records.values():
            record.release()

    def _prove_trace(self, call: _Call, situation: Situation, random: RandomState, output: Any) -> Any:
        """Proves a forward that has called the layers in a new order. Returns its output: that of another forward, with
        the same random numbers, if its layers have to be followed in another way."""
        hooks, situations = self.layer_hooks, self.situations
        order, self._call, call.depth = order_of(hooks.trace), call, 1
        try:
            new = situations.prove(call.entry, call.args, call.kwargs, random)
            is_same = situations.known.get(call.key) is situation and all(
                situation.layouts.get(layer) == layout for layer, layout in new.layouts.items()
            )
            if not is_same:
                with random.restored(), restoring_state(call.entry):
                    hooks.layouts, hooks.plain, hooks.trace = new.layouts, new.plain, []
                    output = self._run(call.entry, call.args, call.kwargs)
                order = order_of(hooks.trace)
        except CannotRunError as error:
            raise MemprofError(
                "the model has called its layers in a new order, and cannot run on other samples in it "
                f"({error.__cause__ or error})."
            ) from error
        finally:
            self._call, call.depth = None, 0
        if order not in new.traces:
            raise MemprofError(
                "the model calls its layers in another order each time, also from the same random numbers, so that its "
                "clipping cannot be proved: make the order depend on torch's, NumPy's or Python's random numbers alone."
            )
        if is_same:
            situation.traces.append(order)
            if situation.record is not None:
                situation.record.orders += 1
                self._note_proof(situation)
            hooks.layouts, hooks.plain = situation.layouts, situation.plain
        else:
            situations.known[call.key] = call.situation = new
            self._certify(call, new)
            if new.record is not None:
                new.record.begin_forward(hooks.batch)
                self._note_proof(new)
        return output

    def _two_passes(
        self, output: Any, outputs: list[tuple[torch.Tensor, Arrangement | None]]
    ) -> tuple[Any, list[tuple[torch.Tensor, Arrangement | None]]]:
        """Runs backward twice from these outputs, if it is to."""
        if self.passes == 1 or self.bookkeeping.refusal.error is not None:
            return output, outputs
        if self.passes == "auto" and (not outputs or self._one_pass_fits()):
            return output, outputs
        if not outputs and self.layer_hooks.trace:
            raise MemprofError(
                "flash_clip_passes=2 needs tensors, or tuples, lists or dictionaries of them, as outputs, but the "
                f"model returned a {type(output).__name__}: return these, or use flash_clip_passes=1."
            )
        if not outputs:
            return output, outputs
        leaves, structure = tree_flatten(output)
        places = [next(i for i, leaf in enumerate(leaves) if leaf is x) for x, _ in outputs]
        inner = [x for x, _ in outputs]
        outer = TwoPassBackward.apply(
            self.layer_hooks.anchor(inner[0].device), inner, functools.partial(run_two_passes, self.bookkeeping)
        )
        for i, leaf in zip(places, outer, strict=True):
            leaves[i] = leaf
        return tree_unflatten(leaves, structure), [(x, where) for x, (_, where) in zip(outer, outputs, strict=True)]

    def _one_pass_fits(self) -> bool:
        """Whether what one pass keeps fits into device memory. Backward releases what forward has allocated, so only
        the bytes beyond that must be free."""
        kept_bytes = self.layer_hooks.kept_bytes
        if kept_bytes == 0:
            return True
        allocated = _allocated_bytes()
        growth = kept_bytes - (allocated - self._allocated_before)
        if growth <= 0:
            return True
        free, _ = torch.cuda.mem_get_info()
        return growth <= free + torch.cuda.memory_reserved() - allocated


def _hooks_of(module: nn.Module) -> Any:
    """The forward hooks of a module, by id, in the order in which they are called."""
    return module._forward_hooks


def _allocated_bytes() -> int:
    """As torch.cuda.memory_allocated, in a fifth of the time: that sorts all statistics."""
    statistics = torch.cuda.memory_stats_as_nested_dict()
    return int(statistics["allocated_bytes"]["all"]["current"]) if statistics else 0


class _NoteGradient:
    """A parameter's hook, which notes that autograd has given the parameter a gradient.

    In a proof, which runs in a call, autograd's gradients are what the layers' are compared with.
    """

    def __init__(self, owner: FlashClipHooks, name: str) -> None:
        self.owner = weakref.ref(owner)  # Python's garbage collector finds no cycle through a parameter's hook
        self.name = name

    def __call__(self, parameter: torch.Tensor) -> None:
        hooks = self.owner()
        if hooks is None or not hooks.hooks_enabled or hooks.layer_hooks.is_off or hooks._call is not None:
            return
        if hooks.units.model.training:
            hooks.bookkeeping.beside_layers.append(self.name)

    def __reduce__(self) -> tuple[Any, ...]:  # a weak reference cannot be pickled
        return _NoteGradient, (self.owner(), self.name)


def _is_tapped_first(module: nn.Module) -> bool:
    """Returns whether a module's tap comes before its other hooks.

    Also before FSDP's: in backward it then gathers the parameters before the tap keeps anything, and its buffer has
    gone by then. An embedding needs no parameters there.
    """
    return not (isinstance(module, FSDPModule) and isinstance(module, nn.Embedding))


def _untraced(hook: Any) -> Any:
    """A bound method that torch.compile, where a program uses it, calls as it is. What hooks do is not a part of the
    model's graph, and from them a tracer reaches the model that it is tracing."""
    if "torch._dynamo" not in sys.modules:  # which takes seconds to import
        return hook
    function = torch.compiler.disable(hook.__func__)  # type: ignore[no-untyped-call]
    return MethodType(function, hook.__self__)


def _device_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.device:
    """The device of the first tensor among the model's inputs."""
    tensors = (leaf for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, torch.Tensor))
    return next((tensor.device for tensor in tensors), torch.device("cpu"))


def _batch_size(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """The length of the first tensor among the model's inputs."""
    for leaf in tree_flatten((args, kwargs))[0]:
        if isinstance(leaf, torch.Tensor) and leaf.dim():
            return len(leaf)
    raise MemprofError("flash_clip needs a tensor among the model's inputs whose first dimension is the batch.")


class GradSampleModuleFlashClip(FlashClipHooks, AbstractGradSampleModule):  # type: ignore[misc]
    """The hooks of flash_clip in a module that wraps the model. See FlashClipHooks for the arguments."""

    def __init__(self, m: nn.Module, **kwargs: Any) -> None:
        nn.Module.__init__(self)
        FlashClipHooks.__init__(self, m, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._module(*args, **kwargs)
