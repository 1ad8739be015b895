# SPDX-License-Identifier: Apache-2.0
"""Memory by category over the time of one run, and of several."""

import math
from collections.abc import Mapping
from pathlib import Path

from opacus_memprof.experiments.sweep.reading import Result, label, outcome, peak_bytes
from opacus_memprof.experiments.timeline import X_LABEL, timeline_panel
from opacus_memprof.reports.figures import byte_axis, category_label, drawn, legend
from opacus_memprof.reports.palette import THEMES
from opacus_memprof.units import format_bytes

_COLUMNS = 3  # of several timelines


def draw_timeline(result: Result, path: Path, theme: str) -> None:
    """memory_timeline_config_NAME.png: one run."""
    with drawn(path, theme, (12, 5)) as figure:
        axes = figure.subplots()
        peak = peak_bytes(result)
        reached = "" if peak is None else f": {format_bytes(peak)} in {category_label(result['peak']['phase'])}"
        timeline_panel(axes, result, label(result) + reached + outcome(result), THEMES[theme])
        axes.set_xlabel(X_LABEL)
        legend(figure, axes)


def draw_timelines(results: Mapping[str, Result], path: Path, theme: str) -> None:
    """memory_usage_timeline.png: all runs, on the same scale of bytes."""
    rows = list(results.values())
    columns = min(len(rows), _COLUMNS)
    lines = math.ceil(len(rows) / _COLUMNS)
    with drawn(path, theme, (12, 5) if len(rows) == 1 else (14, 1 + 2.6 * lines)) as figure:
        panels = list(figure.subplots(lines, columns, sharey=True, squeeze=False).flat)
        used = panels[: len(rows)]
        for axes, result in zip(used, rows, strict=True):
            timeline_panel(axes, result, label(result) + outcome(result), THEMES[theme])
        for axes in panels[len(rows) :]:
            axes.set_axis_off()
        for axes in used[-columns:]:
            axes.set_xlabel(X_LABEL)
        top = max(axes.get_ylim()[1] for axes in used)
        for axes in used:
            axes.set_ylim(0, top)
        byte_axis(used[0].yaxis, top)
        legend(figure, *used)
