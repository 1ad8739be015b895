# SPDX-License-Identifier: Apache-2.0
"""How probable it is that a training whose batch sizes are drawn runs out of memory, and the physical batch against it.

Virtual runs in which every batch has the same, given size tell the largest size that fits; how often a larger one is
drawn is computed.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from opacus_memprof.errors import MemprofError
from opacus_memprof.planning.arguments import Range
from opacus_memprof.planning.configuration import PlannedConfiguration
from opacus_memprof.planning.poisson import LargestBatch
from opacus_memprof.planning.runs import PlannedRuns
from opacus_memprof.planning.table import PlannedCell, fill
from opacus_memprof.planning.virtual_run import VirtualRun

TOLERATED = 1e-6  # probability that a training runs out of memory
_NEGLIGIBLE = 1e-9  # of larger batches than are looked at
_QUANTILES = (0.5, 0.9, 0.99, 0.999999)
_PARTS = (1.0, 0.85, 0.7, 0.5)  # of the largest batch that fits, as physical batches: clipped sums need memory too


@dataclass(frozen=True)
class Draws:
    """The batches that are drawn in a planned number of steps.

    Attributes:
        fits: the largest drawn batch that has fitted; 0 where none has.
        ran: the sizes that were run.
        probability: that a larger one is drawn in one of the steps at least.
        peaks: by probability, the largest batch that is not exceeded with it, and the requested bytes computed for it.
        physical: the largest max_physical_batch_size that was tried and fits, where one is needed and was found.
    """

    largest: LargestBatch
    fits: int
    ran: tuple[int, ...]
    probability: float
    peaks: Mapping[float, tuple[int, int]]
    physical: int | None
    physical_run: VirtualRun | None


class DrawnBatch(Range):
    """The size of all drawn batches, instead of an argument of the program."""

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
    """The probability of running out of memory in `steps` logical steps of the program that `run` has run.

    Raises:
        MemprofError: the program draws no batch sizes, or as fill does.
    """
    if not run.poisson:
        raise MemprofError(
            f"{configuration.program.name} draws no batch sizes (no loader with Opacus' Poisson sampling was seen): "
            "leave --steps out"
        )
    largest = LargestBatch(run.poisson["samples"], run.poisson["rate"], steps)
    most = max(1, largest.quantile(1 - _NEGLIGIBLE))
    # Batches are about as large as the mean; whether that many fit, the run has shown, or not.
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
    """The largest of a few physical batches with which logical batches of `most` samples, cut into whole ones, fit."""
    sizes = sorted({max(1, int(fits * part)) for part in _PARTS}, reverse=True)
    on_round(len(sizes))
    tried = runs.all(
        [with_drawn_batch(configuration, min(samples, size * max(2, math.ceil(most / size))), size) for size in sizes]
    )
    return next(((size, run) for size, run in zip(sizes, tried, strict=True) if run.fits), (None, None))
