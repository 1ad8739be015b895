# SPDX-License-Identifier: Apache-2.0
"""Writes a plan as a page, a picture in two themes, and a table of all runs."""

import csv
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec import UNSET

from opacus_memprof.profiles.files import replacing, write_text
from opacus_memprof.profiles.plan import Plan, PlanCell, PlanDraws, PlannedRun, RunOfValue
from opacus_memprof.profiles.units import format_bytes, shorten_name
from opacus_memprof.reports.figures import THEMES, Theme, byte_axis, label_bars, legend, saved_figure, stacked_bars
from opacus_memprof.reports.html import build_page

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_SCRIPTS = ["base.js", "data.js", "theme.js", "table.js", "frame.js", "verdict.js", "plan_draws.js", "plan.js"]
_OF_CELL = ("mode", "settings", "gpu", "fixed", "largest", "error")
_OF_RUN = (
    "fits",
    "status",
    "steps",
    "samples",
    "requested_bytes",
    "reserved_bytes",
    "may_reserve_bytes",
    "context_bytes",
    "retries",
    "category",
    "module",
    "phase",
)
COLUMNS = ("candidate", "gpu", "gpu_memory_bytes", "value", *_OF_RUN)
_WIDTH = 12.0  # inches
_LABEL = 60  # characters
_BLUE = "#5c8ce3"
_LEAST = 1e-12  # probabilities below it are not drawn


@dataclass(frozen=True)
class Candidate:
    """A configuration of a plan.

    Attributes:
        label: a label that distinguishes it from the others.
        gpu: the kind of GPU.
        value: value of the searched argument; None without one.
        run: the run with the largest value that fits, or the only run.
        room: bytes that may be reserved on the plan's GPU; None if it is unknown.
    """

    label: str
    gpu: str
    value: int | None
    run: PlannedRun
    room: int | None


def _candidates(plan: Plan) -> list[Candidate]:
    """Returns the candidates with an answer, in the order of the table.

    For a plan of a single configuration, these are the configuration itself, the same with more memory, and each tried
    advice.
    """
    if plan.verdict is not UNSET:
        verdict = plan.verdict
        runs = {"as it is": verdict.run, "with more memory": verdict.with_more_memory}
        runs |= {advice.title: advice.tried for advice in verdict.advice}
        room = verdict.run.may_reserve_bytes
        return [Candidate(label, verdict.gpu, None, run, room) for label, run in runs.items() if run is not None]
    return [
        Candidate(_cell_label(cell), cell.gpu, cell.largest, run, run.may_reserve_bytes)
        for cell in _cells(plan)
        if (run := _answer(plan, cell)) is not None
    ]


def _cells(plan: Plan) -> list[PlanCell]:
    """Returns the lines of the table; [] for a plan of a single configuration."""
    return [] if plan.cells is UNSET else plan.cells


def _answer(plan: Plan, cell: PlanCell) -> RunOfValue | None:
    """Returns the run with the largest value that fits, or the only run if no value is searched.

    Returns None without an answer.
    """
    searched = plan.search is not UNSET and plan.search is not None
    wanted = cell.largest if searched else 0
    return next((run for run in cell.runs if run.value == wanted), None)


def _cell_label(cell: PlanCell) -> str:
    """Returns the label of a cell: `seq-length=512, ghost, expandable_segments:True on h100`."""
    words = [f"{name}={value}" for name, value in cell.fixed.items()]
    words += [word for word in (cell.mode, cell.settings) if word]
    return f"{', '.join(words)} on {cell.gpu}" if words else cell.gpu


def _title(plan: Plan) -> str:
    """Formats the program and its arguments."""
    ranks = f" on {plan.ranks} GPUs" if plan.ranks > 1 else ""
    return f"{' '.join([plan.program, *plan.arguments])}{ranks}"


def _rows(plan: Plan) -> Iterator[tuple[str, str, PlannedRun]]:
    """Yields label, kind of GPU and run for all runs in plan.json."""
    if plan.verdict is not UNSET:
        yield from ((candidate.label, candidate.gpu, candidate.run) for candidate in _candidates(plan))
    if plan.draws is not UNSET and plan.draws.with_it is not None and plan.verdict is not UNSET:
        label = f"max_physical_batch_size={plan.draws.max_physical_batch_size}"
        yield label, plan.verdict.gpu, plan.draws.with_it
    for cell in _cells(plan):
        yield from ((_cell_label(cell), cell.gpu, run) for run in cell.runs)


