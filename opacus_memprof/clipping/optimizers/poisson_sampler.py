# SPDX-License-Identifier: Apache-2.0
"""Poisson sampling on several ranks, where each rank takes part in every step."""

from collections.abc import Iterator

import torch
from opacus.utils.uniform_sampler import DistributedUniformWithReplacementSampler


class EveryStepSampler(DistributedUniformWithReplacementSampler):  # type: ignore[misc]
    """Opacus' sampler for one of several ranks, which also yields empty batches.

    Opacus skips empty batches. Such a rank takes fewer steps than the others, which then wait forever.
    """

    def __iter__(self) -> Iterator[torch.Tensor]:
        indices = torch.arange(self.total_size)
        if self.shuffle:
            generator = torch.Generator().manual_seed(self.shuffle_seed + self.epoch)
            indices = torch.randperm(self.total_size, generator=generator)
        indices = indices[self.rank :: self.num_replicas]
        for _ in range(self.num_batches):
            yield indices[torch.rand(self.num_samples, generator=self.generator) < self.sample_rate]


def sample_every_step(sampler: object) -> None:
    """Converts Opacus' sampler for one of several ranks to an EveryStepSampler. Ignores other samplers.

    The conversion is in place, because a DataLoader's sampler cannot be replaced.
    """
    if type(sampler) is DistributedUniformWithReplacementSampler:
        sampler.__class__ = EveryStepSampler
