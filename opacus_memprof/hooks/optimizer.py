# SPDX-License-Identifier: Apache-2.0
"""Follows clipping, noise, the step and zero_grad of Opacus' optimizers and of plain ones.

Opacus' optimizers call their methods through the instance, so wrappers are set as attributes of the instance. `step` is
not wrapped, because learning rate schedulers replace it. It begins with `pre_step`, and step hooks of the original
optimizer run before and after the update.
"""

import weakref
from collections.abc import Callable, Sequence
from functools import partial, wraps
from typing import Any

from torch.optim import Optimizer

from opacus_memprof.hooks import diagnosis, forward_shapes, observers, shapes
from opacus_memprof.hooks.vocabulary import (
    ADD_NOISE,
    CLIP,
    CLIPPING_TEMPORARIES,
    COMMUNICATION,
    GRADIENTS,
    IDLE,
    OPTIMIZER_STATES,
    OPTIMIZER_STEP,
    PER_SAMPLE_GRADIENTS,
    SUMMED_GRADIENTS,
    ZERO_GRAD,
    DPOptimizer,
    GradSampleHooksNoOp,
)
from opacus_memprof.recording import native
from opacus_memprof.recording.attachment import Attachment
from opacus_memprof.recording.faults import CallError, CallHook, call_observed, contain

# Models in Opacus' mode no_op, whose program sets `grad_sample` itself, at a time that hooks cannot know.
_no_op_models: "weakref.WeakKeyDictionary[GradSampleHooksNoOp, None]" = weakref.WeakKeyDictionary()


def follow_no_op_model(attachment: Attachment, model: GradSampleHooksNoOp) -> None:
    """Makes optimizers tag `grad_sample` when they step, as long as a model in the mode no_op is attached."""
    attachment.set_entry(_no_op_models, model, None)


class MethodWrapper:
    """A callable that is set as an attribute of an optimizer, and wraps the optimizer's method of that name.

    It has a weak reference to the optimizer: a reference cycle would keep the optimizer's states alive after the
    program has dropped the optimizer. It never accesses the optimizer's __dict__, because CPython would then
    materialize that dictionary and look up every attribute more slowly.
    """

    __slots__ = ("__wrapped__", "_observation", "_optimizer", "_tagged", "replaced")

    def __init__(self, optimizer: Optimizer, name: str) -> None:
        tag, self._observation = _METHODS[name]
        attribute, method = getattr(optimizer, name), getattr(type(optimizer), name)
        is_method = getattr(attribute, "__func__", None) is method
        self.replaced = None if is_method else attribute  # the program's own attribute, with the optimizer bound
        self.__wrapped__ = self.replaced or method
        self._tagged = self.__wrapped__ if tag is None else tag(self.__wrapped__)
        self._optimizer = weakref.ref(optimizer)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__wrapped__, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        optimizer = self._optimizer()
        if self.replaced is None:
            args = (optimizer, *args)
        return call_observed(self._tagged, args, kwargs, lambda: self._observation(optimizer))


def _observe_pre_step(optimizer: DPOptimizer) -> CallHook:
    native.set_phase(CLIP)
    if _no_op_models:
        for parameter in native.tensors_in(optimizer.param_groups):
            samples = getattr(parameter, "grad_sample", None)
            native.retag((samples,), PER_SAMPLE_GRADIENTS, native.owner_of(parameter))
    diagnosis.on_physical_step(optimizer)
    try:
        proceed = yield
    except CallError as failed:
        native.set_phase(IDLE)
        if isinstance(failed.error, Exception):
            observers.on_step_failure()
        raise
    if proceed:
        diagnosis.on_private_step(optimizer)
    else:  # part of a logical batch: its gradients are clipped and summed, without an update
        native.set_phase(IDLE)
        native.end_step(False)


def _observe_accumulate(optimizer: DPOptimizer) -> CallHook:
    yield
    _tag_summed_gradients(optimizer)


def _observe_nothing(optimizer: DPOptimizer) -> CallHook:
    yield


def _observe_clip_and_add_noise(optimizer: DPOptimizer) -> CallHook:
    yield
    native.retag_gradients(optimizer.param_groups, GRADIENTS)


def _observe_add_noise(optimizer: DPOptimizer) -> CallHook:
    observers.on_add_noise(optimizer)
    previous_phase = native.set_phase(ADD_NOISE)
    try:
        yield
    except CallError:
        native.set_phase(IDLE)
        raise
    native.set_phase(previous_phase)
    native.retag_gradients(optimizer.param_groups, GRADIENTS)


def _observe_reduce_gradients(optimizer: DPOptimizer) -> CallHook:
    observers.on_reduce_gradients(optimizer)
    yield
    native.retag_gradients(optimizer.param_groups, GRADIENTS)  # flash_clip rounds gradients of low precision here


def _observe_zero_grad(optimizer: Optimizer) -> CallHook:
    previous_phase = native.set_phase(ZERO_GRAD)
    if isinstance(optimizer, DPOptimizer):
        diagnosis.on_zero_grad(optimizer)
    try:
        forward_shapes.on_zero_grad(optimizer)
        yield from shapes.observe_zero_grad(optimizer)
    finally:
        # If the phase is still that of a step, the step has raised: no hook runs when the original optimizer raises.
        native.set_phase(IDLE if previous_phase in _STEP_PHASES else previous_phase)


def _tag(category: int, op: str) -> native.Tag:
    return native.Tag(category=category, op=native.op_id(op))


_STEP_PHASES = (CLIP, ADD_NOISE, OPTIMIZER_STEP)

