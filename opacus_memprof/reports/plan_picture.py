# SPDX-License-Identifier: Apache-2.0
"""A plan as one picture: what each candidate takes, the largest values, how probable it is that memory runs out."""

import os
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import UNSET

from opacus_memprof.profiles.plan import Plan, PlanDraws
from opacus_memprof.profiles.units import format_bytes
from opacus_memprof.reports.figures import byte_axis, label_bars, legend, saved_figure, stacked_bars
from opacus_memprof.reports.palette import THEMES, Theme
from opacus_memprof.reports.plan import Candidate, candidates, title
from opacus_memprof.reports.tables import shorten_name

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_WIDTH = 12.0  # inches
_LABEL = 60  # characters
_BLUE = "#5c8ce3"
_LEAST = 1e-12  # probabilities below it are not drawn


def write_plan_pictures(plan: Plan, path: str | os.PathLike[str]) -> list[Path]:
    """Draws the plan in light and in dark, `a.png` and `a-dark.png`, and returns the files.

    Raises:
        MemprofError: matplotlib is not installed, or a file cannot be written.
    """
    target = Path(path)
    files = {"light": target, "dark": target.with_name(f"{target.stem}-dark{target.suffix}")}
    shown = candidates(plan)
    draws = None if plan.draws is UNSET else plan.draws
    searched = None if plan.search is UNSET else plan.search
    parts = [2 + 0.5 * len(shown)]
    parts += [2 + 0.3 * len(shown)] if searched is not None else []
    parts += [3.5] if draws is not None else []
    for theme, file in files.items():
        with saved_figure(file, theme, (_WIDTH, sum(parts) + 0.6)) as figure:
            figure.suptitle(f"{shorten_name(title(plan), 100)}, on virtual GPUs", fontsize=11)
            places = iter(figure.subplots(len(parts), 1, squeeze=False, height_ratios=parts)[:, 0])
            axes = next(places)
            _draw_candidates(axes, shown, THEMES[theme])
            if searched is not None:
                _draw_largest(next(places), searched.argument, shown)
            if draws is not None:
                _draw_draws(next(places), draws, THEMES[theme])
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
    """A candidate's label of two lines: what it is and whether it fits, and its size."""
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


def _draw_draws(axes: "Axes", draws: PlanDraws, theme: Theme) -> None:
    axes.set_title(f"The probability that a batch of {draws.steps} steps is larger")
    points = [(size.batch, size.probability) for size in draws.above if size.probability >= _LEAST]
    axes.semilogy([size for size, _ in points], [probability for _, probability in points], color=_BLUE)
    axes.yaxis.set_major_formatter(lambda probability, _: f"{probability:g}")
    axes.axvline(draws.largest_batch_that_fits, color=theme.accent, linewidth=2)
    place = (draws.largest_batch_that_fits, 0.02)
    text = f" up to {draws.largest_batch_that_fits} fit: out of memory with {draws.out_of_memory_probability:.2g}"
    axes.annotate(text, place, xycoords=("data", "axes fraction"), color=theme.accent, fontweight="bold")
    axes.set_xlabel("samples of a batch")
