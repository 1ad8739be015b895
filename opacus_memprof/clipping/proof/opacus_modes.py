# SPDX-License-Identifier: Apache-2.0
"""Checks the steps of Opacus' own modes.

The clipped sum of a mode is compared with clipping by hand before noise is drawn and anything is changed.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from opacus.grad_sample import AbstractGradSampleModule
from opacus.optimizers import DPOptimizerFastGradientClipping
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.utils.hooks import RemovableHandle

from opacus_memprof.clipping.agreement import Agreement, computing_device, inner_model, spans_ranks
from opacus_memprof.clipping.arguments import Check, is_checked
from opacus_memprof.clipping.forwards.state import GivenRows, check_given_once
from opacus_memprof.clipping.proof.by_hand import ForwardByHand, Gradients, norm
from opacus_memprof.clipping.proof.certificate import Certificate
from opacus_memprof.errors import MemprofError

_STABILITY = 1e-6  # as in Opacus
_TOLERANCE = 1e-3
_TOLERANCE_LOW_PRECISION = 5e-2
_TOLERANCE_TF32 = 5e-2  # other kernels compute one sample than a batch, and may round to another side of a ReLU
_TOLERANCE_SAME_BATCH = 2e-5
"""The relative difference of two backward passes over the same batch, by the same kernels."""
_FLOOR = 1e-2
"""A parameter's error is relative to its own sum, or to this fraction of the sum of all parameters if that is larger.

