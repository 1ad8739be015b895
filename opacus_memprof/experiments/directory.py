# SPDX-License-Identifier: Apache-2.0
"""The directory of a grid's results, and the presets: which files each command writes there.

The manifest prevents mixing results of different commands:

manifest.json   the command, the common settings of all configurations, and their names

The preset names the other files: each run's result, its directory with configuration.json, log.txt and profile/, the
tables and the pictures.
"""

import contextlib
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from opacus_memprof.errors import MemprofError
from opacus_memprof.experiments import process
from opacus_memprof.experiments.configuration import Cell, Configuration, MethodCell
from opacus_memprof.experiments.figures import draw_figure
from opacus_memprof.experiments.figures.timeline import TimeAxis
from opacus_memprof.experiments.files import MANIFEST, read_json, read_result, write_json
from opacus_memprof.experiments.rows import Row, sort_by_mode
from opacus_memprof.experiments.tables import TABLES
from opacus_memprof.profiles.directory import LOCK, locked_directory
from opacus_memprof.profiles.experiment_result import ExperimentResult
from opacus_memprof.profiles.files import write_text
from opacus_memprof.profiles.json_object import FORMAT

_DONE = ("finished", "out_of_memory")


@dataclass(frozen=True)
class Preset:
    """The outputs of a command for a grid of configurations.

    Attributes:
        command: its name, which the directory stores.
        cell: the class of its cells, which defines the settings that vary.
        grows: whether a directory accepts further configurations, and replaces results of the same ones.
        side_by_side: whether several GPUs work at once; False if times are compared.
        result: the path of a run's result file, with {} for the name of the run.
        run: the directory of the run's other files, in the same way.
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


class ResultsDirectory:
    """The directory of the results of `cells`, locked for the length of a `with` block.

    Args:
        path: the directory; made if it does not exist.
        preset: the preset of the command that writes it. If its directories grow, other cells may be there already, and
            stay; otherwise the directory has these cells only.
        cells: the cells to run; they share all settings that their class does not vary.
        resume: whether existing results are kept, and not run again. Without it they are run again if the directory
            grows, and refused otherwise.

    Attributes:
        path: the absolute path.
        names: names of all cells of the directory, in the order in which they were requested.

    Raises:
        MemprofError: raised on entering. The directory holds other files, another process writes to it, or it cannot be
            written. It has not been changed then.
    """

    def __init__(self, path: Path, preset: Preset, cells: Sequence[Cell], *, resume: bool = False) -> None:
        self.path = path.absolute()
        self.names = [cell.name for cell in cells]
        self.outputs = self.path / preset.outputs
        self._preset, self._cells, self._resume = preset, cells, resume
        shared = cells[0].configuration.to_json()
        self._shared = {key: value for key, value in shared.items() if key not in preset.cell.varied}
        self._rows: dict[str, Row] = {}

    def __enter__(self) -> "ResultsDirectory":
        try:
            with contextlib.ExitStack() as stack:
                stack.enter_context(locked_directory(self.path, self._refuse_other_files))
                self._new = not (self.path / MANIFEST).exists()
                manifest = {"format": FORMAT, "command": self._preset.command, "shared": self._shared}
                write_json(self.path / MANIFEST, {**manifest, "names": self.names})
                self._locked = stack.pop_all()
        except OSError as error:
            raise MemprofError(
                f"cannot write results to {self.path} ({error.strerror}): choose another --results-dir"
            ) from error
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        refused = kind is not None and issubclass(kind, MemprofError)
        if refused and self._new and not self.any_done():  # so that the next call may have other settings
            for name in self.names:
                shutil.rmtree(self.run_directory(name), ignore_errors=True)
                self._result(name).unlink(missing_ok=True)
            (self.path / MANIFEST).unlink(missing_ok=True)
        self._locked.close()
        if refused:
            for folder in (self.path / "runs", self.path):
                with contextlib.suppress(OSError):
                    folder.rmdir()  # if it is empty

    def run_directory(self, name: str) -> Path:
        return self.path / self._preset.run.format(name)

    def _result(self, name: str) -> Path:
        return self.path / self._preset.result.format(name)

    def pending(self) -> list[Cell]:
        """Returns the cells without a result to keep. Runs that failed or were killed are run again."""
        return [cell for cell in self._cells if not (self._resume and self._is_done(cell.name))]

    def add(self, cell: Cell, result: ExperimentResult) -> Row:
        """Adds the result of `process.run` in the cell's directory. Raises MemprofError if it cannot be written."""
        if self._result(cell.name).parent != self.run_directory(cell.name):
            process.move_result(result, self.run_directory(cell.name), self._result(cell.name))
        self._rows[cell.name] = row = self._make_row(cell, result)
        return row

    def rows(self) -> list[Row]:
        """Returns the rows of all existing results, in the order of `names`, vanilla first."""
        return sort_by_mode([row for name in self.names if (row := self._row(name)) is not None])

    def any_done(self) -> bool:
        """Returns whether any cell has finished or run out of memory."""
        return any(self._is_done(name) for name in self.names)

    def _row(self, name: str) -> Row | None:
        if name not in self._rows and self._result(name).exists():
            result = read_result(self._result(name))
            cell = self._preset.cell(Configuration.from_json(dict(result.config)))
            self._rows[name] = self._make_row(cell, result)
        return self._rows.get(name)

    def _make_row(self, cell: Cell, result: ExperimentResult) -> Row:
        return Row(cell.name, cell.label, result, os.path.dirname(self._preset.result.format(cell.name)))

    def _is_done(self, name: str) -> bool:
        row = self._row(name)
        return row is not None and row.result.status in _DONE

    def _refuse_other_files(self) -> None:
        if not self.path.is_dir() or not any(entry.name != LOCK for entry in self.path.iterdir()):
            return
        manifest = read_json(self.path / MANIFEST) if (self.path / MANIFEST).is_file() else {}
        if manifest.get("format", FORMAT) != FORMAT:
            raise MemprofError(
                f"{self.path} holds results of format {manifest['format']!r}, and this release writes {FORMAT}: "
                "choose another --results-dir"
            )
        if not manifest.keys() >= {"format", "command", "shared", "names"}:
            raise MemprofError(
                f"{self.path} holds files that are not results, and was not changed: choose another --results-dir"
            )
        if manifest["command"] != self._preset.command:
            raise MemprofError(
                f"{self.path} holds results of `opacus-memprof {manifest['command']}`: choose another --results-dir"
            )
        self._refuse_other_settings(manifest["shared"])
        if self._preset.grows:
            self.names = list(dict.fromkeys([*manifest["names"], *self.names]))
        elif manifest["names"] != self.names:
            raise MemprofError(
                f"{self.path} holds another grid, of {len(manifest['names'])} configurations: "
                "give the same sizes and ranks as then, or choose another --results-dir"
            )
        elif not self._resume:
            raise MemprofError(f"{self.path} holds results: add --resume to go on, or choose another --results-dir")

    def _refuse_other_settings(self, shared: Mapping[str, Any]) -> None:
        differs = [key for key in self._shared if shared.get(key) != self._shared[key]]
        if differs:
            key = differs[0]
            raise MemprofError(
                f"{self.path} holds results with {key} {shared.get(key)!r}, and this call has {self._shared[key]!r}: "
                "they cannot be compared, so choose another --results-dir"
            )
