# SPDX-License-Identifier: Apache-2.0
"""Optimizers: clipping, noise, the step itself and zero_grad, of Opacus' optimizers and of plain ones.

Opacus' optimizers call their own methods through the instance, so attributes of the instance stand in for them. `step`
stays as it is, for learning rate schedulers replace it: `pre_step` opens it, and the hooks of the original optimizer
bracket exactly the update.
"""

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

from opacus.grad_sample import GradSampleHooksNoOp
from opacus.optimizers import DPOptimizer
from torch.optim import Optimizer

from opacus_memprof import _native
from opacus_memprof.hooks import observe, shapes
from opacus_memprof.hooks.attach import Attachment
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
)

Run = Callable[[], Any]

# Models in Opacus' mode no_op: nobody but the program knows when it sets `grad_sample`.
sampled_by_hand: "weakref.WeakSet[GradSampleHooksNoOp]" = weakref.WeakSet()


class Method:
    """An attribute of an optimizer that stands in for its method of that name.

    Holds the optimizer weakly: a cycle would keep its states alive after the program has dropped it. Never asks for the
    optimizer's __dict__: from then on the interpreter would look up each of its attributes the slow way.
    """

    __slots__ = ("__wrapped__", "_around", "_optimizer", "_tagged", "replaced")

    def __init__(self, optimizer: Optimizer, name: str) -> None:
        tag, self._around = _METHODS[name]
        found, method = getattr(optimizer, name), getattr(type(optimizer), name)
        own = getattr(found, "__func__", None) is method
        self.replaced = None if own else found  # somebody else's attribute, with the optimizer bound
        self.__wrapped__ = self.replaced or method
        self._tagged = self.__wrapped__ if tag is None else tag(self.__wrapped__)
        self._optimizer = weakref.ref(optimizer)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__wrapped__, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        optimizer = self._optimizer()
        if self.replaced is None:
            args = (optimizer, *args)
        return self._around(optimizer, lambda: self._tagged(*args, **kwargs))


def _pre_step(optimizer: DPOptimizer, run: Run) -> Any:
    _native.set_phase(CLIP)
    if sampled_by_hand:
        for parameter in _native.tensors_in(optimizer.param_groups):
            samples = getattr(parameter, "grad_sample", None)
            _native.retag((samples,), PER_SAMPLE_GRADIENTS, _native.owner_of(parameter))
    try:
        proceed = run()
    except BaseException as error:
        _native.set_phase(IDLE)
        if isinstance(error, Exception):
            observe.step_failed()
        raise
    if not proceed:  # a part of a logical batch: it is clipped and summed, and there is no update
        _native.set_phase(IDLE)
        _native.end_step(False)
    return proceed


def _accumulate(optimizer: DPOptimizer, run: Run) -> Any:
    result = run()
    _tag_summed_gradients(optimizer)
    return result


def _add_noise(optimizer: DPOptimizer, run: Run) -> Any:
    observe.noise_comes(optimizer)
    before = _native.set_phase(ADD_NOISE)
    try:
        result = run()
    except BaseException:
        _native.set_phase(IDLE)
        raise
    _native.set_phase(before)
    _native.retag_gradients(optimizer.param_groups, GRADIENTS)
    return result


def _reduce_gradients(optimizer: DPOptimizer, run: Run) -> Any:
    observe.gradients_reduced(optimizer)
    return run()


def _zero_grad(optimizer: Optimizer, run: Run) -> Any:
    before = _native.set_phase(ZERO_GRAD)
    try:
        return shapes.gradients_zeroed(optimizer, run)
    finally:
        # A step that is still on has failed: nothing tells when the original optimizer raises.
        _native.set_phase(IDLE if before in _OF_A_STEP else before)


def _tag(category: int, op: str) -> _native.Tag:
    return _native.Tag(category=category, op=_native.op_id(op))


_OF_A_STEP = (CLIP, ADD_NOISE, OPTIMIZER_STEP)

# What each method runs under, and what runs it.
_METHODS: dict[str, tuple[_native.Tag | None, Callable[[Any, Run], Any]]] = {
    "pre_step": (None, _pre_step),
    "clip_and_accumulate": (_tag(CLIPPING_TEMPORARIES, "clip_and_accumulate"), _accumulate),
    "accumulate": (_tag(SUMMED_GRADIENTS, "accumulate"), _accumulate),
    "add_noise": (_tag(GRADIENTS, "add_noise"), _add_noise),  # the noise itself has its own, in _generate_noise
    "reduce_gradients": (_tag(COMMUNICATION, "reduce_gradients"), _reduce_gradients),
    "zero_grad": (None, _zero_grad),
}


def _tag_summed_gradients(optimizer: DPOptimizer) -> None:
    states = getattr(optimizer, "grad_state", None)  # where FSDPOptimizerFastGradientClipping keeps them
    if states is None:
        _native.retag_attribute(optimizer.param_groups, "summed_grad", SUMMED_GRADIENTS)
        return
    for parameter in _native.tensors_in(optimizer.param_groups):
        if parameter.requires_grad:
            owner = _native.owner_of(parameter)
            _native.retag(states[parameter]["summed_grad"], SUMMED_GRADIENTS, owner)


def tag_states(optimizer: Optimizer) -> None:
    """Momentum and the like, to their parameters' modules."""
    for parameter, state in optimizer.state.items():
        _native.retag((state,), OPTIMIZER_STATES, _native.owner_of(parameter))


def _replaced(states: Any) -> bool:
    """Whether the states are others than those that were tagged, as in optimizers that compute new ones in each update.
    The first parameter's speak for all. Somebody's own kind of mapping may hold anything."""
    return not isinstance(states, dict) or bool(_native.retag_first_state(states, OPTIMIZER_STATES))


class _Step:
    """The hooks around the original optimizer's update. States are made lazily, in a parameter's first update."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._known = 0
        self.loaded(optimizer)

    def before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        _native.set_phase(OPTIMIZER_STEP)

    def after(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if len(optimizer.state) != self._known or _replaced(optimizer.state):
            self.loaded(optimizer)
        _native.set_phase(IDLE)
        _native.end_step(True)

    def loaded(self, optimizer: Optimizer) -> None:
        self._known = len(optimizer.state)
        tag_states(optimizer)


def stand_in_for_methods(attachment: Attachment, optimizer: Optimizer) -> None:
    """An Opacus optimizer's own methods, or zero_grad of a plain one."""
    names = _METHODS if isinstance(optimizer, DPOptimizer) else ("zero_grad",)
    for name in names:
        if hasattr(type(optimizer), name):
            setattr(optimizer, name, Method(optimizer, name))
            attachment.on_detach(partial(_restore_method, weakref.ref(optimizer), name))


def _restore_method(reference: "weakref.ref[Optimizer]", name: str) -> None:
    optimizer = reference()
    method = getattr(optimizer, name, None)
    if not isinstance(method, Method):
        return  # gone, or somebody has put theirs on top
    if method.replaced is None:
        delattr(optimizer, name)
    else:
        setattr(optimizer, name, method.replaced)


def hook_steps(attachment: Attachment, original: Optimizer) -> None:
    """The update itself, of a plain optimizer or of the one inside Opacus'."""
    step = _Step(original)
    handles = (
        original.register_step_pre_hook(step.before),
        original.register_step_post_hook(step.after),
        original.register_load_state_dict_post_hook(step.loaded),
    )
    for handle in handles:
        attachment.on_detach(handle.remove)
