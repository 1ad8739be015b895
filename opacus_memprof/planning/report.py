# SPDX-License-Identifier: Apache-2.0
"""A plan in plain words, and its files besides its runs: the profile of one run, and plan.json."""

import importlib.util
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from opacus_memprof.analysis.verdict_view import Fix, VerdictView
from opacus_memprof.jobs.progress import ProgressBoard
from opacus_memprof.language import tr, tr_sentence
from opacus_memprof.planning.configuration import PlannedConfiguration, Range
from opacus_memprof.planning.draws import TOLERATED, Draws
from opacus_memprof.planning.runs import PlannedRuns
from opacus_memprof.planning.table import Bracket, PlannedCell, smallest_gpus
from opacus_memprof.planning.verdict import Advice, Verdict, memory_of
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
from opacus_memprof.profiles.units import format_bytes
from opacus_memprof.reports.plan_exports import write_plan_csv, write_plan_html, write_plan_pictures
from opacus_memprof.reports.summary import print_verdict
from opacus_memprof.virtual_gpu.devices import GPUS

_MOST_WARNINGS = 3
_UNKNOWN = "values that the virtual GPU does not compute"  # in warnings about values and shapes
_SIZES = ("requested", "reserved", "may_reserve", "context")
_MOST_DRAWN = 80  # points of the curve


def gpu_name(kind: str, memory: int | None) -> str:
    """Returns the name of a virtual GPU: `a virtual NVIDIA H200 (139.80 GiB)`."""
    return f"a virtual {GPUS[kind].name} ({format_bytes(GPUS[kind].total_memory if memory is None else memory)})"


def show_run(board: ProgressBoard, configuration: PlannedConfiguration, run: VirtualRun) -> None:
    """Shows on a board that a run has ended, and with how much memory, which differs where what is needed is found."""
    board.advance()
    peak = ""
    if run.fits and run.requested is not None:
        peak = tr(", peak {size}", size=format_bytes(run.requested))
    gpu = f"{configuration.gpu} ({format_bytes(memory_of(configuration))})"
    words = " ".join([gpu, *configuration.program.arguments])
    changes = ", ".join(map(_shown, configuration.changes))
    status = tr("fits") if run.fits else tr(run.status.replace("_", " "))
    line = Text(words + (tr(" with {candidate}", candidate=changes) if changes else "") + "  ")
    line.append(f"{status}{peak}", "green" if run.fits else "magenta")
    line.append(f"  {run.seconds:.0f} s", "dim")
    board.print(line)


def _shown(change: Mapping[str, Any]) -> str:
    match change:
        case {"kind": "environment", "name": name, "value": value}:
            return f"{name}={value}"
        case {"kind": "line", "file": file, "line": line, "value": value}:
            return f"{file}:{line}={value}"
    return f"{change['kind']} {change.get('value', '')}".strip()


def print_draws(draws: Draws, console: Console) -> None:
    """Prints the peak of the planned steps, and how to prevent a batch that is too large."""
    drawn = draws.largest
    _print(
        console,
        "\n"
        + tr(
            "batches are drawn: each of {samples} samples with probability {rate:g}, {steps} times; computed:",
            samples=drawn.samples,
            rate=drawn.rate,
            steps=drawn.steps,
        ),
    )
    for probability, (size, requested) in draws.peaks.items():
        _print(
            console,
            tr(
                "  no batch is above {size} with probability {probability:g}; its peak is {peak}",
                size=size,
                probability=probability,
                peak=format_bytes(requested),
            ),
        )
    ran = ", ".join(map(str, draws.ran))
    color = "red" if draws.probability > TOLERATED else "green"
    _print(console, tr("  batches of up to {size} fit (ran: {ran})", size=draws.fits, ran=ran))
    risk = tr("probability of running out of memory: {probability:.2g}", probability=draws.probability)
    _print(console, f"  [{color}]{risk}[/]")
    if draws.physical is not None and draws.physical_run is not None:
        _print(
            console,
            tr(
                "  max_physical_batch_size={size} brings it below {tolerated:g}: tried, with {reserved} reserved",
                size=draws.physical,
                tolerated=TOLERATED,
                reserved=format_bytes(draws.physical_run.reserved or 0),
            ),
        )


def print_plan(verdict: Verdict, console: Console) -> None:
    """Prints whether it fits and by how much, the reason, and a remedy."""
    print_verdict(view_verdict(verdict), console)


