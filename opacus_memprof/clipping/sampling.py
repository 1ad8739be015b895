# SPDX-License-Identifier: Apache-2.0
"""Which samples a step has: how a loader draws them, and the parts in which BatchMemoryManager gives them."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from itertools import accumulate
from types import FrameType
from typing import Any

import torch
from opacus.utils.batch_memory_manager import BatchSplittingSampler
from opacus.utils.uniform_sampler import DistributedUniformWithReplacementSampler

from opacus_memprof.errors import MemprofError

_ENOUGH_STEPS = 8

_LEFT_PART = (
    "the training loop has gone on to another part of a batch without optimizer.step() for the part before, so that "
    "the parts that BatchMemoryManager has announced are not those of the steps any more: call step() for each part; "
    "after an exception, begin the loop over BatchMemoryManager's batches anew."
)


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


class DrawnBatches:
    """The sizes of the batches that a loader has drawn, as far as no step has used them.

    Attributes:
        steps: the number of steps that have used some.
        mismatches: the number of these steps whose number of samples was another.
        iterations: how often the loader was iterated.
    """

    def __init__(self) -> None:
        self.steps = self.mismatches = self.iterations = 0
        self._sizes: deque[int] = deque(maxlen=64)

    def use(self, samples: int) -> None:
        """Notes that a step had so many samples. Ignored if nothing was drawn for it.

        Workers draw ahead of the step, and a step may use several batches, one after the other.
        """
        sizes = list(self._sizes)
        if not sizes:
            return
        self.steps += 1
        for first in range(len(sizes)):
            for end, total in enumerate(accumulate(sizes[first:]), first + 1):
                if total == samples:
                    self._sizes = deque(sizes[end:], maxlen=64)
                    return
        self.mismatches += 1
        self._sizes.popleft()

    def mostly_mismatch(self) -> bool:
        """Returns whether most steps had another number of samples, after enough steps to say so."""
        return self.steps >= _ENOUGH_STEPS and 2 * self.mismatches > self.steps

    @classmethod
    def of(cls, loader: Any) -> DrawnBatches:
        """Returns the batches of a loader, whose sizes are noted from now on."""
        found, sampler = cls(), loader.batch_sampler
        plain = type(sampler)

        def iterate(self: Any) -> Iterator[Any]:
            found.iterations += 1
            for indices in plain.__iter__(self):
                found._sizes.append(len(indices))
                yield indices

        # In place, as in `sample_every_step`.
        sampler.__class__ = type(plain.__name__, (plain,), {"__iter__": iterate, "__module__": plain.__module__})
        return found


def unexpected_size(samples: int, expected: float, drawn: DrawnBatches | None) -> str:
    """Returns a warning if steps have another number of samples than expected, or "".

    More samples than expected are allowed where Poisson sampling explains them. Called once for each step.

    Args:
        samples: the number of samples of this step.
        expected: their expected number; 0 if it is unknown.
        drawn: the batches that the loader has drawn, if their sizes are noted.
    """
    if drawn is not None:
        drawn.use(samples)
    if expected and samples > expected + 10 * math.sqrt(expected) + 10:
        what = f"a step has clipped {samples} samples, where make_private was told of {expected} on average"
    elif drawn is not None and drawn.mostly_mismatch():
        what = (
            f"{drawn.mismatches} of {drawn.steps} steps have clipped another number of samples than the loader had "
            f"drawn, the last {samples}"
        )
    else:
        return ""
    return (
        f"{what}: the accountant's epsilon does not hold for it. Train on each batch of the loader that make_private "
        "returns, as it is. If the first dimension of the model's inputs is not the batch, make it so: positions have "
        "counted as samples."
    )


class AnnouncedParts:
    """The parts of logical batches that BatchMemoryManager has announced and that have not come to a step.

    A part is announced before its forward. If a loop leaves out the step of a part, the parts that are announced are
    not those of the steps any more, and a step would have parts of two logical batches.

    Args:
        skips: the optimizer's queue: whether the step is skipped, for each of these parts.
    """

    def __init__(self, skips: list[bool]) -> None:
        self._skips = skips
        self._iteration: FrameType | None = None  # of BatchMemoryManager's loader
        self._is_managed = False  # whether the last part is BatchMemoryManager's, and not announced by the program
        self._drawn_iterations = 0  # of the loader that BatchMemoryManager splits, at the last part
        self._settled_forward = 0  # the number of the last forward for which no step is awaited
        self._left_forwards: dict[int, None] = {}  # later ones, after which another part was announced

    def begin_iteration(self, caller: FrameType) -> bool:
        """Returns whether the caller, which announces a part, is a new iteration of BatchMemoryManager's loader."""
        self._is_managed = caller.f_code is BatchSplittingSampler.__iter__.__code__
        if not self._is_managed or caller is self._iteration:
            return False
        self._iteration = caller
        return True

    def announce(self, forward: int, drawn: DrawnBatches | None) -> None:
        """Notes that a part is about to be announced.

        Args:
            forward: the number of the last forward.
            drawn: the batches that the loader has drawn, if they are noted.
        """
        self._drawn_iterations = drawn.iterations if drawn is not None else 0
        if self._skips and forward > self._settled_forward:
            self._left_forwards[forward] = None

    def are_left(self, is_unfinished: bool, drawn: DrawnBatches | None) -> bool:
        """Returns whether a step is of a batch that BatchMemoryManager has not announced, while it has others.

        The loop over its batches was left then, and another one began over the loader itself.

        Args:
            is_unfinished: whether parts of a logical batch wait for their step.
            drawn: the batches that the loader has drawn, if they are noted.
        """
        if not self._is_managed or not (is_unfinished or self._skips):
            return False
        return not self._skips or (drawn is not None and drawn.iterations != self._drawn_iterations)

    def give_up(self, forward: int, count: int | None = None) -> None:
        """Drops the first `count` announced parts, or all. No step is awaited for the forwards so far."""
        del self._skips[:count]
        self._settled_forward = forward
        self._left_forwards.clear()

    def begin_step(self, forward: int) -> MemprofError | None:
        """Begins the step of the last forward, and drops earlier parts that had a forward but no step.

        Returns:
            The refusal of this step if there were such parts.
        """
        left = sum(each < forward for each in self._left_forwards)
        self.give_up(forward, left)
        return MemprofError(_LEFT_PART) if left else None