def write_plan_html(plan: Plan, path: str | os.PathLike[str]) -> None:
    """Writes the page to `path`, atomically. Raises MemprofError if it cannot be written."""
    write_text(path, _plan_page(plan))


def _plan_page(plan: Plan) -> str:
    """Builds the page of a plan: candidates and the reservable memory, largest values, advice, drawn batches."""
    shown = _candidates(plan)
    content = {
        "title": _title(plan),
        "virtual_mark": "on virtual GPUs: memory is counted as on real ones",
        "lead": _lead(plan),
        "candidates": [_candidate_object(candidate) for candidate in shown],
        "search": None if plan.search is UNSET else plan.search,
        "cells": [{"label": _cell_label(cell), **{key: cell[key] for key in _OF_CELL}} for cell in _cells(plan)],
        "advice": [] if plan.verdict is UNSET else plan.verdict.advice,
        "draws": None if plan.draws is UNSET else plan.draws,
    }
    categories = {category for candidate in shown for category in candidate.run.categories}
    return build_page(f"plan of {plan.program}", _SCRIPTS, content, categories, fallback="plan.json")


def _candidate_object(candidate: Candidate) -> dict[str, Any]:
    keys = ("fits", "requested_bytes", "reserved_bytes", "categories", "phase")
    room = None if candidate.gpu == "1 TiB" else candidate.run.may_reserve_bytes
    return {
        "label": candidate.label,
        "value": candidate.value,
        "room": room,
        **{key: candidate.run[key] for key in keys},
    }


def _lead(plan: Plan) -> str:
    """Formats the answer as a sentence."""
    if plan.verdict is not UNSET:
        verdict = plan.verdict
        if verdict.fits:
            return f"It fits on {verdict.gpu}, with {format_bytes(verdict.spare_bytes)} to spare."
        lacking = f": {format_bytes(-verdict.spare_bytes)} too much" if verdict.spare_bytes < 0 else ""
        return f"It does not fit on {verdict.gpu}{lacking}."
    fitting = [cell for cell in _cells(plan) if any(run.fits for run in cell.runs)]
    smallest = [] if plan.smallest_gpus is UNSET else plan.smallest_gpus
    sentences = [f"{len(fitting)} of {len(_cells(plan))} candidates fit."]
    for each in smallest:
        of = f" with {each.candidate}" if each.candidate else ""
        size = "" if each.memory_bytes is None else f" ({format_bytes(each.memory_bytes)})"
        sentences.append(f"The smallest GPU that fits{of}: {each.gpu or 'none of these'}{size}.")
    return " ".join(sentences)


def write_plan_pictures(plan: Plan, path: str | os.PathLike[str]) -> list[Path]:
    """Draws the plan in light and in dark, `a.png` and `a-dark.png`, and returns the files.

    Raises:
        MemprofError: matplotlib is not installed, or a file cannot be written.
    """
    target = Path(path)
    files = {"light": target, "dark": target.with_name(f"{target.stem}-dark{target.suffix}")}
    shown = _candidates(plan)
    draws = None if plan.draws is UNSET else plan.draws
    searched = None if plan.search is UNSET else plan.search
    parts = [2 + 0.5 * len(shown)]
    parts += [2 + 0.3 * len(shown)] if searched is not None else []
    parts += [3.5] if draws is not None else []
    for theme, file in files.items():
        with saved_figure(file, theme, (_WIDTH, sum(parts) + 0.6)) as figure:
            figure.suptitle(f"{shorten_name(_title(plan), 100)}, on virtual GPUs", fontsize=11)
            places = iter(figure.subplots(len(parts), 1, squeeze=False, height_ratios=parts)[:, 0])
            axes = next(places)
            _draw_candidates(axes, shown, THEMES[theme])
            if searched is not None:
                _draw_largest(next(places), searched.argument, shown)
            if draws is not None:
                _draw_probability(next(places), draws, THEMES[theme])
            legend(figure, axes)
    return list(files.values())