def view_verdict(verdict: Verdict) -> VerdictView:
    """Returns the view of a verdict, which every output of it shows."""
    run, gpu = verdict.run, gpu_name(verdict.configuration.gpu, verdict.configuration.memory)
    about = "" if run.fits or verdict.whole is not None else "predicted "
    lines = [f"needs a GPU with {about}{format_bytes(verdict.needed)}, {format_bytes(run.context or 0)} of it for CUDA"]
    if run.fits:
        where = f"on {gpu}, with {format_bytes(verdict.free_bytes)} to spare"
        if run.retries:
            lines.append(_only_just(run))
    else:
        where = f"on {gpu}: {about}{format_bytes(max(-verdict.free_bytes, 0))} too much"
        lines.append(f"memory ran out at {_describe(run)}")
    if (kind := verdict.predicted_gpu) is not None:
        size = format_bytes(GPUS[kind].total_memory)
        lines.append(f"the smallest GPU with as much: {kind} ({size}), predicted; --gpu all tries it")
    peak = run if run.fits else verdict.whole
    if peak is not None and peak.requested is not None:
        lines.append(f"its peak of {format_bytes(peak.requested)} is mostly {_describe(peak)}")
    return VerdictView(
        outcome="fits" if run.fits else "failed",
        headline="FITS" if run.fits else "DOES NOT FIT",
        where=where,
        lines=[("", line) for line in lines],
        heading="FIX"
        if run.fits or verdict.advice
        else "No known change would make it fit except a GPU with more memory.",
        fixes=[_fix(each) for each in verdict.advice],
    )


def print_doubts(warnings: Sequence[str], console: Console) -> None:
    """Prints the decisions of the run that depend on values which a virtual GPU does not compute.

    They come from its profile's warnings. Also prints how to set these values for the plan.
    """
    doubts = [warning for warning in warnings if "virtual GPU" in warning or "real GPU" in warning]
    for warning in doubts[:_MOST_WARNINGS]:
        _print(console, f"[yellow]{tr('note:')} {escape(tr_sentence(warning))}[/]")
    if any(_UNKNOWN in warning for warning in doubts):
        can_be_set = tr(
            "what the training would decide there can be set for the plan, where "
            "opacus_memprof.virtual_gpu.active() is not None"
        )
        _print(console, f"[yellow]{tr('note:')} {can_be_set}[/]")


def _fix(advice: Advice) -> Fix:
    run = advice.tried
    predicted = format_bytes(advice.predicted)
    if advice.failure:
        return Fix(advice.title, advice.code, predicted, "fails", "tried", note=advice.failure)
    if run is None:
        return Fix(advice.title, advice.code, predicted, "", "needs an edit")
    note = f"reserves {format_bytes(run.reserved or 0)}"
    if not run.fits:
        return Fix(advice.title, advice.code, predicted, "too large", "tried", note)
    return Fix(advice.title, advice.code, format_bytes(run.requested or 0), "fits", "tried", note)


def _only_just(run: VirtualRun) -> str:
    times = "once" if run.retries == 1 else f"{run.retries} times"
    return f"only just: torch had to give cached memory back {times} to go on"


def _describe(run: VirtualRun) -> str:
    return describe_allocation(run.category, run.module, run.phase)


def describe_allocation(category: str, module: str, phase: str) -> str:
    """Returns what an allocation was for and when: `activations of fc1 in forward`."""
    of_module = f" of {module}" if module else ""
    return f"{category.replace('_', ' ')}{of_module} in {phase.replace('_', ' ')}"


