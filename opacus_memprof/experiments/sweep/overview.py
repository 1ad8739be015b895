# SPDX-License-Identifier: Apache-2.0
"""memory_analysis_overview.png: every configuration's peak, and how it grows with each size of the grid."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from opacus_memprof.experiments.sweep.bars import height, peak_bars
from opacus_memprof.experiments.sweep.grid import VARIED
from opacus_memprof.experiments.sweep.reading import Result, peak_bytes
from opacus_memprof.reports.figures import byte_axis, drawn, legend
from opacus_memprof.reports.palette import THEMES, Theme

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_TITLES = {
    "seq_length": "Sequence length",
    "batch_size": "Batch size",
    "max_physical_batch_size": "Physical batch size",
    "lora_rank": "LoRA rank",
}
_TREND = 2.9  # inches

Line = list[tuple[int, Result]]


def draw_overview(results: Mapping[str, Result], path: Path, theme: str) -> None:
    rows = list(results.values())
    varied = varied_sizes(rows)
    bars = height(len(rows))
    with drawn(path, theme, (13, bars + (_TREND if varied else 0))) as figure:
        if not varied:
            axes = figure.subplots()
        else:
            upper, lower = figure.subfigures(2, 1, height_ratios=(bars, _TREND), squeeze=False).flat
            axes = upper.subplots()
            panels = lower.subplots(1, len(varied), sharey=True, squeeze=False)[0]
            for panel, size in zip(panels, varied, strict=True):
                _trend(panel, size, lines_over(size, rows), THEMES[theme])
            panels[0].set_ylabel("memory at the peak")
        peak_bars(axes, rows, THEMES[theme])
        legend(axes.figure, axes)


def varied_sizes(results: Sequence[Result]) -> list[str]:
    """Those of grid.VARIED that have more than one value."""
    return [size for size in VARIED if len({_value(result, size) for result in results}) > 1]


def lines_over(size: str, results: Sequence[Result]) -> list[Line]:
    """Results that differ in `size` only, as lines of (size, result) from the smallest on; those with no peak are left
    out."""
    lines: dict[tuple[int, ...], Line] = defaultdict(list)
    for result in results:
        if peak_bytes(result) is not None:
            others = tuple(_value(result, other) for other in VARIED if other != size)
            lines[others].append((_value(result, size), result))
    return [sorted(line, key=lambda point: point[0]) for line in lines.values()]


def _value(result: Result, size: str) -> int:
    return int(result["config"][size] or 0)  # no LoRA is rank 0


def _trend(axes: "Axes", size: str, lines: Sequence[Line], theme: Theme) -> None:
    values = sorted({value for line in lines for value, _ in line})
    place = {value: index for index, value in enumerate(values)}
    largest = 0
    for line in lines:
        sizes = [peak_bytes(result) or 0 for _, result in line]
        largest = max([largest, *sizes])
        axes.plot([place[value] for value, _ in line], sizes, color=theme.muted, linewidth=1, marker="o", markersize=3)
        for (value, result), reached in zip(line, sizes, strict=True):
            if result["status"] != "finished":
                axes.plot(place[value], reached, marker="X", markersize=8, color=theme.accent, linestyle="")
    axes.set_title(_TITLES[size])
    names = ["full" if size == "lora_rank" and value == 0 else str(value) for value in values]
    axes.set_xticks(range(len(values)), names)
    axes.margins(x=0.15)
    axes.set_ylim(0, 1.1 * max(largest, 1))
    byte_axis(axes.yaxis, largest)