A gradient that is zero except for rounding, such as the bias of an attention key, has no digits to compare.
"""


def refuse_check(given: Mapping[str, Any], check: Check) -> None:
    """Raises MemprofError if steps cannot be checked with these arguments of make_private."""
    if not given.get("batch_first", True):
        raise MemprofError(
            f"check={check!r} needs batch_first=True: transpose the inputs so that the batch comes first, or pass "
            "check='off'."
        )


def check_steps(
    prepared: tuple[Any, ...], given: Mapping[str, Any], check: Check, certificate: Certificate
) -> StepCheck:
    """Makes the optimizer that make_private returned check its steps.

    Args:
        prepared: the return value of Opacus' make_private.
        given: the arguments of Opacus' make_private.
        check: which steps are checked.
        certificate: records the checks.
    """
    module = given["module"]
    if isinstance(module, AbstractGradSampleModule):
        module = module._module
    return StepCheck(
        given["grad_sample_mode"],
        inner_model(module),
        prepared[0],
        prepared[1],
        check,
        certificate,
        spans_ranks(module),
    )


class StepCheck:
    """Compares the clipped sums of an optimizer's steps with clipping by hand.

    Args:
        mode: the grad_sample_mode, for messages.
        model: the plain model.
        private: the GradSampleModule, or the hooks.
        optimizer: the DPOptimizer.
        check: which steps are checked.
        certificate: records the checks.
        spans_ranks: whether ranks take steps together. An error of one rank is then raised on all ranks, in the last
            part of a step, because ranks may split their batches into different numbers of parts.
    """

    def __init__(
        self,
        mode: str,
        model: nn.Module,
        private: Any,
        optimizer: Any,
        check: Check,
        certificate: Certificate,
        spans_ranks: bool = False,
    ) -> None:
        self.mode, self.check, self.certificate = mode, check, certificate
        self.steps_checked = 0
        self._model, self._private, self._optimizer = model, private, optimizer
        self._names = {p: name for name, p in model.named_parameters()}
        self._step = 1
        self._is_running = False
        self._forwards: list[ForwardByHand] = []
        self._given: list[GivenRows] = []  # in earlier physical batches of this step
        self._expected: list[torch.Tensor] | None = None
        self._is_two_pass = isinstance(optimizer, DPOptimizerFastGradientClipping)
        self._agreement = Agreement(computing_device(next(model.parameters()))) if spans_ranks else None
        self._is_sharded = isinstance(model, FSDPModule)
        self._error: MemprofError | None = None
        self._arrived: dict[nn.Parameter, torch.Tensor] = {}  # gradients that autograd has formed in this part
        self._watched: list[RemovableHandle] = []
        _call_after(optimizer, "accumulate" if self._is_two_pass else "clip_and_accumulate", self._after_sums)
        _call_after(optimizer, "zero_grad", self._after_zero_grad)
        _call_after(private, "remove_hooks", self._remove_hooks)
        self._handles = [
            model.register_forward_pre_hook(_OwnHook(self._before_forward), with_kwargs=True),
            model.register_forward_hook(_OwnHook(self._after_forward)),
        ]

    def _remove_hooks(self) -> None:
        self._forget_part()
        while self._handles:
            self._handles.pop().remove()

    # --- methods that the program calls ---
    def _before_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._is_counted() and module.training and torch.is_grad_enabled():
            self._forwards.append(ForwardByHand(module, args, kwargs))
            if not self._watched and not self._is_sharded:  # FSDP2 passes the gradients of shards by
                self._watched = [p.register_hook(functools.partial(self._note, p)) for p in self._optimizer.params]

    def _note(self, parameter: nn.Parameter, gradient: torch.Tensor) -> None:
        if self._is_counted():
            known = self._arrived.get(parameter)
            # Cloned, because autograd adds the next backward's to the gradient in place.
            self._arrived[parameter] = gradient.detach().clone() if known is None else known + gradient.detach()

    def _forget_part(self) -> None:
        """Forgets the forwards and gradients of a physical batch."""
        self._forwards.clear()
        self._arrived.clear()
        while self._watched:
            self._watched.pop().remove()

    def _after_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._is_counted() and self._forwards and not self._forwards[-1].shapes:
            self._forwards[-1].watch(output, self._is_counted)

    def _is_counted(self) -> bool:
        """Returns whether the running pass belongs to a checked step. Ghost's second, hookless backward does not."""
        enabled = getattr(self._private, "hooks_enabled", True)
        return enabled and not self._is_running and is_checked(self.check, self._step)

    def _after_zero_grad(self) -> None:
        if not self._is_two_pass:  # whose backward calls zero_grad itself
            self._forwards = [each for each in self._forwards if not each.cotangents]
            self._arrived.clear()

    def _after_sums(self) -> None:
        is_last = not self._optimizer._check_skip_next_step(pop_next=False)
        if is_checked(self.check, self._step) and self._error is None:
            try:
                self._compare()
            except MemprofError as raised:
                self._error = raised
            finally:
                self._forget_part()
        if is_checked(self.check, self._step) and (is_last or self._agreement is None):
            error, self._error = self._error, None
            try:
                if self._agreement is not None:
                    self._agreement.settle(error)
                elif error is not None:
                    raise error
            except MemprofError as refusal:
                self.certificate.refuse(refusal)
                self._drop_step()
                raise
            self.steps_checked += is_last
            if is_last:
                self.certificate.checks.add("mixing", self._step)
                self.certificate.checks.add("clipped_sum", self._step)
        if is_last:
            self._expected = None
            self._given.clear()
            self._step += 1
            self.certificate.count_step(self._optimizer.max_grad_norm, self._optimizer.noise_multiplier)

    def _drop_step(self) -> None:
        """Drops the gradients of a refused step. Parameters, accountant and generators do not change."""
        self._expected = None
        self._given.clear()
        self._optimizer._is_last_step_skipped = False
        self._optimizer.zero_grad()

    # --- the comparison ---
    def _compare(self) -> None:
        self._refuse_bounds()
        parameters = self._optimizer.params
        forwards = [each for each in self._forwards if each.cotangents and (each.samples or self._is_sharded)]
        given = [each.given for each in forwards]
        check_given_once([[rows] for rows in given], self._given)
        self._given += given
        if self._expected is None:
            self._expected = [torch.zeros_like(p, dtype=_wide(p)) for p in parameters]
        with self._running():
            if self._is_sharded:
                self._add_of_all_ranks(forwards, parameters)
            else:
                for forward in forwards:
                    forward.refuse_without_samples()
                    forward.refuse_mixing()
                    self._add_clipped(forward.per_sample_gradients(parameters), self._scale(forward))
        self._raise_on_difference(parameters, any(each.is_low_precision for each in forwards))
        with self._running():
            self._refuse_beside(forwards, parameters)

    @contextlib.contextmanager
    def _running(self) -> Iterator[None]:
        """Runs the model by hand inside the context, without the mode's hooks."""
        self._is_running = True
        was_enabled = getattr(self._private, "hooks_enabled", None)
        try:
            if was_enabled:
                self._private.disable_hooks()
            yield
        finally:
            self._is_running = False
            if was_enabled:
                self._private.enable_hooks()

    def _add_of_all_ranks(self, forwards: list[ForwardByHand], parameters: list[nn.Parameter]) -> None:
        """Adds the clipped gradients of all ranks' samples.

        The ranks run the model together. An error of one rank ends the check on all ranks, so that none waits.

        Raises:
            MemprofError: the check failed on a rank, or ranks ran different numbers of backward passes.
        """
        agreement = self._agreement
        assert agreement is not None
        ((fewest, most),) = agreement.settle(None, [len(forwards)])
        if fewest < most:
            raise MemprofError(
                f"check={self.check!r}: a rank has run {fewest} backward passes in this part of a step, and another "
                f"one {most}; these numbers must be equal; otherwise pass check='off'."
            )
        for forward in forwards:
            ((_, samples),) = agreement.settle(_error_of(forward.refuse_without_samples), [forward.samples])
            agreement.settle(_error_of(lambda f=forward, n=samples: f.refuse_mixing(n)))  # type: ignore[misc]
            ranks, scale = agreement.world_size, self._scale(forward)
            shards = forward.shards_of_gradients(parameters, ranks, agreement.rank, samples, scale)
            self._add_clipped(shards, 1.0, 1 / ranks)  # FSDP2 averages over the ranks

    def _refuse_beside(self, forwards: list[ForwardByHand], parameters: list[nn.Parameter]) -> None:
        """Refuses gradients that do not come through the outputs, which the modes leave out.

        Expanded weights form no others.

        Raises:
            MemprofError: there are some.
        """
        rest = self._arrived.copy()
        for forward in forwards if rest else ():
            for parameter, gradient in zip(parameters, forward.sum_of_gradients(parameters), strict=True):
                if gradient is not None and parameter in rest:
                    rest[parameter] = rest[parameter] - gradient
        is_low = any(each.is_low_precision for each in forwards)
        tolerance = _TOLERANCE_LOW_PRECISION if is_low else _TOLERANCE_SAME_BATCH
        floor = _FLOOR * math.hypot(*map(norm, self._arrived.values()))
        for parameter, left in rest.items():
            if norm(left) > tolerance * max(norm(self._arrived[parameter]), floor):
                raise MemprofError(
                    f"grad_sample_mode={self.mode!r} leaves out a part of the gradient of "
                    f"{self._names.get(parameter, 'a parameter')} in step {self._step}, which does not come through "
                    "the outputs of the model, as of a penalty on parameters in the loss; the step was not taken. Use "
                    "weight_decay of the optimizer for a penalty, and call the model itself."
                )

    def _refuse_bounds(self) -> None:
        bounds = getattr(self._optimizer, "max_grad_norms", None)
        bound = float(self._optimizer.max_grad_norm)
        if bounds is not None and not math.isclose(math.hypot(*map(float, bounds)), bound, rel_tol=1e-4):
            raise MemprofError(
                f"the noise is in proportion to max_grad_norm={bound:g}, but clipping='per_layer' clips to bounds that "
                f"come to {math.hypot(*map(float, bounds)):g}: a scheduler changed one without the other, so keep the "
                "bounds constant or use clipping='flat'."
            )

    def _scale(self, forward: ForwardByHand) -> float:
        """Returns the factor that turns gradients of a mean loss into gradients of each sample's loss."""
        return forward.samples if self._optimizer.loss_reduction == "mean" else 1

    def _add_clipped(self, samples: Iterable[Gradients], scale: float, weight: float = 1.0) -> None:
        assert self._expected is not None
        for gradients in samples:
            factors = self._factors(gradients, scale)
            for total, gradient, factor in zip(self._expected, gradients, factors, strict=True):
                if gradient is not None:
                    total += (weight * factor * scale) * gradient.to(total.dtype)

    def _factors(self, gradients: Gradients, scale: float) -> list[float]:
        """Returns the clip factors of one sample, by parameter."""
        norms = [0.0 if g is None else scale * norm(g) for g in gradients]
        bounds = getattr(self._optimizer, "max_grad_norms", None)
        if bounds is not None:
            return [_factor(float(bound), size) for bound, size in zip(bounds, norms, strict=True)]
        return [_factor(float(self._optimizer.max_grad_norm), math.hypot(*norms))] * len(gradients)

    def _raise_on_difference(self, parameters: list[nn.Parameter], is_low_precision: bool) -> None:
        assert self._expected is not None
        norms = [norm(each) for each in self._expected]
        if not all(map(math.isfinite, norms)):
            raise MemprofError(
                f"step {self._step} cannot be checked: a sample's gradient has NaN or infinite elements; lower the "
                "learning rate, or leave such samples out of the data."
            )
        tolerance = self._tolerance(parameters, is_low_precision)
        floor = _FLOOR * math.hypot(*norms)
        worst, error = None, tolerance
        for parameter, expected, size in zip(parameters, self._expected, norms, strict=True):
            found = self._found(parameter)
            difference = norm(found.to(expected.dtype).view_as(expected) - expected)
            relative = difference / max(size, floor) if difference else 0.0
            if not relative <= error:
                worst, error = parameter, relative
        if worst is not None:
            raise MemprofError(
                f"grad_sample_mode={self.mode!r} does not clip this model exactly: in step {self._step} the clipped "
                f"gradient of {self._names.get(worst, 'a parameter')} differs by {error:.2g} of its size from clipping "
                "by hand, one sample at a time; the step was not taken. Use grad_sample_mode='flash_clip', or "
                "opacus_memprof.clipping.verify to find a mode that is exact."
            )

    def _found(self, parameter: Any) -> torch.Tensor:
        state = getattr(self._optimizer, "grad_state", None)  # of FSDPOptimizerFastGradientClipping
        found: torch.Tensor = parameter.summed_grad if state is None else state[parameter]["summed_grad"]
        return found

    def _tolerance(self, parameters: list[nn.Parameter], is_low_precision: bool) -> float:
        if is_low_precision:
            return _TOLERANCE_LOW_PRECISION
        # Reading allow_tf32 raises if the program has set fp32_precision.
        cudnn: Any = torch.backends.cudnn
        has_tf32 = "tf32" in (torch.backends.cuda.matmul.fp32_precision, cudnn.conv.fp32_precision)
        return _TOLERANCE_TF32 if has_tf32 and any(p.is_cuda for p in parameters) else _TOLERANCE


