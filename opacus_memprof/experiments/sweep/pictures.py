# SPDX-License-Identifier: Apache-2.0
"""The pictures of a results directory: each as NAME.png, and as NAME_dark.png on a dark background."""

from collections.abc import Callable
from pathlib import Path

from opacus_memprof.experiments.sweep.bars import draw_comparison
from opacus_memprof.experiments.sweep.details import draw_details, draw_operations
from opacus_memprof.experiments.sweep.heatmap import draw_heatmap
from opacus_memprof.experiments.sweep.overview import draw_overview
from opacus_memprof.experiments.sweep.tables import Results
from opacus_memprof.experiments.sweep.timelines import draw_timeline, draw_timelines

_SUFFIXES = {"light": "", "dark": "_dark"}


def draw_sweep(results: Results, directory: Path, *, detailed: bool) -> None:
    """Overview, heat map and a timeline of each configuration; with `detailed`, components and operations."""
    _draw(draw_overview, results, directory / "memory_analysis_overview.png")
    _draw(draw_heatmap, results, directory / "memory_heatmap.png")
    for name, result in results.items():
        for theme, suffix in _SUFFIXES.items():
            draw_timeline(result, directory / f"memory_timeline_config_{name}{suffix}.png", theme)
    if detailed:
        _draw(draw_details, results, directory / "detailed_memory_analysis.png")
        _draw(draw_operations, results, directory / "operation_level_breakdown.png")


def draw_single_gpu(results: Results, directory: Path) -> None:
    """The timelines of all configurations, and their peaks side by side."""
    _draw(draw_timelines, results, directory / "memory_usage_timeline.png")
    _draw(draw_comparison, results, directory / "peak_memory_comparison.png")


def _draw(draw: Callable[[Results, Path, str], object], results: Results, path: Path) -> None:
    for theme, suffix in _SUFFIXES.items():
        draw(results, path.with_stem(path.stem + suffix), theme)
