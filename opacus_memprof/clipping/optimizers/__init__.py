# SPDX-License-Identifier: Apache-2.0
"""The optimizers of flash_clip: on one device, with an adaptive bound, under DDP and under FSDP2."""

import math
from collections.abc import Callable
from typing import Any

import torch
from opacus.optimizers import AdaClipDPOptimizer
from opacus.optimizers import optimizer as opacus_optimizer

from opacus_memprof.clipping.optimizers.ddp import DPOptimizerFlashClipDDP
from opacus_memprof.clipping.optimizers.fsdp import DPOptimizerFlashClipFSDP
from opacus_memprof.clipping.optimizers.optimizer import DPOptimizerFlashClip
from opacus_memprof.errors import MemprofError


class DPOptimizerFlashClipAdaptive(DPOptimizerFlashClip, AdaClipDPOptimizer):  # type: ignore[misc]
    """The optimizer of clipping="adaptive" (Andrew et al. 2021, arXiv 1905.03871).

    It takes the same arguments and updates the bound in the same way as opacus.optimizers.AdaClipDPOptimizer.
    """

    _is_alone = False  # samples are counted between clipping and noise
    sample_size: int
    unclipped_num: Any

    def clip_and_accumulate(self) -> None:
        """Does the same as DPOptimizerFlashClip.clip_and_accumulate; also counts the samples that are not clipped."""
        super().clip_and_accumulate()
        self.sample_size += self.bookkeeping.samples_in_last_step
        self.unclipped_num = self.unclipped_num + self.bookkeeping.unclipped_in_last_step

    def noise_std(self) -> float:
        """Returns the standard deviation of the gradients' noise.

        It is higher than `noise_multiplier` times the bound, because each step also uses a noisy count of unclipped
        samples: together, sums and count cost as much privacy as `noise_multiplier` says. See Theorem 1 of Andrew et
        al., "Differentially Private Learning with Adaptive Clipping", NeurIPS 2021.

        Raises:
            MemprofError: the noise multiplier is too high for the noise of the count.
        """
        if self.noise_multiplier == 0:
            return 0.0
        if self.noise_multiplier >= 2 * self.unclipped_num_std:
            raise MemprofError(
                f"noise_multiplier is {self.noise_multiplier:g}, but with clipping='adaptive' it must stay below "
                f"2 unclipped_num_std = {2 * self.unclipped_num_std:g}, the noise of the count of unclipped samples: "
                "set it lower, or let a scheduler of noise end there."
            )
        rest = self.noise_multiplier ** (-2) - (2 * self.unclipped_num_std) ** (-2)
        return float(rest ** (-1 / 2) * self.noise_bound())

    def add_noise(self, divisor: float = 1) -> None:
        """Adds noise to the sums and to the count, and divides the sums."""
        super().add_noise(divisor)
        count = torch.as_tensor(self.unclipped_num, dtype=torch.float)
        self.unclipped_num = float(count) + opacus_optimizer._generate_noise(
            std=self.unclipped_num_std, reference=count, generator=self.generator
        )

    def pre_step(self, closure: Callable[[], float] | None = None) -> bool:
        """Does the same as DPOptimizerFlashClip.pre_step; also updates the bound unless the step is skipped."""
        if not super().pre_step():
            return False
        self.update_max_grad_norm()
        return True

    def update_max_grad_norm(self) -> None:
        """Updates the bound from the noisy fraction of samples that are not clipped.

        The update is that of AdaClipDPOptimizer.update_max_grad_norm. A step without samples keeps the bound.
        """
        if not self.sample_size:
            return
        fraction = float(self.unclipped_num) / self.sample_size
        change = -self.clipbound_learning_rate * (fraction - self.target_unclipped_quantile)
        bound = self.max_grad_norm * math.exp(min(change, 700.0))  # larger numbers would overflow
        self.set_bound(min(max(bound, self.min_clipbound), self.max_clipbound))

    def _forget_sums(self) -> None:
        super()._forget_sums()
        self.sample_size = self.unclipped_num = 0


def optimizer_class(clipping: str, distributed: bool, is_sharded: bool = False) -> type[DPOptimizerFlashClip]:
    """Returns the optimizer class for a kind of clipping and parallelism.

    Args:
        clipping: "flat", "per_layer", "adaptive" or "automatic".
        distributed: whether several ranks train the model.
        is_sharded: whether `fully_shard` has sharded the model.

    Raises:
        MemprofError: clipping is adaptive on several ranks.
    """
    if clipping == "adaptive":
        if distributed:
            raise MemprofError("clipping='adaptive' trains on one device, as in Opacus; use 'flat' on several.")
        return DPOptimizerFlashClipAdaptive
    if is_sharded:
        return DPOptimizerFlashClipFSDP
    return DPOptimizerFlashClipDDP if distributed else DPOptimizerFlashClip


__all__ = ["optimizer_class"]
