# SPDX-License-Identifier: Apache-2.0
"""What plan.json holds, from what was planned."""

from dataclasses import asdict
from typing import Any

from opacus_memprof.planning.draws import Draws
from opacus_memprof.planning.table import PlannedCell
from opacus_memprof.planning.verdict import Verdict
from opacus_memprof.planning.virtual_run import VirtualRun
from opacus_memprof.profiles.plan import (
    ComputedBytes,
    DrawnAbove,
    DrawnPeak,
    PlanCell,
    PlanDraws,
    PlannedRun,
    PlanVerdict,
    RunOfValue,
    TriedAdvice,
)

_SIZES = ("requested", "reserved", "may_reserve", "context")
_MOST_DRAWN = 80  # points of the curve


def run_content(run: VirtualRun) -> PlannedRun:
    return PlannedRun(**_fields(run))


def verdict_content(verdict: Verdict) -> PlanVerdict:
    return PlanVerdict(
        gpu=verdict.configuration.gpu,
        memory_bytes=verdict.configuration.memory,
        fits=verdict.run.fits,
        needed_bytes=verdict.needed,
        spare_bytes=verdict.spare,
        run=run_content(verdict.run),
        with_more_memory=None if verdict.whole is None else run_content(verdict.whole),
        advice=[
            TriedAdvice(
                title=suggestion.title,
                code=suggestion.code,
                predicted_peak_bytes=suggestion.predicted,
                tried=None if suggestion.tried is None or suggestion.failure else run_content(suggestion.tried),
                failure=suggestion.failure,
            )
            for suggestion in verdict.advice
        ],
    )


def draws_content(draws: Draws) -> PlanDraws:
    drawn = draws.largest
    last = max(draws.fits, max(size for size, _ in draws.peaks.values())) + 1
    first = min(int(drawn.samples * drawn.rate), last)
    sizes = range(first, last + 1, max(1, -(-(last - first) // _MOST_DRAWN)))
    return PlanDraws(
        **asdict(drawn),
        largest_batch_that_fits=draws.fits,
        ran=list(draws.ran),
        out_of_memory_probability=draws.probability,
        peaks=[
            DrawnPeak(probability=probability, batch=size, requested_bytes=requested)
            for probability, (size, requested) in draws.peaks.items()
        ],
        above=[DrawnAbove(batch=size, probability=drawn.probability_above(size)) for size in sizes],
        max_physical_batch_size=draws.physical,
        with_it=None if draws.physical_run is None else run_content(draws.physical_run),
    )


def cell_content(cell: PlannedCell) -> PlanCell:
    line = cell.line
    return PlanCell(
        mode=cell.mode,
        settings=cell.settings,
        fixed=dict(cell.fixed),
        gpu=cell.configuration.gpu,
        memory_bytes=cell.configuration.memory,
        largest=cell.largest,
        error=cell.error,
        computed=None if line is None else ComputedBytes(base_bytes=line.base, bytes_per_value=line.slope),
        runs=[RunOfValue(value=value, **_fields(run)) for value, run in sorted(cell.runs.items())],
    )


def _fields(run: VirtualRun) -> dict[str, Any]:
    """What plan.json has of a run, which is all but what the plan itself needs."""
    fields = {key: value for key, value in asdict(run).items() if key != "packages"}
    return {f"{key}_bytes" if key in _SIZES else key: value for key, value in fields.items()}
