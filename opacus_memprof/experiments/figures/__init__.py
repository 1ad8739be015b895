# SPDX-License-Identifier: Apache-2.0
"""The pictures of a table of results: each as NAME.png, and as NAME_dark.png on a dark background."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from opacus_memprof.experiments.figures.bars import breakdown_comparison, peak_comparison, performance_tradeoff
from opacus_memprof.experiments.figures.overview import (
    analysis_overview,
    detailed_analysis,
    memory_heatmap,
    operation_breakdown,
)
from opacus_memprof.experiments.figures.timeline import TimeAxis, timelines
from opacus_memprof.experiments.rows import Row
from opacus_memprof.profiles.units import megabytes

# By file name; a figure with {} is drawn for each row and gets the row's name.
FIGURES: dict[str, Callable[[Sequence[Row], Path, str], None]] = {
    "memory_breakdown_comparison": breakdown_comparison,
    "memory_timeline": timelines,
    "performance_tradeoff": performance_tradeoff,
    "memory_analysis_overview": analysis_overview,
    "memory_heatmap": memory_heatmap,
    "memory_timeline_config_{}": timelines,
    "detailed_memory_analysis": detailed_analysis,
    "operation_level_breakdown": operation_breakdown,
    "memory_usage_timeline": timelines,
    "peak_memory_comparison": peak_comparison,
}


@megabytes()
def draw_figure(name: str, rows: Sequence[Row], directory: Path, axis: TimeAxis = "events") -> list[Path]:
    """Draws one of FIGURES, light and dark. Raises MemprofError if matplotlib is missing or it cannot be written."""
    draw = partial(timelines, axis=axis) if FIGURES[name] is timelines else FIGURES[name]
    paths = []
    for shown in [[row] for row in rows] if "{}" in name else [rows]:
        for theme, suffix in (("light", ""), ("dark", "_dark")):
            paths.append(directory / f"{name.format(shown[0].name)}{suffix}.png")
            draw(shown, paths[-1], theme)
    return paths