# The tag under which each method runs, and its observation.
_METHODS: dict[str, tuple[native.Tag | None, Callable[[Any], CallHook]]] = {
    "pre_step": (None, _observe_pre_step),
    "clip_and_accumulate": (_tag(CLIPPING_TEMPORARIES, "clip_and_accumulate"), _observe_accumulate),
    "accumulate": (_tag(SUMMED_GRADIENTS, "accumulate"), _observe_accumulate),
    "begin_sum_check": (_tag(CLIPPING_TEMPORARIES, "begin_sum_check"), _observe_nothing),  # of flash_clip
    "clip_and_add_noise": (_tag(CLIPPING_TEMPORARIES, "clip_and_add_noise"), _observe_clip_and_add_noise),
    "add_noise": (_tag(GRADIENTS, "add_noise"), _observe_add_noise),  # the noise itself is tagged in _generate_noise
    "reduce_gradients": (_tag(COMMUNICATION, "reduce_gradients"), _observe_reduce_gradients),
    "zero_grad": (None, _observe_zero_grad),
}


def _tag_summed_gradients(optimizer: DPOptimizer) -> None:
    states = getattr(optimizer, "grad_state", None)  # where FSDPOptimizerFastGradientClipping keeps them
    if states is None:
        native.retag_attribute(optimizer.param_groups, "summed_grad", SUMMED_GRADIENTS)
        return
    for parameter in native.tensors_in(optimizer.param_groups):
        if parameter.requires_grad:
            owner = native.owner_of(parameter)
            native.retag(states[parameter]["summed_grad"], SUMMED_GRADIENTS, owner)


def tag_states(optimizer: Optimizer) -> None:
    """Tags the optimizer's states, such as momentum, each for its parameter's module."""
    for parameter, state in optimizer.state.items():
        native.retag((state,), OPTIMIZER_STATES, native.owner_of(parameter))


def _states_replaced(states: Any) -> bool:
    """Returns whether the update has replaced states that were tagged, as some optimizers do in each update.

    Only the first parameter's states are checked. If `states` is not a plain dict, they count as replaced.
    """
    return not isinstance(states, dict) or bool(native.retag_first_state(states, OPTIMIZER_STATES))


class _StepHooks:
    """The hooks around the original optimizer's update, which creates a parameter's states the first time."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._tagged_parameters = 0
        self.tag_states(optimizer)

    @contain("following the beginning of an optimizer's update")
    def before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        native.set_phase(OPTIMIZER_STEP)
        if len(args) > 1 and callable(args[1]):
            return (args[0], _between_updates(args[1]), *args[2:]), kwargs
        if callable(kwargs.get("closure")):
            return args, {**kwargs, "closure": _between_updates(kwargs["closure"])}
        return None

    @contain("following the end of an optimizer's update")
    def after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if len(optimizer.state) != self._tagged_parameters or _states_replaced(optimizer.state):
            self.tag_states(optimizer)
        native.set_phase(IDLE)
        native.end_step(True)
        shapes.after_step()
        diagnosis.after_step()

    @contain("tagging an optimizer's states")
    def tag_states(self, optimizer: Optimizer) -> None:
        self._tagged_parameters = len(optimizer.state)
        tag_states(optimizer)


def _between_updates(closure: Callable[[], Any]) -> Callable[[], Any]:
    """Wraps the closure of `step`, so that its forward and backward get their own phases and the update follows."""

    @wraps(closure)
    def call() -> Any:
        native.set_phase(IDLE)
        loss = closure()
        native.set_phase(OPTIMIZER_STEP)
        return loss

    return call


def observe_other_update(
    states_of: Callable[[Any], Sequence[Any]], optimizer: Any, *args: Any, **kwargs: Any
) -> CallHook:
    """Observes the update of an optimizer that is not one of torch's, but updates torch's tensors.

    Args:
        states_of: returns the optimizer's states.
        optimizer: the optimizer.
        args: further arguments of the update.
        kwargs: the same, by name.
    """
    native.set_phase(OPTIMIZER_STEP)
    try:
        yield
    finally:
        native.set_phase(IDLE)
    native.retag(states_of(optimizer), OPTIMIZER_STATES)
    native.end_step(True)
    shapes.after_step()
    diagnosis.after_step()


def wrap_methods(attachment: Attachment, optimizer: Optimizer) -> None:
    """Wraps the methods of an Opacus optimizer, or zero_grad of a plain one."""
    names = _METHODS if isinstance(optimizer, DPOptimizer) else ("zero_grad",)
    for name in names:
        if hasattr(type(optimizer), name):
            attachment.on_detach(partial(_restore_method, weakref.ref(optimizer), name))
            setattr(optimizer, name, MethodWrapper(optimizer, name))


def _restore_method(reference: "weakref.ref[Optimizer]", name: str) -> None:
    optimizer = reference()
    method = getattr(optimizer, name, None)
    if not isinstance(method, MethodWrapper):
        return  # the optimizer is gone, or another patch has wrapped ours and still calls it
    if method.replaced is None:
        delattr(optimizer, name)
    else:
        setattr(optimizer, name, method.replaced)


def register_step_hooks(attachment: Attachment, original: Optimizer) -> None:
    """Hooks the update of a plain optimizer, or of the one inside Opacus'."""
    hooks = _StepHooks(original)
    attachment.on_detach(original.register_step_pre_hook(hooks.before_step).remove)
    attachment.on_detach(original.register_step_post_hook(hooks.after_step).remove)
    attachment.on_detach(original.register_load_state_dict_post_hook(hooks.tag_states).remove)
