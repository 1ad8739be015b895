# SPDX-License-Identifier: Apache-2.0
"""The probability that a training with Poisson sampling runs out of memory, and a physical batch size that prevents it.

Poisson sampling includes each of `samples` samples in a batch with probability `rate`, independently, so the batch size
is binomial. Virtual runs find the largest batch size that fits; the probability of a larger batch is computed.
"""

import math
from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from opacus_memprof.errors import MemprofError
from opacus_memprof.planning.configuration import PlannedConfiguration, Range
from opacus_memprof.planning.runs import PlannedRuns
from opacus_memprof.planning.table import PlannedCell, fill
from opacus_memprof.planning.virtual_run import VirtualRun

TOLERATED = 1e-6  # probability that a training runs out of memory
_NEGLIGIBLE = 1e-9  # probability of batches larger than those considered
_QUANTILES = (0.5, 0.9, 0.99, 0.999999)
_PARTS = (1.0, 0.85, 0.7, 0.5)  # physical batches, as fractions of the largest that fits: clipped sums need memory


@dataclass(frozen=True)
class LargestBatch:
    """The size of the largest batch of `steps` steps."""

    samples: int
    rate: float
    steps: int

    def probability_above(self, size: int) -> float:
        """Returns the probability that at least one of the batches is larger than `size`."""
        from scipy.special import betainc  # Opacus, whose sampler this is about, has brought it

        if not 0 <= size < self.samples:
            return float(size < 0)
        tail = float(betainc(size + 1, self.samples - size, self.rate))  # of one batch: more than `size` successes
        return 1.0 if tail >= 1 else -math.expm1(self.steps * math.log1p(-tail))

    def quantile(self, probability: float) -> int:
        """Returns the smallest size that the largest batch does not exceed with this probability."""
        return bisect_left(range(self.samples), True, key=lambda size: self.probability_above(size) <= 1 - probability)


@dataclass(frozen=True)
class Draws:
    """The batches that Poisson sampling draws in a planned number of steps.

    Attributes:
        largest: the size of the largest batch.
        fits: the largest batch size that fits; 0 if none does.
        ran: the batch sizes that were run.
        probability: the probability that a larger batch is drawn in at least one step.
        peaks: by probability, the size that no batch exceeds with this probability, and its computed requested bytes.
        physical: the largest tested max_physical_batch_size that fits; None if none is needed or found.
        physical_run: the run with it.
    """

    largest: LargestBatch
    fits: int
    ran: tuple[int, ...]
    probability: float
    peaks: Mapping[float, tuple[int, int]]
    physical: int | None
    physical_run: VirtualRun | None


class DrawnBatch(Range):
    """The size of all batches, searched instead of an argument of the program."""

    def apply(self, configuration: PlannedConfiguration, value: int) -> PlannedConfiguration:
        return with_drawn_batch(configuration, value)


def with_drawn_batch(
    configuration: PlannedConfiguration, size: int, physical: int | None = None
) -> PlannedConfiguration:
    changes = [*configuration.changes, {"kind": "drawn_batch", "value": size}]
    if physical is not None:
        changes.append({"kind": "max_physical_batch_size", "value": physical})
    return replace(configuration, changes=tuple(changes))


def assess_draws(
    runs: PlannedRuns,
    configuration: PlannedConfiguration,
    run: VirtualRun,
    steps: int,
    on_round: Callable[[int], object],
) -> Draws:
    """Computes the probability of running out of memory.

    Args:
        runs: the runs of the plan.
        configuration: the program and its GPU.
        run: the run of this configuration.
        steps: logical steps of the whole training.
        on_round: called with the number of runs that are started.

    Raises:
        MemprofError: the program does not use Poisson sampling, or see `fill`.
    """
    if not run.poisson:
        raise MemprofError(
            f"{configuration.program.name} draws no batch sizes (no loader with Opacus' Poisson sampling was seen): "
            "leave --steps out"
        )
    largest = LargestBatch(run.poisson["samples"], run.poisson["rate"], steps)
    most = max(1, largest.quantile(1 - _NEGLIGIBLE))
    # Most batches are about as large as the mean, which the run has shown to fit or not.
    least = min(most, max(1, int(largest.samples * largest.rate))) if run.fits else 1
    cell = PlannedCell(None, configuration)
    try:
        fill(runs, [cell], DrawnBatch("the drawn batch", least, most), on_round)
    except MemprofError:
        if not cell.runs:
            raise
    fits = cell.largest or 0
    probability = largest.probability_above(fits) if fits < most else 0.0
    physical, physical_run = None, None
    if probability > TOLERATED and fits:
        physical, physical_run = _physical_batch(runs, configuration, fits, most, largest.samples, on_round)
    line, answer = cell.line, cell.answer
    peak = 0 if answer is None else answer.requested or 0
    sizes = {quantile: largest.quantile(quantile) for quantile in _QUANTILES}
    return Draws(
        largest,
        fits,
        tuple(sorted(cell.runs)),
        probability,
        {key: (size, peak if line is None else round(line.base + line.slope * size)) for key, size in sizes.items()},
        physical,
        physical_run,
    )


def _physical_batch(
    runs: PlannedRuns,
    configuration: PlannedConfiguration,
    fits: int,
    most: int,
    samples: int,
    on_round: Callable[[int], object],
) -> tuple[int | None, VirtualRun | None]:
    """Returns the largest of a few physical batch sizes with which a logical batch of `most` samples fits."""
    sizes = sorted({max(1, int(fits * part)) for part in _PARTS}, reverse=True)
    on_round(len(sizes))
    tried = runs.all(
        [with_drawn_batch(configuration, min(samples, size * max(2, math.ceil(most / size))), size) for size in sizes]
    )
    return next(((size, run) for size, run in zip(sizes, tried, strict=True) if run.fits), (None, None))
