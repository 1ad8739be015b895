# SPDX-License-Identifier: Apache-2.0
"""The GradSampleModule and the GradSampleHooks of grad_sample_mode="flash_clip"."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from opacus.grad_sample.gsm_base import AbstractGradSampleHooks, AbstractGradSampleModule
from torch import nn
from torch.utils.hooks import RemovableHandle

from opacus_memprof.clipping.agreement import inner_model, let_reducer_run
from opacus_memprof.clipping.arguments import (
    CHECKS,
    Check,
    Clipping,
    ClipRule,
    Nonfinite,
    Passes,
    check_nonfinite,
    check_passes,
)
from opacus_memprof.clipping.bookkeeping import Bookkeeping
from opacus_memprof.clipping.bookkeeping.autograd_functions import is_compiled_autograd_enabled
from opacus_memprof.clipping.bookkeeping.backward_pass import refuse_capture
from opacus_memprof.clipping.cost import DEFAULT_WORKSPACE_MB
from opacus_memprof.clipping.forwards.repetition import is_repeating
from opacus_memprof.clipping.forwards.state import Arrangement, RandomState
from opacus_memprof.clipping.layer_hooks import LayerHooks
from opacus_memprof.clipping.layers import Layer
from opacus_memprof.clipping.layers.registry import LayerRegistry
from opacus_memprof.clipping.module.attached_hooks import AttachedHooks, refuse_private, remember_owner
from opacus_memprof.clipping.module.between_calls import Parts
from opacus_memprof.clipping.module.call_proofs import CallProofs
from opacus_memprof.clipping.module.calls import (
    Call,
    ExplainedSteps,
    Outputs,
    allocated_bytes,
    arrangements_by_shape,
    batch_size,
    detach_for_two_passes,
    device_of,
    gradient_of_cache,
    gradient_of_shared_output,
    has_parameters_alone,
    one_pass_fits,
    open_objects,
    without_samples,
)
from opacus_memprof.clipping.module.graph_hooks import GraphHooks, InnerOutput, end_records
from opacus_memprof.clipping.module.other_samples import OtherSamples
from opacus_memprof.clipping.module.read_numbers import unfollowed
from opacus_memprof.clipping.proof.batches import (
    alias_cached_tensors,
    alias_leaves,
    is_plain_call,
    leaves_of,
    tensors_in,
    tensors_of_call,
)
from opacus_memprof.clipping.proof.certificate import Certificate
from opacus_memprof.clipping.proof.explanation import RecordedForward
from opacus_memprof.clipping.proof.model_state import is_recomputed
from opacus_memprof.clipping.proof.situations import Situation, Situations
from opacus_memprof.clipping.workspace import Workspace
from opacus_memprof.errors import MemprofError


class FlashClipHooks(AbstractGradSampleHooks):  # type: ignore[misc]
    """The hooks of flash_clip on a model, without a wrapper around it.

    While a trainable layer runs, its parameters do not require grad. Autograd then forms no weight gradients, which
    differential privacy could not use. A node on the layer's output (`tap_gradient`) passes on its input and gradient.

    Args:
        m: the model.
        batch_first: must be True.
        loss_reduction: "mean" or "sum", of the loss over the batch.
        strict: for compatibility with Opacus; unsupported layers are always refused.
        max_grad_norm: the bound of a sample's gradient, or one for each parameter; see ClipRule.
        clipping: how the bound is applied; see ClipRule.
        workspace_mb: limit on the temporaries of one layer's norm or clipped sum, in MiB.
        passes: 1 keeps what the clipped sums need during a single backward; 2 keeps nothing, and runs backward through
            the model twice; "auto" is 1 unless the kept tensors would not fit into device memory.
        check: when exact clipping is proved: "first" in each situation, "sometimes" again (2nd, 4th, 8th, … forward),
            "always" or "off".
        nonfinite: the treatment of samples whose gradient norm is not finite (NaN, infinity, overflow). "refuse": the
            step raises MemprofError, which depends on the data. "drop": the sample adds nothing to the sum, as if its
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
        check_passes(passes, "flash_clip_passes")
        if check not in CHECKS:
            raise MemprofError(f"check is {check!r}; it must be one of {', '.join(map(repr, CHECKS))}.")
        check_nonfinite(nonfinite)
        refuse_private(inner_model(m))
        rule = ClipRule(clipping, max_grad_norm)
        if passes == 2 and rule.by_parameter:
            raise MemprofError("flash_clip_passes=2 finds one clip factor for all parameters; use 1 with 'per_layer'.")
        bookkeeping = Bookkeeping(rule, loss_reduction, Workspace.from_mib(workspace_mb), nonfinite)
        registry = LayerRegistry(inner_model(m))
        if registry.is_sharded and passes == 2:
            raise MemprofError("flash_clip_passes=2 runs backward twice, which FSDP2 does not expect; use 1.")
        super().__init__(m, batch_first=batch_first, loss_reduction=loss_reduction)
        self.bookkeeping = bookkeeping
        self.passes: Passes = 1 if rule.by_parameter or registry.is_sharded else passes
        self.registry = registry
        self.certificate = Certificate("flash_clip", registry.model, check, nonfinite)
        self.layer_hooks = LayerHooks(bookkeeping)
        self.hooks_enabled = True
        self.autograd_grad_sample_hooks: list[RemovableHandle] = []
        self._attached = AttachedHooks(
            self.autograd_grad_sample_hooks,
            before_entry=self._before_entry,
            after_entry=self._after_entry,
            before_layer=self._before_layer,
            after_layer=self._after_layer,
            note_gradient=self._note_gradient,
        )
        self._proofs = CallProofs(
            registry, self.layer_hooks, bookkeeping, self.certificate, check, self._attached.run, self._attach
        )
        self._explained = ExplainedSteps(self.layer_hooks, bookkeeping)
        self._parts = Parts(self._proofs.situations.check if self._proofs.joint is None else "off")
        self._graph_hooks = GraphHooks(bookkeeping, self._parts.check_next)
        self._call: Call | None = None
        self._begun_with: RandomState | None = None
        self._allocated_before = 0
        self._attach()
        remember_owner(self, m.parameters())

    @property
    def per_sample_gradient_norms(self) -> torch.Tensor:
        """The per-sample gradient norms, [B], of the last batch. Not private: for debugging only."""
        if self.bookkeeping.norms is None:
            raise AttributeError("per_sample_gradient_norms is set by optimizer.step(), after forward and backward.")
        self._parts.add_samples(self.bookkeeping.norms)
        return self.bookkeeping.norms

    @property
    def situations(self) -> Situations:
        """The known situations of the model."""
        return self._proofs.situations

    @property
    def last_situation(self) -> Situation | None:
        """The situation of the last forward."""
        return self._proofs.last_situation

    @property
    def trained(self) -> dict[nn.Parameter, str]:
        """The names of the parameters that were trained in the last forward."""
        return self.situations.trained

    @property
    def parts(self) -> Parts:
        """What the program computes from the calls since the last step."""
        return self._parts

    def modes(self) -> tuple[Any, Any]:
        """Returns the state of the model that proofs depend on and that a program may change between two forwards.

        These are the model's structure, modes, hooks, replaced forwards and attributes.
        """
        return self._proofs.modes()

    def check_explained(self) -> None:
        """Compares the recorded steps with the gradients that the outputs of the model explain.

        Called before sums are formed.

        Raises:
            MemprofError: a gradient did not come through the outputs.
        """
        self._parts.end_step()
        try:
            self._explained.check(self.trained)
        except MemprofError:
            self._graph_hooks.forget()
            self.situations.known.clear()  # otherwise the same program's next step would not be compared
            raise
        self._graph_hooks.end_step()

    def begin_step(self) -> None:
        """Called when a step begins, whose operations are not the program's: ranks communicate there, for example.

        Other models' losses may depend on what it makes of the parameters, too.
        """
        end_records()
        self._parts.pause_all()

    def end_step(self) -> None:
        """Called when a step has ended, and the program goes on."""
        self._parts.resume_all()

    def forget_calls(self) -> None:
        """Forgets the calls since the last step, which is refused or was a trial. Steps count from 1 again."""
        self._parts.forget()
        self._explained.clear()
        self._graph_hooks.forget()

    def take_random_states(self) -> dict[torch.Generator, torch.Tensor]:
        """Returns the states of torch's generators at the first forward since the last call of this method."""
        random, self._begun_with = self._begun_with, None
        return {} if random is None else random.by_generator()

    def forbid_grad_accumulation(self) -> None:
        self.bookkeeping.accumulation_allowed = False

    def allow_grad_accumulation(self) -> None:
        self.bookkeeping.accumulation_allowed = True

    def disable_hooks(self) -> None:
        self.hooks_enabled = False

    def enable_hooks(self) -> None:
        self.hooks_enabled = True

    def remove_hooks(self) -> None:
        """Removes the hooks, and drops the tensors that backward has kept."""
        self._detach()
        let_reducer_run(self._module, True)

    def _detach(self) -> None:
        self.disable_hooks()
        self._attached.remove()
        self._explained.clear()
        self._graph_hooks.clear()
        self._parts.pause()
        self.bookkeeping.clear()

    def called_layers(self) -> set[Layer]:
        """Returns the layers that any forward, one of a proof included, has called."""
        return {layer for layer in self.layer_hooks.called if layer is not None}

    def _attach(self) -> None:
        self._attached.attach(self.registry, self.registry.parameter_names())

    def _note_gradient(self, name: str) -> None:
        """Notes that autograd has given a parameter a gradient.

        In a proof, which runs inside a call, the layers' gradients are compared with autograd's instead.
        """
        if self.hooks_enabled and self._call is None and self.registry.model.training and not self.layer_hooks.is_off:
            self.bookkeeping.beside_layers.append(name)

    def _active(self) -> bool:
        hooks, call = self.layer_hooks, self._call
        if not self.hooks_enabled or hooks.is_off or is_repeating():
            return False
        if call is None:  # a checkpoint runs a layer again, in backward
            return self.registry.model.training
        if call.is_off or call.cannot_run is not None or call.is_elsewhere():
            return False
        return hooks.observe is not None if hooks.is_probing else True

    # --- hooks of a layer ---
    def _before_layer(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if kwargs is None or not self._active():  # None: the hook was removed while the module's hooks are called
            return None
        changed = None
        for layer in self.registry.at.get(module, ()):
            try:
                changed = self.layer_hooks.before(layer, args, kwargs) or changed
            except MemprofError as error:
                self._refuse(error)
        return changed

    def _after_layer(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        # Also called if forward raises (then output is None), so that parameters always become trainable again.
        if self._call is not None and self._call.is_elsewhere():
            return None
        result = None
        try:
            for layer in self.registry.at.get(module, ()):
                changed = self.layer_hooks.after(layer, args, kwargs, output)
                if changed is not None:
                    result = output = changed
        except MemprofError as error:
            self._refuse(error)
        return result

    def _refuse(self, error: MemprofError) -> None:
        """Raises an error of the program's forward or, if several ranks train the model, keeps it for the step.

        During a proof, which tries calls that may fail, it is always raised.
        """
        hooks = self.layer_hooks
        if hooks.is_probing or hooks.bookkeeping is not self.bookkeeping:
            raise error
        self.bookkeeping.refusal.add(error)

    # --- hooks of the modules that the program calls: the model, or a part of it by itself ---
    def _before_entry(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if self._call is not None:
            self._call.depth += module is self._call.entry and not self._call.is_elsewhere()
            return None
        if not self.hooks_enabled or self.layer_hooks.is_off or is_repeating():
            return None
        if torch._C._current_graph_task_id() != -1 and (module is not self.registry.model or is_recomputed()):
            return None  # a checkpoint runs the model, or a part of it, again, in backward
        is_off = not (module.training and self.registry.model.training and torch.is_grad_enabled())
        is_off |= self._proofs.is_frozen() or (module is not self.registry.model and has_parameters_alone(args, kwargs))
        if not (is_off or is_plain_call(args, kwargs)):
            open_objects((args, kwargs))
        end_records()
        self._call = Call(module, args, kwargs, is_off)
        self._parts.begin_call(is_off)
        if is_off:
            self._check_frozen(self._call)
            if self._may_leave():
                self._proofs.left.begin(args, kwargs)
            return None
        tap = self._attached.tap_of(module)
        try:
            if self._proofs.joint is None and not self.bookkeeping.is_captured:
                self._parts.check_rows(self._call, self.registry.model)
            self._begin(self._call)
        except MemprofError as raised:
            error = self._call.other_thread or raised
            self.certificate.refuse(error)
            if self._proofs.joint is not None:  # all ranks have raised an error
                raise
            self.bookkeeping.refusal.add(error)
            self._call.is_off = True
            return None
        # A hook that is added while a module's hooks run is not called in that call.
        is_new = self._attached.tap_of(module) not in (None, tap)
        return self._before_layer(module, args, kwargs) if is_new else None

    def _is_followed(self, call: Call) -> bool:
        """Returns whether another call may depend on one without gradients of parameters, as on an attack's."""
        return self.registry.model.training or call.has_gradients_of_inputs()

    def _may_leave(self) -> bool:
        """Returns whether it is checked what calls leave in the model for later ones."""
        return self._parts.is_due() and self._proofs.joint is None and not self.bookkeeping.is_captured

    def _check_frozen(self, call: Call) -> None:
        """Checks the inputs of a call without gradients, whose outputs a later call may have as inputs."""
        try:
            if self._is_followed(call):
                with unfollowed():
                    self._parts.check_rows(call, self.registry.model)
        except MemprofError as error:
            self.certificate.refuse(error)
            self.bookkeeping.refusal.add(error)

    def _begin(self, call: Call) -> None:
        hooks = self.layer_hooks
        if not self.bookkeeping.is_captured:
            refuse_capture()
            call.random = RandomState.now(device_of(call.args, call.kwargs))
            self._begun_with = self._begun_with or call.random
        error: MemprofError | None = None
        try:
            if torch._C._functorch.peek_interpreter_stack() is not None:
                raise MemprofError(
                    "the model is called in a transform of torch.func (vmap, grad, jvp, ...), inside of which "
                    "flash_clip does not see the gradients of its outputs: call the model outside of it."
                )
            if self._proofs.joint is not None:
                self._proofs.joint.reshard()
            self._follow_changes()
            hooks.batch = batch_size(call.args, call.kwargs)
        except MemprofError as raised:
            if self._proofs.joint is None:
                raise
            error = raised
        self._proofs.prepare(call, error)
        if call.is_proved or call.record is not None or self._parts.is_due():
            self._parts.check_gradients(call, hooks.batch)
        if call.random is not None and hooks.batch and self._may_leave():
            with unfollowed(), torch.enable_grad():
                left = self._parts.left_in(*self._proofs.held(), call)
                self._proofs.left.check(call.entry, call.args, call.kwargs, left)
        if call.random is not None:
            self._proofs.begin_forward(call)
            self._graph_hooks.begin_call()
        hooks.for_compiled_autograd = is_compiled_autograd_enabled()
        hooks.forward += 1
        self.bookkeeping.note_samples(hooks.forward, tensors_of_call(call.args, call.kwargs), hooks.batch)
        hooks.trace = []
        hooks.kept_bytes = 0
        if self.passes == "auto" and torch.cuda.is_available():
            self._allocated_before = allocated_bytes()

    def _follow_changes(self) -> None:
        """Adapts to the program's changes of the model: layers, trained parameters, modes and hooks.

        Raises:
            MemprofError: the model cannot be clipped exactly any more.
        """
        if self._proofs.has_new_structure():
            if not all(parameter.is_leaf for parameter in self.registry.model.parameters()):
                raise MemprofError(
                    "the model is called with other tensors instead of its parameters (torch.func.functional_call), "
                    "whose gradients flash_clip does not form: call the model itself."
                )
            if self.bookkeeping.passes:
                raise MemprofError(
                    "the model has other layers or trained parameters than in the backward before, whose gradients "
                    "still wait for optimizer.step(): freeze, unfreeze, add and replace between two steps, not within "
                    "one, or call optimizer.zero_grad() before."
                )
            registry = LayerRegistry(self.registry.model)
            self._detach()
            self.enable_hooks()
            self.registry = registry
            self.bookkeeping.first_forward = self.layer_hooks.forward + 1
            self._proofs.follow(registry, self.situations.check)
            self._attach()
        if self._proofs.follow_modes():
            self._attached.keep_taps_first()

    def _after_entry(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        call = self._call
        if call is None or module is not call.entry or call.is_elsewhere():
            return None
        call.depth -= 1
        if call.depth:
            return None
        self._call = None
        self._proofs.end_forward(call)
        changed = None
        try:
            changed = self._end_call(call, output)
            return changed
        finally:
            last = output if changed is None else changed
            if not (call.is_off or call.random is None or last is None or self.situations.check == "off"):
                tensors = tensors_in(last)
                places = arrangements_by_shape(tensors, self.layer_hooks.batch)
                if call.situation is not None:
                    places[: len(call.situation.arrangements)] = call.situation.arrangements
                outputs = [(x, where) for x, where in zip(tensors, places, strict=False) if x.requires_grad]
                self._graph_hooks.end_call(outputs, self.layer_hooks.batch, call.is_followed)
            self._parts.end_call(call, last, self.layer_hooks.batch, self.registry.model)
            self._graph_hooks.begin_record()

    def _end_call(self, call: Call, output: Any) -> Any:
        if output is None or not self.hooks_enabled:
            self._parts.resume()
            return None
        if call.is_off:
            self._end_left(call)
            if not self._is_followed(call) or self.bookkeeping.is_captured or self.bookkeeping.refusal.error:
                self._parts.resume()
                return None
            return self._parts.follow_off(call, output)
        try:
            return self._finish(call, output)
        except MemprofError as error:
            self.certificate.refuse(error)
            self.bookkeeping.refusal.add(error)
            return None
        finally:
            self._proofs.settle()

    def _end_left(self, call: Call) -> None:
        try:
            with unfollowed():
                self._proofs.left.end(call.entry, call.args, call.kwargs, batch_size(call.args, call.kwargs))
        except MemprofError:  # a call without samples
            return

    def _finish(self, call: Call, output: Any) -> Any:
        hooks = self.layer_hooks
        if call.other_thread is not None:
            self.bookkeeping.refusal.error = call.other_thread  # the step raises it, if only the thread sees it now
            raise call.other_thread
        if call.cannot_run is not None:
            raise MemprofError(without_samples(call, hooks.batch)) from call.cannot_run
        situation = call.situation
        if call.random is not None:
            self._call, call.depth = call, 1
            try:
                if self._proofs.joint is not None:
                    self._proofs.prove_order_on_all_ranks(call, call.random, output)
                elif situation is not None and self._proofs.is_unproved(call, situation, output):
                    output = self._proofs.prove_order(call, situation, call.random)
            finally:
                self._call, call.depth = None, 0
            if call.operations is not None and call.is_proved:
                call.operations.learn()
        hooks.called.update(hooks.trace)
        self.bookkeeping.note_layers(hooks.forward, {layer for layer in hooks.trace if layer is not None})
        tensors = tensors_in(output)
        arrangements = (
            call.situation.arrangements if call.situation is not None else arrangements_by_shape(tensors, hooks.batch)
        )
        outputs = [(x, where) for x, where in zip(tensors, arrangements, strict=False) if x.requires_grad]
        if not outputs and hooks.trace:
            raise MemprofError(
                f"no gradient leads from the output of the model (a {type(output).__name__}) to its layers: return "
                "tensors, or tuples, lists, dictionaries or data classes of them, that are not detached."
            )
        # A loss is not computed from tensors in other objects, such as a cache of keys and values.
        leaves = {id(leaf) for leaf in leaves_of(output)}
        others = [(x, where) for x, where in outputs if id(x) not in leaves]
        output, outputs = self._two_passes(output, [(x, where) for x, where in outputs if id(x) in leaves])
        if hooks.for_compiled_autograd:
            return output
        for x, where in [*outputs, *others]:
            if where is None and x.numel() > 1 and hooks.batch:
                x.register_hook(self._check_shared_gradient)  # type: ignore[no-untyped-call]
        record = call.record if outputs else None
        inner: dict[int, InnerOutput] = {}
        if record is not None:
            self._explained.add(call, outputs)
        if outputs and (record is not None or self._parts.is_due()):
            # Gradients of aliases are those of the loss alone. Those of an output from which others are computed are
            # told apart.
            inner = self._graph_hooks.add_inner([x for x, _ in outputs])
            output, aliases = alias_leaves(output, [x for x, _ in outputs if id(x) not in inner])
            of_loss = iter(aliases)
            outputs = [(x if id(x) in inner else next(of_loss), where) for x, where in outputs]
        modes = None if self.situations.check == "off" else call.modes
        for place, (x, _) in enumerate(outputs):
            begin = functools.partial(self._begin_backward, hooks.forward, modes, record, place)
            _add_hook(x, begin, inner)
        if call.entry is not self.registry.model and call.situation is not None and self._proofs.joint is None:
            self._parts.add(outputs, hooks.batch)
        repeated = call.situation.repeats() if call.situation is not None and others else []
        for x in alias_cached_tensors(output) if repeated else ():
            x.register_hook(functools.partial(self._refuse_cache, repeated[0]))  # type: ignore[no-untyped-call]
        for x, _ in others:
            begin = functools.partial(self._begin_backward, hooks.forward, modes, None, 0)
            x.register_hook(begin)  # type: ignore[no-untyped-call]
        mode = self._parts.follow(call, outputs, hooks.forward) if call.random is not None else None
        call.is_followed = self._parts.is_followed(mode, outputs)
        if mode is not None:
            for x, where in outputs:
                if where is not None:
                    end = functools.partial(self._end_between, mode, hooks.forward, where)
                    _add_hook(x, end, inner)
        return output

    def _begin_backward(
        self, forward: int, modes: tuple[Any, ...] | None, record: RecordedForward | None, place: int, g: torch.Tensor
    ) -> None:
        """Begins the backward of a forward; see `ExplainedSteps.begin_backward`."""
        try:
            self._proofs.check_layers()
        except MemprofError as error:
            self.bookkeeping.refusal.add(error)
        self._explained.begin_backward(forward, modes, record, place, g)

    def _end_between(self, mode: OtherSamples, forward: int, where: Arrangement, gradient: torch.Tensor) -> None:
        """Ends what follows the program after a call, because a backward has reached its output."""
        self.bookkeeping.loss_mixes |= self._parts.end(mode, forward, where, gradient)
        self.bookkeeping.loss_carries |= self._parts.carries

    def _check_shared_gradient(self, gradient: torch.Tensor) -> None:
        if (error := gradient_of_shared_output(gradient)) is not None:
            self._refuse(error)

    def _refuse_cache(self, repeated: Layer, gradient: torch.Tensor) -> None:
        self._refuse(gradient_of_cache(repeated.describe()))

    def _two_passes(self, output: Any, outputs: Outputs) -> tuple[Any, Outputs]:
        """Makes backward run twice from these outputs, if two passes are needed."""
        if self.passes == 1 or self.bookkeeping.refusal.error is not None:
            return output, outputs
        if self.passes == "auto" and (
            not outputs or one_pass_fits(self.layer_hooks.kept_bytes, self._allocated_before)
        ):
            return output, outputs
        return detach_for_two_passes(output, outputs, self.layer_hooks)


def _add_hook(x: torch.Tensor, hook: Callable[[torch.Tensor], None], inner: Mapping[int, InnerOutput]) -> None:
    """Registers a hook for the gradients of an output that the program's own use of it gives."""
    x.register_hook(inner[id(x)].of_program(hook) if id(x) in inner else hook)  # type: ignore[no-untyped-call]


class GradSampleModuleFlashClip(FlashClipHooks, AbstractGradSampleModule):  # type: ignore[misc]
    """The hooks of flash_clip in a module that wraps the model. See FlashClipHooks for the arguments."""

    def __init__(self, m: nn.Module, **kwargs: Any) -> None:
        nn.Module.__init__(self)
        FlashClipHooks.__init__(self, m, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._module(*args, **kwargs)

    def zero_grad(self, set_to_none: bool = False) -> None:
        """Does what Opacus' modules do, which drop per-sample gradients: drops the tensors that backward has kept."""
        self.bookkeeping.clear()
        super().zero_grad(set_to_none)
