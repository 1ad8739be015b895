# SPDX-License-Identifier: Apache-2.0
"""Files that a plan writes into its directory besides its runs: the profile of one run, and plan.json."""

import importlib.util
import shutil
from dataclasses import asdict
from typing import Any

from opacus_memprof.planning.configuration import PlannedConfiguration
from opacus_memprof.planning.draws import Draws
from opacus_memprof.planning.runs import PlannedRuns
from opacus_memprof.planning.table import PlannedCell
from opacus_memprof.planning.verdict import Verdict, memory_of
from opacus_memprof.planning.virtual_run import VirtualRun
from opacus_memprof.profiles.directory import PLAN, PROFILE
from opacus_memprof.profiles.files import read_object, write_text
from opacus_memprof.profiles.json_object import to_json
from opacus_memprof.profiles.plan import (
    ComputedBytes,
    DrawnAbove,
    DrawnPeak,
    Plan,
    PlanCell,
    PlanDraws,
    PlannedRun,
    PlanVerdict,
    RunOfValue,
    SmallestGpu,
    TriedAdvice,
)
from opacus_memprof.reports.plan_exports import write_plan_csv, write_plan_html, write_plan_pictures

_SIZES = ("requested", "reserved", "may_reserve", "context")
_MOST_DRAWN = 80  # points of the curve


def copy_profile(runs: PlannedRuns, run: VirtualRun) -> dict[str, Any]:
    """Copies the profile of a run into the plan's directory. Returns its profile.json."""
    shutil.copytree(run.profile, runs.directory, dirs_exist_ok=True, ignore=shutil.ignore_patterns(".*"))
    return read_object(runs.directory / PROFILE)


def write_plan(runs: PlannedRuns, base: PlannedConfiguration, **content: Any) -> Plan:
    """Writes plan.json, plan.html, plan.csv and, if matplotlib is installed, plan.png and plan-dark.png.

    Args:
        runs: the runs of the plan.
        base: the configuration as the user gave it.
        content: further fields of Plan, which do not follow from it.
    """
    program = base.program
    plan = Plan(program=program.name, arguments=list(program.words), ranks=base.ranks, **content)
    file = runs.directory / PLAN
    write_text(file, to_json(plan, indent=1))
    write_plan_html(plan, file.with_suffix(".html"))
    write_plan_csv(plan, file.with_suffix(".csv"))
    if importlib.util.find_spec("matplotlib") is not None:
        write_plan_pictures(plan, file.with_suffix(".png"))
    return plan


def run_content(run: VirtualRun) -> PlannedRun:
    """Returns the entry of a run in plan.json."""
    return PlannedRun(**_fields(run))


def verdict_content(verdict: Verdict) -> PlanVerdict:
    """Returns the entry of a verdict in plan.json."""
    return PlanVerdict(
        gpu=verdict.configuration.gpu,
        memory_bytes=verdict.configuration.memory,
        fits=verdict.run.fits,
        needed_bytes=verdict.needed,
        spare_bytes=verdict.spare,
        predicted_gpu=verdict.predicted_gpu,
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
    """Returns the entry of drawn batches in plan.json."""
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
    """Returns the entry of a cell in plan.json."""
    line = cell.line
    return PlanCell(
        mode=cell.mode,
        settings=cell.settings,
        fixed=dict(cell.fixed),
        gpu=cell.configuration.gpu,
        memory_bytes=cell.configuration.memory,
        gpu_memory_bytes=memory_of(cell.configuration),
        largest=cell.largest,
        error=cell.error,
        computed=None if line is None else ComputedBytes(base_bytes=line.base, bytes_per_value=line.slope),
        runs=[RunOfValue(value=value, **_fields(run)) for value, run in sorted(cell.runs.items())],
    )


def smallest_content(candidate: str, cell: PlannedCell | None) -> SmallestGpu:
    """Returns the entry of the smallest GPU in plan.json."""
    gpu, memory = (None, None) if cell is None else (cell.configuration.gpu, memory_of(cell.configuration))
    return SmallestGpu(candidate=candidate, gpu=gpu, memory_bytes=memory)


def _fields(run: VirtualRun) -> dict[str, Any]:
    """Returns the fields of a run in plan.json: all except fields that only planning needs."""
    fields = {key: value for key, value in asdict(run).items() if key != "packages"}
    return {f"{key}_bytes" if key in _SIZES else key: value for key, value in fields.items()}
