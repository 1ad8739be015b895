# SPDX-License-Identifier: Apache-2.0
"""Presets, one for each command that runs a grid: the places of results, and which tables and pictures are written."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from opacus_memprof.experiments.figures import draw_figure
from opacus_memprof.experiments.figures.timeline import TimeAxis
from opacus_memprof.experiments.grid import Cell, MethodCell
from opacus_memprof.experiments.rows import Row
from opacus_memprof.experiments.tables import TABLES
from opacus_memprof.profiles.files import write_text


@dataclass(frozen=True)
class Preset:
    """The outputs of a command for a grid of configurations.

    Attributes:
        command: its name, which the directory stores.
        cell: the class of its cells, which defines the settings that vary.
        grows: whether a directory accepts further configurations, and replaces results of the same ones.
        side_by_side: whether several GPUs work at once; False if times are compared.
        result, run: a run's result file, and the directory of its other files, from its name.
        outputs: the directory of tables and pictures.
        tables, figures: files there; keys of tables.TABLES and of figures.FIGURES.
    """

    command: str
    cell: type[Cell]
    grows: bool
    tables: tuple[str, ...]
    figures: tuple[str, ...]
    side_by_side: bool = True
    result: str = "runs/{}/result.json"
    run: str = "runs/{}"
    outputs: str = "."

    def write_tables(self, rows: Sequence[Row], directory: Path) -> list[Path]:
        """Writes the tables into `directory`, each atomically. Raises MemprofError if one cannot be written."""
        return [write_text(directory / name, TABLES[name](rows)) for name in self.tables]

    def draw(self, rows: Sequence[Row], directory: Path, axis: TimeAxis = "events") -> list[Path]:
        """Draws the pictures into `directory`, light and `_dark`. Raises MemprofError if one cannot be written."""
        return [path for name in self.figures for path in draw_figure(name, rows, directory, axis)]


EXPERIMENTS = Preset(
    "experiments",
    MethodCell,
    grows=True,
    side_by_side=False,
    result="{}_result.json",
    run="{}_result.run",
    outputs="visualizations",
    tables=("results.jsonl", "memory_profile_summary.csv", "summary.txt", "memory_table.tex"),
    figures=("memory_breakdown_comparison", "memory_timeline", "performance_tradeoff"),
)
SWEEP = Preset(
    "sweep",
    Cell,
    grows=False,
    tables=("results.jsonl", "memory_profile_results.json", "memory_profile_summary.csv", "summary.txt"),
    figures=("memory_analysis_overview", "memory_heatmap", "memory_timeline_config_{}"),
)
DETAILED_SWEEP = replace(
    SWEEP,
    tables=(*SWEEP.tables, "detailed_memory_results.json"),
    figures=(*SWEEP.figures, "detailed_memory_analysis", "operation_level_breakdown"),
)
SINGLE_GPU = replace(
    SWEEP, command="single-gpu", grows=True, figures=("memory_usage_timeline", "peak_memory_comparison")
)
