# SPDX-License-Identifier: Apache-2.0
"""The peak of a training whose batch sizes are drawn, and how probable it is that memory runs out.

Opacus' Poisson sampling takes each of `samples` with probability `rate`, independently, for every step: a batch's size
is binomial. The peak is that of the largest batch of all steps, through the line of bytes by batch size.
"""

import math
from dataclasses import dataclass
from functools import cached_property

_SPREAD = 40  # standard deviations beyond which nothing is added: below 1e-300


@dataclass(frozen=True)
class LargestBatch:
    """The largest of the batches of `steps` steps."""

    samples: int
    rate: float
    steps: int

    @cached_property
    def _sizes(self) -> tuple[int, list[float]]:
        """The first size that is counted, and the probabilities that one batch is larger than it, than the next …"""
        mean = self.samples * self.rate
        spread = _SPREAD * (math.sqrt(mean * (1 - self.rate)) + 1)
        first, last = max(0, int(mean - spread)), min(self.samples, int(mean + spread) + 1)
        tails = []
        tail = 0.0
        for size in range(last, first - 1, -1):  # from the smallest addends, so that tails keep their digits
            tails.append(tail)
            tail += self._probability_of(size)
        return first, tails[::-1]

    def _probability_of(self, size: int) -> float:
        if self.rate in (0.0, 1.0):
            return float(size == self.samples * self.rate)
        n, k = self.samples, size
        ways = math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)
        return math.exp(ways + k * math.log(self.rate) + (n - k) * math.log1p(-self.rate))

    def probability_above(self, size: int) -> float:
        """The probability that at least one of the batches is larger than `size`."""
        first, tails = self._sizes
        if size < first:
            return 1.0
        tail = tails[size - first] if size - first < len(tails) else 0.0
        return 1.0 if tail >= 1 else -math.expm1(self.steps * math.log1p(-tail))

    def quantile(self, probability: float) -> int:
        """The smallest size that the largest batch does not exceed with this probability."""
        first, tails = self._sizes
        sizes = range(first, first + len(tails))
        return next((size for size in sizes if self.probability_above(size) <= 1 - probability), self.samples)