def print_cells(cells: Sequence[PlannedCell], searched: Range | None, console: Console) -> None:
    """Prints a line for each cell: the largest value that fits, and the memory that it needs."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    several = len({cell.configuration.gpu for cell in cells}) > 1
    for name in columns_of(cells):
        table.add_column(escape(name), overflow="fold", no_wrap=name == "gpu")
    if several:
        table.add_column(tr("memory"), justify="right", no_wrap=True)
    for name in (tr("fits") if searched is None else searched.name, tr("peak"), tr("reserved")):
        table.add_column(escape(name), justify="right", no_wrap=True)
    for cell in cells:
        run = cell.answer
        columns = [*columns_of([cell]).values()]
        columns += [format_bytes(memory_of(cell.configuration))] if several else []
        if run is None or (searched is not None and cell.largest is None):
            table.add_row(*columns, tr("none") if cell.runs else tr("failed"))
            continue
        sizes = [format_bytes(size or 0) for size in (run.requested, run.reserved)]
        what = (tr("yes") if run.fits else tr("no")) if searched is None else str(cell.largest)
        table.add_row(*columns, what, *sizes)
    console.print(table)
    if several:
        _print_smallest(cells, console)
    rooms = {cell.configuration.gpu: run.may_reserve for cell in cells if (run := cell.answer) is not None}
    listed = ", ".join(tr("{size} on {gpu}", size=format_bytes(room or 0), gpu=gpu) for gpu, room in rooms.items())
    console.print(tr("may be reserved: {listed}", listed=listed) + "\n" if rooms else "", highlight=False)
    for cell in cells:
        if cell.error:
            _print(console, f"[yellow]{escape(cell.label)}: {escape(tr_sentence(cell.error))}[/]")
        elif searched is not None and cell.largest is not None:
            console.print(_explained(cell, searched), highlight=False)


def _print_smallest(cells: Sequence[PlannedCell], console: Console) -> None:
    """Prints the smallest GPU that fits, for each candidate."""
    for candidate, cell in smallest_gpus(cells):
        of = tr(" with {candidate}", candidate=candidate) if candidate else ""
        if cell is None:
            console.print(tr("none of these GPUs fits{of}", of=escape(of)), style="bold red", highlight=False)
            continue
        size = format_bytes(memory_of(cell.configuration))
        gpu = cell.configuration.gpu
        text = tr("the smallest GPU that fits{of}: {gpu} ({size})", of=escape(of), gpu=gpu, size=size)
        console.print(text, style="bold", highlight=False)


def columns_of(cells: Sequence[PlannedCell]) -> dict[str, str]:
    """Returns the columns in which cells differ: their names, and their values in the first cell."""
    cell = cells[0]
    columns = {name: str(value) for name, value in cell.fixed.items()}
    columns |= {} if cell.mode is None else {"mode": cell.mode}
    columns |= {} if cell.settings is None else {"settings": cell.settings}
    return columns | {"gpu": cell.configuration.gpu}


def _explained(cell: PlannedCell, searched: Range) -> str:
    best, line, run = cell.largest, cell.line, cell.answer
    assert best is not None
    assert run is not None
    fits = f"{tr('fits')} ({tr_sentence(_only_just(run))})" if run.retries else tr("fits")
    end = _end(best, Bracket.from_points(cell.points).bad, searched.high)
    ran = ", ".join(str(value) for value in sorted(cell.runs))
    slope = "" if line is None else format_bytes(round(line.slope))
    grows = "" if line is None else tr("; computed between the runs: {slope} for each", slope=slope)
    said = tr("was run and {fits}, {end} (ran: {ran})", fits=fits, end=end, ran=ran)
    return f"{escape(cell.label)}: {searched.name}={best} {said}{grows}"


def _end(best: int, bad: int | None, high: int) -> str:
    """Says what is known of the values above the largest that fits."""
    if best == high:
        return tr("it is the range's end")
    if bad is None:
        return tr("larger ones were not run")
    end = tr("{value} was run and does not fit", value=bad)
    return end if bad == best + 1 else tr("{end}, and none between them was run", end=end)


def _print(console: Console, text: str) -> None:
    console.print(text, highlight=False, soft_wrap=True)


def copy_profile(runs: PlannedRuns, run: VirtualRun) -> dict[str, Any]:
    """Copies the profile of a run into the plan's directory. Returns its profile.json."""
    shutil.copytree(run.profile, runs.directory, dirs_exist_ok=True, ignore=shutil.ignore_patterns(".*"))
    return read_object(runs.directory / PROFILE)


def write_plan(runs: PlannedRuns, base: PlannedConfiguration, **content: Any) -> Plan:
    """Writes plan.json, plan.html, plan.csv and, if matplotlib is installed, plan.png and plan-dark.png.

    Args:
        runs: the runs of the plan.
        base: the configuration as the user gave it.
        content: the fields of Plan that `base` does not determine.
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
        spare_bytes=verdict.free_bytes,
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


def plan_cell(cell: PlannedCell) -> PlanCell:
    """Returns an entry of `cells` in plan.json: the largest value that fits with one mode and setting on one GPU."""
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
    """Returns an entry of `smallest_gpus` in plan.json: the smallest GPU on which a candidate fits."""
    gpu, memory = (None, None) if cell is None else (cell.configuration.gpu, memory_of(cell.configuration))
    return SmallestGpu(candidate=candidate, gpu=gpu, memory_bytes=memory)


def _fields(run: VirtualRun) -> dict[str, Any]:
    """Returns the fields of a run in plan.json."""
    return {f"{key}_bytes" if key in _SIZES else key: value for key, value in asdict(run).items()}
