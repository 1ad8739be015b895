# SPDX-License-Identifier: Apache-2.0
"""The optimizer of grad_sample_mode="flash_clip": Opacus' flat clipping and noise, from tensors that backward kept."""

import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch
from opacus.optimizers import DPOptimizer
from opacus.optimizers.optimizer import _check_processed_flag, _mark_as_processed
from torch import nn
from torch._compile import _disable_dynamo
from torch.optim import Optimizer

from opacus_memprof.clipping.arguments import (
    ClippingSettings,
    check_expected_size,
    check_same_reduction,
    check_trained,
    is_bound,
    refuse_closures,
)
from opacus_memprof.clipping.bookkeeping import Bookkeeping
from opacus_memprof.clipping.bookkeeping.backward_pass import Limit, SumCheck, refuse_capture
from opacus_memprof.clipping.forwards.repetition import Modes
from opacus_memprof.clipping.kernels import sums
from opacus_memprof.clipping.module.hooks import FlashClipHooks
from opacus_memprof.clipping.sampling import AnnouncedParts, DrawnBatches, unexpected_size
from opacus_memprof.clipping.workspace import batches, is_low_precision, rounded_target
from opacus_memprof.errors import MemprofError

_BYTES_AT_ONCE = 64 << 20  # of sums that are rounded together