def _factor(bound: float, norm: float) -> float:
    return min(1.0, bound / (norm + _STABILITY))


def _wide(parameter: nn.Parameter) -> torch.dtype:
    """Returns the dtype in which sums are computed by hand."""
    return torch.promote_types(parameter.dtype, torch.float32)


class _OwnHook:
    """A hook of the check on a model. Copies of the model, such as a teacher, are not checked: their hook does nothing.

    Args:
        method: what is called; None for nothing.
    """

    def __init__(self, method: Callable[..., None] | None = None) -> None:
        self._method = method

    def __call__(self, *args: Any) -> None:
        if self._method is not None:
            self._method(*args)

    def __reduce__(self) -> tuple[Any, ...]:
        return _OwnHook, ()


class _CallAfter:
    """A method of one object that calls `after()` when it has returned. A copy of the object has the plain method."""

    def __init__(self, owner: Any, name: str, after: Callable[[], None]) -> None:
        self._owner, self._name, self._method, self._after = owner, name, getattr(owner, name), after

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        result = self._method(*args, **kwargs)
        self._after()
        return result

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self._owner, self._name)  # of the copy, which does not have this object yet


def _call_after(owner: Any, name: str, after: Callable[[], None]) -> None:
    """Calls `after()` whenever a method of one object has returned."""
    setattr(owner, name, _CallAfter(owner, name, after))


def _error_of(check: Callable[[], None]) -> MemprofError | None:
    """Returns the error that a check raises, or None."""
    try:
        check()
    except MemprofError as error:
        return error
    return None
