# SPDX-License-Identifier: Apache-2.0
"""The optimizer of grad_sample_mode="flash_clip": Opacus' flat clipping and noise, from what backward has kept."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from opacus.optimizers import AdaClipDPOptimizer, DPOptimizer
from opacus.optimizers import optimizer as opacus_optimizer
from opacus.optimizers.optimizer import _check_processed_flag, _mark_as_processed
from torch import nn
from torch.optim import Optimizer

from opacus_memprof.clipping import noise
from opacus_memprof.clipping.module import FlashClipHooks
from opacus_memprof.clipping.validate import refuse_capture
from opacus_memprof.errors import MemprofError


class DPOptimizerFlashClip(DPOptimizer):  # type: ignore[misc]
    """A DPOptimizer with the same clip factors, the same noise from the same generator, and the same skipped steps as
    opacus.optimizers.DPOptimizer.

    Args:
        optimizer: the wrapped optimizer; it must have every trainable parameter of the module.
        module: the flash_clip module (or hooks object).
        max_grad_norm: clipping bound; a list of them for clipping="per_layer".
        kwargs: see opacus.optimizers.DPOptimizer.

    Attributes:
        ranks: the number of ranks whose batches one step is from; ``expected_batch_size`` is that of each.

    Raises:
        MemprofError: the optimizer lacks a trainable parameter.
    """

    ranks = 1

    def __init__(
        self, optimizer: Optimizer, *, module: FlashClipHooks, max_grad_norm: float | list[float], **kwargs: Any
    ) -> None:
        self.bookkeeping = module.bookkeeping
        rule = module.bookkeeping.rule
        super().__init__(optimizer, max_grad_norm=rule.bound if rule.by_parameter else max_grad_norm, **kwargs)
        if rule.by_parameter and len(rule.bounds) != len(self.params):
            raise MemprofError(
                f"max_grad_norm has {len(rule.bounds)} bounds, but the optimizer has {len(self.params)} parameters "
                "that are trained; clipping='per_layer' needs one for each."
            )
        self.bookkeeping.places = {parameter: i for i, parameter in enumerate(self.params)}
        names = module.parameter_names()
        missing = [name for parameter, name in names.items() if not any(parameter is p for p in self.params)]
        if missing:
            raise MemprofError(
                f"{', '.join(missing)} can be trained but the optimizer does not hold them; freeze them with "
                "requires_grad_(False), or give them to the optimizer."
            )
        self._names: dict[nn.Parameter, str] = names

    @property
    def max_grad_norm(self) -> float:
        return self.bookkeeping.rule.bound

    @max_grad_norm.setter
    def max_grad_norm(self, value: float) -> None:
        self.bookkeeping.rule.bound = value

    @property
    def accumulated_iterations(self) -> int:
        return self.bookkeeping.passes_in_last_step

    def clip_and_accumulate(self) -> None:
        """Adds the clipped sums of every backward since the last step to ``p.summed_grad``.

        Raises:
            MemprofError: a parameter has no gradient.
        """
        self.bookkeeping.check_complete(self.params, self._names)
        parameter: Any  # with Opacus' attributes
        for parameter, total in self.bookkeeping.pop_clipped_sums():
            if parameter.summed_grad is None:
                parameter.summed_grad = total
            else:
                parameter.summed_grad += total
            del total

    def noise_std(self) -> float:
        """The standard deviation of the noise."""
        return float(self.noise_multiplier * self.max_grad_norm)

    def add_noise(self, divisor: float = 1) -> None:
        """Adds Opacus' noise to ``p.summed_grad`` in place, divides it, and assigns it to ``p.grad``.

        It is in place because the sum without noise is not needed any more, and is as large as the model.

        Args:
            divisor: of the sums with their noise. ``pre_step`` gives ``grad_divisor()`` and does not call
                ``scale_grad``, so that noise and division take one pass over memory.

        Raises:
            ValueError: ``zero_grad`` was not called since the last step (as Opacus does).
        """
        params = self.params
        noisy: list[torch.Tensor] = []
        noiseless: list[torch.Tensor] = []
        for parameter in params:
            _check_processed_flag(parameter.summed_grad)
            (noisy if self._gets_noise(parameter) else noiseless).append(parameter.summed_grad)
        noise.add_noise(
            noisy,
            std=self.noise_std(),
            generator=self.generator,
            secure_mode=self.secure_mode,
            divisor=divisor,
        )
        noise.divide(noiseless, divisor)
        for parameter in params:
            parameter.grad = self._as_gradient(parameter, parameter.summed_grad)
            _mark_as_processed(parameter.summed_grad)

    def _as_gradient(self, parameter: nn.Parameter, total: torch.Tensor) -> torch.Tensor:
        return total if total.shape == parameter.shape else total.view_as(parameter)

    def _gets_noise(self, parameter: nn.Parameter) -> bool:
        """Whether this process adds the noise of the parameter."""
        return True

    def pre_step(self, closure: Callable[[], float] | None = None) -> bool:
        """Clips and, unless the step is skipped (BatchMemoryManager), adds noise and averages.

        Raises:
            MemprofError: a norm is not finite. All gradients are dropped then, and no parameter is changed. Or a CUDA
                graph is being captured.
        """
        refuse_capture()
        if not self._prepare_step():
            self._is_last_step_skipped = True
            return False
        if self.step_hook:
            self.step_hook(self)
        self._is_last_step_skipped = False
        return True

    def _prepare_step(self) -> bool:
        """What ``pre_step`` does before it counts as a step. Returns whether it does."""
        self.clip_and_accumulate()
        if self._check_skip_next_step():
            self._check_norms()
            return False
        self.add_noise(self.grad_divisor())
        self._check_norms()  # last, so that the device has work while the host waits
        return True

    def _check_norms(self) -> None:
        try:
            self.bookkeeping.check_norms()
        except MemprofError:
            self._is_last_step_skipped = False
            self.zero_grad()
            raise

    def grad_divisor(self) -> float:
        """What the gradients are divided by: the expected batch size if the loss is a mean."""
        is_mean = self.loss_reduction == "mean"
        return float(self.expected_batch_size * self.accumulated_iterations * self.ranks) if is_mean else 1.0

    def scale_grad(self) -> None:
        """Divides the gradients by ``grad_divisor()``, after an ``add_noise`` that has not done so."""
        noise.divide([p.grad for p in self.params], self.grad_divisor())

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops the gradients and what backward has kept, but not the clipped sums of skipped steps (as Opacus does).

        Unlike in Opacus, gradients become None by default (as in PyTorch): zeros would take as much memory as the model
        during the next forward, for nothing.
        """
        self.bookkeeping.clear()
        for parameter in self.params:
            parameter.grad_sample = None
            if not self._is_last_step_skipped:
                parameter.summed_grad = None
        self.original_optimizer.zero_grad(set_to_none)