class DPOptimizerFlashClip(ClippingSettings, DPOptimizer):  # type: ignore[misc]
    """DPOptimizer whose clipped sums come from flash_clip.

    Clip factors, noise (from the same generator) and skipped steps are those of opacus.optimizers.DPOptimizer. One
    sample changes the sum by at most `max_grad_norm`.

    The sums of bfloat16 and float16 parameters are formed in float32, and so is their noise. They are rounded once,
    when they become `p.grad`.

    A step that raises MemprofError drops the gradients. Parameters, the optimizer's state, the accountant and the
    generators stay as they were. (The generator of secure_mode has no state that could be restored.)

    Args:
        optimizer: the wrapped optimizer; it must have every trainable parameter of the module.
        module: the flash_clip module (or hooks object).
        max_grad_norm: clipping bound; a list of bounds for clipping="per_layer".
        kwargs: see opacus.optimizers.DPOptimizer.

    Attributes:
        ranks: the number of ranks whose batches make up one step; `expected_batch_size` is that of each rank.

    Raises:
        MemprofError: the optimizer lacks a trainable parameter, or its step needs other gradients than one noisy sum;
            its loss_reduction is not the module's; the noise multiplier is negative or not finite.
    """

    bookkeeping: Bookkeeping
    ranks = 1
    _step_supports_amp_scaling = True  # lets GradScaler call `step`, which refuses it with a reason
    _is_last_step_skipped: bool
    _is_alone = True  # whether a sum is complete when it is formed
    _params_of_step: list[Any] | None = None  # while a step is prepared
    drawn: DrawnBatches | None = None
    """The batches that the loader has drawn; None if it is not known."""

    def __init__(
        self, optimizer: Optimizer, *, module: FlashClipHooks, max_grad_norm: float | list[float], **kwargs: Any
    ) -> None:
        check_same_reduction(kwargs.get("loss_reduction", "mean"), module.loss_reduction)
        refuse_closures(optimizer)
        self.bookkeeping = module.bookkeeping
        rule = module.bookkeeping.rule
        self._module = module
        super().__init__(optimizer, max_grad_norm=rule.bound if rule.by_parameter else max_grad_norm, **kwargs)
        self.bookkeeping.give_to(optimizer)
        self._names: dict[nn.Parameter, str] = {}
        self._follow_model()
        self._sum_check: SumCheck | None = None
        self._largest_sum: float | None = None
        self._has_warned = False
        self._earlier_noise = sums.EarlierNoise()
        self._parts = AnnouncedParts(self._step_skip_queue)
        module.certificate.describe_clipping(
            rule.clipping, rule.bounds, self.max_grad_norm, self.noise_multiplier, self.loss_reduction
        )

    @property
    def params(self) -> list[Any]:
        """The trained parameters. While a step is prepared they stay the same, and are not collected again."""
        found: list[Any] = super().params if self._params_of_step is None else self._params_of_step
        return found

    @property
    def dropped_samples(self) -> list[int]:
        """The samples that flash_clip_nonfinite="drop" has dropped in the last or the current step.

        These are indices in the logical batch, counted through its physical batches. Not private.
        """
        return self.bookkeeping.dropped

    @property
    def dropped_samples_in_all_steps(self) -> int:
        """The number of samples that were dropped since the optimizer was made. Not private."""
        return self.bookkeeping.dropped_in_all

    @property
    def accumulated_iterations(self) -> int:
        return self.bookkeeping.passes_in_last_step

    def _follow_model(self) -> None:
        """Adapts to changes of which parameters the model trains.

        Raises:
            MemprofError: the optimizer and the model train different parameters.
        """
        names, params = self._module.trained, self.params
        if names is self._names and len(params) == len(names):
            return
        check_trained(names, params, self.bookkeeping.rule)
        gone: dict[Any, str] = {each: name for each, name in self._names.items() if each not in names}
        lost = [name for each, name in gone.items() if each.summed_grad is not None]
        for each in gone:
            each.summed_grad = None  # a later step that trains it again begins without it
        if lost and self._is_last_step_skipped:
            raise MemprofError(
                f"{', '.join(lost)} was trained in earlier physical batches of this step, and is not any more: freeze "
                "parameters between steps, not within one."
            )
        self._names = names
        self.bookkeeping.places = {parameter: i for i, parameter in enumerate(params)}
        parameter: Any  # with Opacus' attributes
        for parameter in params:
            parameter.summed_grad = getattr(parameter, "summed_grad", None)

    def _check_backward(self) -> None:
        """Checks that backward has delivered all gradients.

        In recorded steps, also checks that the outputs explain all of them.
        """
        self._follow_model()
        self.check_own_rule()
        self.bookkeeping.check_complete(self.params, self._names, self._module.called_layers())
        self._module.check_explained()

    def clip_and_accumulate(self) -> None:
        """Adds the clipped sums of every backward since the last step to `p.summed_grad`.

        Adding or removing one sample changes the sums by at most `max_grad_norm`, in L2 norm over all parameters.

        Raises:
            MemprofError: a parameter has no gradient.
        """
        self._check_backward()
        parameter: Any  # with Opacus' attributes
        for parameter, total in self.bookkeeping.pop_clipped_sums():
            if parameter.summed_grad is None:
                parameter.summed_grad = total
            else:
                parameter.summed_grad += total
            del total

    def begin_sum_check(self) -> None:
        """Queues the check that the clipped sums are not larger than their samples allow.

        `pre_step` reads the result after noise has been queued.
        """
        self._sum_check = SumCheck()
        self._sum_check.add([parameter.summed_grad for parameter in self.params])
        self._sum_check.begin()

    def noise_bound(self) -> float:
        """Returns the bound to which the noise is proportional: the largest bound of a sample of this step.

        It holds even if `max_grad_norm` has changed between the physical batches.
        """
        return self.bookkeeping.limit.bound or self.max_grad_norm

    def noise_std(self) -> float:
        """Returns the standard deviation of the noise."""
        return float(self.noise_multiplier * self.noise_bound())

    def add_noise(self, divisor: float = 1) -> None:
        """Adds Opacus' noise to `p.summed_grad`, divides it, and assigns it to `p.grad` in the parameter's dtype.

        The standard deviation is `noise_std()`: `noise_multiplier` times the bound that samples were clipped to. Noise
        is added in place: the sum without noise, which is as large as the model, is not needed any more.

        Args:
            divisor: the divisor of the noisy sums. `pre_step` passes `grad_divisor()` and does not call `scale_grad`,
                so that noise and division take one pass over memory.

        Raises:
            ValueError: `zero_grad` was not called since the last step (as in Opacus).
        """
        self._add_noise_to(self.params, divisor)

    def clip_and_add_noise(self) -> None:
        """Runs `clip_and_accumulate`, `begin_sum_check` and `add_noise` for some parameters at a time.

        Thus few sums are in float32 at once.
        """
        self._check_backward()
        self.bookkeeping.sort()
        self._sum_check = SumCheck()
        sums = self.bookkeeping.in_order(self.bookkeeping.pop_clipped_sums())
        for some in batches(sums, _BYTES_AT_ONCE, lambda each: each[1].nbytes):
            params: list[Any] = [parameter for parameter, _ in some]
            for parameter in params:
                _, parameter.summed_grad = some.pop(0)
            self._add_noise_to(params, self.grad_divisor(), self._sum_check)
        self._sum_check.begin()

    def _rounds_at_once(self) -> bool:
        """Returns whether each sum can be rounded as soon as it is formed, because nothing more is added to it."""
        if not self._is_alone or self.bookkeeping.passes != 1 or self.bookkeeping.limit.samples:
            return False
        return any(is_low_precision(parameter.dtype) for parameter in self.params)

    def _add_noise_to(self, params: list[Any], divisor: float, check: SumCheck | None = None) -> None:
        """Does what `add_noise` does for some parameters.

        Args:
            params: the parameters.
            divisor: see `add_noise`.
            check: gets the norms of the sums without noise. The noisy sums are then rounded in the same pass over
                memory, into tensors beside the sums.
        """
        noisy: list[Any] = []
        totals: list[torch.Tensor] = []
        noiseless: list[torch.Tensor] = []
        _check_processed_flag([parameter.summed_grad for parameter in params])
        for parameter in params:
            total = parameter.summed_grad
            if self._gets_noise(parameter):
                noisy.append(parameter)
                totals.append(total)
            else:
                noiseless.append(total)
            del total
        targets = norms = None
        if check is not None:
            targets = [rounded_target(parameter, parameter.summed_grad) for parameter in noisy]
            norms = torch.zeros(len(totals), dtype=torch.float64, device=totals[0].device)
            check.add_norms(norms)
        sums.add_noise(
            totals,
            std=self.noise_std(),
            generator=self.generator,
            secure_mode=self.secure_mode,
            divisor=divisor,
            targets=targets,
            norms=norms,
        )
        if targets is not None:
            for parameter, target in zip(noisy, targets, strict=True):
                parameter.summed_grad = target  # releases the sum in float32
        del totals
        sums.divide(noiseless, divisor)
        for parameter in params:
            if self._is_final(parameter):
                self._assign_gradient(parameter)
            else:
                _mark_as_processed(parameter.summed_grad)

    def _is_final(self, parameter: nn.Parameter) -> bool:
        """Returns whether `p.summed_grad` with its noise can be rounded, because nothing more is added to it."""
        return True

    def _assign_gradient(self, parameter: Any) -> None:
        total = parameter.summed_grad
        if total.dtype != parameter.dtype and not parameter.is_complex():
            total = parameter.summed_grad = total.to(parameter.dtype)  # releases the sum in float32
        parameter.grad = self._as_gradient(parameter, total)
        _mark_as_processed(total)

    def _as_gradient(self, parameter: nn.Parameter, total: torch.Tensor) -> torch.Tensor:
        if parameter.is_complex():
            return torch.view_as_complex(total)
        return total if total.shape == parameter.shape else total.view_as(parameter)

    def _gets_noise(self, parameter: nn.Parameter) -> bool:
        """Returns whether this process adds the noise of the parameter."""
        return True

    @_disable_dynamo
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        try:
            found: float | None = super().step(closure)
        finally:
            self._module.end_step()
        return found

    def pre_step(self, closure: Callable[[], float] | None = None) -> bool:
        """Clips and, unless the step is skipped (BatchMemoryManager), adds noise and averages.

        Raises:
            MemprofError: a norm is not finite, the clipped sum is larger than its samples allow, or the noise would be
                that of an earlier step. All gradients are then dropped, and no parameter is changed. Also raised while
                a CUDA graph is captured.
            ValueError: `zero_grad` was not called since the last step (as in Opacus).
        """
        refuse_capture()
        self._params_of_step = self.params
        try:
            with Modes().restored():  # the program's may change any operation, those on sums and noise, too
                self._module.begin_step()
                return self._pre_step()
        finally:
            self._params_of_step = None

    def _pre_step(self) -> bool:
        if self.bookkeeping.passes:  # otherwise this is the step of the refused forward
            self._give_up_refused()
        if self._parts.are_left(self._is_last_step_skipped, self.drawn):
            self._give_up_unfinished(keeps_backward=True)
        left_part = self._parts.begin_step(self._module.layer_hooks.forward)
        self.bookkeeping.refusal.error = self.bookkeeping.refusal.error or left_part
        skips = self._check_skip_next_step()
        for parameter in self.params[:1]:  # before anything is added to it; add_noise checks all sums
            _check_processed_flag(getattr(parameter, "summed_grad", None))
        generators = self._generator_states()
        begun_with = {} if skips else self._module.take_random_states()
        draws = not skips and self.noise_multiplier > 0 and any(map(self._gets_noise, self.params))
        states = generators.hashes(begun_with) if draws else set()
        try:
            if (repeated := self._earlier_noise.refusal(states)) is not None:
                self.bookkeeping.refusal.add(repeated)
            self._prepare_step(skips)
        except BaseException as error:
            generators.restore()
            if isinstance(error, MemprofError):
                self._module.certificate.refuse(error)
                self._is_last_step_skipped = False
                self.bookkeeping.refusal.raised = 0
                self._module.forget_calls()
                self.zero_grad()
            raise
        if skips:
            self._is_last_step_skipped = True
            return False
        self._earlier_noise.add(states)
        self._module.certificate.count_step(
            self.noise_bound(), self.noise_multiplier, self._largest_sum, self.dropped_samples_in_all_steps
        )
        if self.step_hook:
            self.step_hook(self)
        self._is_last_step_skipped = False
        return True

    def signal_skip_step(self, do_skip: bool = True) -> None:
        """Announces a part of a logical batch: whether its step is skipped.

        If BatchMemoryManager's loader is iterated anew in the middle of a logical batch, this batch is given up: its
        clipped sums and announced steps are dropped. Otherwise they would enter a step of the next logical batch, which
        may have the same samples.
        """
        if self._parts.begin_iteration(sys._getframe(1)):
            self._give_up_unfinished()
        self._parts.announce(self._module.layer_hooks.forward, self.drawn)
        super().signal_skip_step(do_skip)

    def _give_up_unfinished(self, keeps_backward: bool = False) -> None:
        """Gives up the logical batch of which parts are kept or announced. The last backward may be another's."""
        if not self._is_last_step_skipped and not self._step_skip_queue:
            return
        if self._is_last_step_skipped:
            warnings.warn(
                "BatchMemoryManager begins anew, or was left, before a logical batch has come to its step: what was "
                "clipped of this batch is left out.",
                stacklevel=4,
            )
        self._parts.give_up(self._module.layer_hooks.forward)
        self._is_last_step_skipped = False
        self.bookkeeping.refusal.raised = 0
        if not keeps_backward:
            self.bookkeeping.clear()
        self._forget_sums()

    def _give_up_refused(self) -> None:
        """Gives up the logical batch of forwards that were refused and did not come to a step."""
        refused, self.bookkeeping.refusal.raised = self.bookkeeping.refusal.raised, 0
        if refused:
            self._parts.give_up(self._module.layer_hooks.forward, refused)  # each was announced as a part
            self._is_last_step_skipped = False
            self._module.forget_calls()
            self._forget_sums()

    def _forget_sums(self) -> None:
        """Drops the clipped sums, also those of skipped steps."""
        for parameter in self.params:
            parameter.summed_grad = None
        self.bookkeeping.begin_step()

    def __getstate__(self) -> Any:
        raise MemprofError(
            f"a {type(self).__name__} cannot be copied or pickled, because it would not be its module's any more: save "
            "state_dict(), or make the copied model private."
        )

    def _generator_states(self) -> sums.GeneratorStates:
        if self.secure_mode:
            return sums.GeneratorStates([])
        if self.generator is not None:
            return sums.GeneratorStates([self.generator])
        devices = {parameter.device for parameter in self.params}
        return sums.GeneratorStates([sums.default_generator(device) for device in devices])

    def _prepare_step(self, skips: bool) -> None:
        """Does the part of `pre_step` that precedes the step count. `skips` says whether the step is skipped."""
        if not self.bookkeeping.refusal.is_deferred:
            self.bookkeeping.refusal.pop()  # of a forward in another thread, whose program may not have seen it
        if self.__dict__.pop("found_inf", None) is not None:  # GradScaler has set both
            self.__dict__.pop("grad_scale", None)
            raise MemprofError(
                "GradScaler multiplies the loss before the gradients of samples are clipped, so that nearly all are "
                "clipped: train without it, in bfloat16 or float32, which need no loss scale."
            )
        if skips:
            self.clip_and_accumulate()
            self._check_norms()
            return
        self._check_number_of_samples()
        if self._rounds_at_once():
            self.clip_and_add_noise()
        else:
            self.clip_and_accumulate()
            self.begin_sum_check()
            self.add_noise(self.grad_divisor())
        self._check_norms()  # last, so that the device has work while the host waits
        self._check_sums()

    def _check_number_of_samples(self) -> None:
        """Warns once if steps have far more samples than the loader draws, or mostly another number than it has drawn.

        Called before anything changes, because a program may turn warnings into errors.

        Raises:
            MemprofError: the expected number of samples, by which a mean loss is divided, is not positive and finite.
        """
        if self.loss_reduction == "mean":
            check_expected_size(self.expected_batch_size)
        own = [each.batch_size for each in self.bookkeeping.backward_passes()]
        expected = self.expected_batch_size * max(1, len(own)) if is_bound(self.expected_batch_size) else 0
        warning = unexpected_size(self.bookkeeping.limit.samples + sum(own), expected, self.drawn)
        if warning and not self._has_warned:
            warnings.warn(warning, stacklevel=5)
            self._has_warned = True

    def _check_norms(self) -> None:
        self.bookkeeping.check_norms()

    def _check_sums(self) -> None:
        check, self._sum_check = self._sum_check, None
        assert check is not None
        self._largest_sum = check.raise_if_beyond(
            self._limit(), lambda: [self._names[parameter] for parameter in self.params]
        )

    def _limit(self) -> Limit:
        """Returns the limit of the sums that this process has before `reduce_gradients`."""
        return self.bookkeeping.limit

    def grad_divisor(self) -> float:
        """Returns the divisor of the gradients: the expected batch size for a mean loss, otherwise 1."""
        is_mean = self.loss_reduction == "mean"
        return float(self.expected_batch_size * self.accumulated_iterations * self.ranks) if is_mean else 1.0

    def scale_grad(self) -> None:
        """Divides the gradients by `grad_divisor()`, unless `add_noise` has done so."""
        sums.divide([p.grad for p in self.params], self.grad_divisor())

    @_disable_dynamo
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops the gradients and the tensors that backward has kept, but not the clipped sums of skipped steps.

        Unlike in Opacus, gradients become None by default (as in PyTorch): zeros would take as much memory as the model
        during the next forward, without any use.
        """
        self._give_up_refused()
        self.bookkeeping.clear()
        for parameter in self.params:
            parameter.grad_sample = None
        if not self._is_last_step_skipped:
            self._forget_sums()
        self.original_optimizer.zero_grad(set_to_none)
