# SPDX-License-Identifier: Apache-2.0
"""Horizontal bars, one for each configuration, where those that did not finish are marked as such."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from opacus_memprof.experiments.sweep.reading import Result, categories, failure, label, peak_bytes
from opacus_memprof.reports.figures import drawn, legend, stacked_bars
from opacus_memprof.reports.palette import THEMES, Theme

if TYPE_CHECKING:
    from matplotlib.axes import Axes

ROW = 0.3  # inches
_HEAD = 1.3  # inches of title and axis


def height(bars: int) -> float:
    """Of a picture with that many bars, in inches."""
    return _HEAD + ROW * max(bars, 4)


def name_bars(axes: "Axes", names: Sequence[str]) -> None:
    """Names in full: each part tells a configuration from others. Few bars are no thicker than many."""
    axes.set_yticks(range(len(names)), names)
    middle, rows = (len(names) - 1) / 2, max(len(names), 3)
    axes.set_ylim(middle + rows / 2, middle - rows / 2)


def say_of_nothing(axes: "Axes", sizes: Sequence[Mapping[str, int]], words: str) -> None:
    """In the place of the sums of bars that have no parts. Their texts come first and in the bars' order."""
    for text, parts in zip(axes.texts, sizes, strict=False):
        if not parts:
            text.set_text(words)


def peak_bars(axes: "Axes", results: Sequence[Result], theme: Theme) -> None:
    """The peak of each by category. One that ran out of memory is hatched: it shows how far it got."""
    names, sizes = [label(result) for result in results], [categories(result) for result in results]
    stacked_bars(axes, names, sizes, horizontal=True)
    name_bars(axes, names)
    say_of_nothing(axes, sizes, "")
    axes.set_title("Memory at the peak, by category")
    axes.set_xlabel("S: sequence length · B: batch / physical batch · r: LoRA rank")
    mark_failures(axes, results, theme)


def mark_failures(axes: "Axes", results: Sequence[Result], theme: Theme, *, words: bool = True) -> None:
    """Over bars that begin at 0 and end at the peak, in the order of the results; says why as well, with `words`."""
    for place, result in enumerate(results):
        said, reached = failure(result), peak_bytes(result) or 0
        if said is None:
            continue
        axes.barh(place, reached, fill=False, hatch="////", edgecolor=theme.accent, linewidth=1)
        if not words:
            continue
        axes.annotate(
            said,
            (reached, place),
            (60, 0),  # after the sum
            textcoords="offset points",
            va="center",
            fontsize=8,
            color=theme.accent,
        )
    if words and any(failure(result) for result in results):
        axes.set_xlim(0, 1.55 * max(max(peak_bytes(result) or 0 for result in results), 1))


def draw_comparison(results: Mapping[str, Result], path: Path, theme: str) -> None:
    """peak_memory_comparison.png: what each configuration takes, and how long its steps are."""
    rows = list(results.values())
    with drawn(path, theme, (13, height(len(rows)))) as figure:
        peaks, times = figure.subplots(1, 2, sharey=True, width_ratios=(3, 1))
        peak_bars(peaks, rows, THEMES[theme])
        step_times(times, rows, THEMES[theme])
        legend(figure, peaks)


def step_times(axes: "Axes", results: Sequence[Result], theme: Theme) -> None:
    """Of each, the mean time of its measured steps."""
    times = [result["avg_time_ms"] or 0.0 for result in results]
    axes.barh(range(len(times)), times, color=theme.muted)
    for place, time in enumerate(times):
        if time:
            axes.annotate(
                f"{time:,.0f} ms" if time >= 100 else f"{time:.3g} ms",
                (time, place),
                (3, 0),
                textcoords="offset points",
                va="center",
                fontsize=8,
            )
    axes.set_title("Time of a step")
    axes.set_xlim(0, 1.35 * max([*times, 1e-9]))
    axes.grid(axis="y", visible=False)
    axes.grid(axis="x", visible=True)
    axes.tick_params(axis="y", length=0, labelleft=False)
    axes.set_xlabel("ms")