class DPOptimizerFlashClipAdaptive(DPOptimizerFlashClip, AdaClipDPOptimizer):  # type: ignore[misc]
    """The optimizer of clipping="adaptive" (Andrew et al. 2021, arXiv 1905.03871), with the arguments and the updates
    of the bound of opacus.optimizers.AdaClipDPOptimizer."""

    sample_size: int
    unclipped_num: Any

    def clip_and_accumulate(self) -> None:
        """As DPOptimizerFlashClip.clip_and_accumulate; also counts the samples that are not clipped."""
        super().clip_and_accumulate()
        self.sample_size += self.bookkeeping.samples_in_last_step
        self.unclipped_num = self.unclipped_num + self.bookkeeping.unclipped_in_last_step

    def noise_std(self) -> float:
        """The standard deviation that leaves room for the noise of the count (Theorem 1 of the paper)."""
        if self.noise_multiplier == 0:
            return 0.0
        rest = self.noise_multiplier ** (-2) - (2 * self.unclipped_num_std) ** (-2)
        return float(rest ** (-1 / 2) * self.max_grad_norm)

    def add_noise(self, divisor: float = 1) -> None:
        """Adds noise to the sums and to the count, and divides the sums."""
        super().add_noise(divisor)
        count = torch.as_tensor(self.unclipped_num, dtype=torch.float)
        self.unclipped_num = float(count) + opacus_optimizer._generate_noise(
            std=self.unclipped_num_std, reference=count, generator=self.generator
        )

    def pre_step(self, closure: Callable[[], float] | None = None) -> bool:
        """As DPOptimizerFlashClip.pre_step; updates the bound unless the step is skipped."""
        if not super().pre_step():
            return False
        self.update_max_grad_norm()
        self.max_grad_norm = float(self.max_grad_norm)
        return True

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As DPOptimizerFlashClip.zero_grad; also begins to count again."""
        super().zero_grad(set_to_none)
        self.sample_size = self.unclipped_num = 0