def _draw_candidates(axes: "Axes", shown: list[Candidate], theme: Theme) -> None:
    axes.set_title("Requested bytes at the peak; marks: what was reserved; lines: what may be reserved")
    names = [_name(candidate) for candidate in shown]
    stacked_bars(axes, names, [candidate.run.categories for candidate in shown], texts=[""] * len(shown))
    reach = max(
        (size or 0 for candidate in shown for size in (candidate.run.reserved_bytes, candidate.room)), default=0
    )
    reach = int(1.05 * max(reach, *(candidate.run.requested_bytes or 0 for candidate in shown), 1))
    for place, candidate in enumerate(shown):
        if candidate.run.reserved_bytes is not None:
            axes.vlines(candidate.run.reserved_bytes, place - 0.4, place + 0.4, color=theme.muted, linewidth=1.5)
        if candidate.room is not None:
            axes.vlines(candidate.room, place - 0.5, place + 0.5, color=theme.text, linewidth=2)
    axes.set_xlim(0, reach)
    byte_axis(axes.xaxis, reach)


def _name(candidate: Candidate) -> str:
    """Formats a candidate in two lines: what it is and whether it fits; its size."""
    value = "" if candidate.value is None else f": {candidate.value}"
    fits = "" if candidate.run.fits else ", does not fit"
    label = shorten_name(f"{candidate.label}{value}", _LABEL)
    return f"{label}\n{format_bytes(candidate.run.requested_bytes or 0)}{fits}"


def _draw_largest(axes: "Axes", argument: str, shown: list[Candidate]) -> None:
    axes.set_title(f"The largest {argument} that fits")
    values = [candidate.value or 0 for candidate in shown]
    axes.barh(range(len(shown)), values, color=_BLUE)
    for place, value in enumerate(values):
        axes.annotate(str(value), (value, place), (3, 0), textcoords="offset points", va="center", fontsize=8)
    label_bars(axes, [shorten_name(candidate.label, _LABEL) for candidate in shown])
    axes.set_xlim(0, 1.1 * max([*values, 1]))


def _draw_probability(axes: "Axes", draws: PlanDraws, theme: Theme) -> None:
    axes.set_title(f"The probability that a batch of {draws.steps} steps is larger")
    points = [(size.batch, size.probability) for size in draws.above if size.probability >= _LEAST]
    axes.semilogy([size for size, _ in points], [probability for _, probability in points], color=_BLUE)
    axes.yaxis.set_major_formatter(lambda probability, _: f"{probability:g}")
    axes.axvline(draws.largest_batch_that_fits, color=theme.accent, linewidth=2)
    place = (draws.largest_batch_that_fits, 0.02)
    text = f" up to {draws.largest_batch_that_fits} fit: out of memory with {draws.out_of_memory_probability:.2g}"
    axes.annotate(text, place, xycoords=("data", "axes fraction"), color=theme.accent, fontweight="bold")
    axes.set_xlabel("samples of a batch")


def write_plan_csv(plan: Plan, path: str | os.PathLike[str]) -> None:
    """Writes a row for each run: COLUMNS, and the bytes by category at its peak as `CATEGORY_bytes`.

    `value` is the value of the searched argument, and empty without one.

    Raises:
        MemprofError: `path` cannot be written.
    """
    found = list(_rows(plan))
    categories = sorted({category for _, _, run in found for category in run.categories})
    with (
        replacing(path) as temporary,
        open(temporary, "w", encoding="utf-8", errors="backslashreplace", newline="") as file,
    ):
        writer = csv.writer(file)
        writer.writerow((*COLUMNS, *(f"{category}_bytes" for category in categories)))
        memories = {cell.gpu: cell.gpu_memory_bytes for cell in _cells(plan)}
        for label, gpu, run in found:
            own = [run.get(name) for name in _OF_RUN]
            own = [label, gpu, memories.get(gpu, ""), run.get("value") or "", *own]
            writer.writerow((*own, *(run.categories.get(category, 0) for category in categories)))
