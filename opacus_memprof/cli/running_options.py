# SPDX-License-Identifier: Apache-2.0
"""The options of how many configurations are run, and running them."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from opacus_memprof.errors import MemprofError

if TYPE_CHECKING:
    from opacus_memprof.experiments.grid import Cell
    from opacus_memprof.experiments.presets import Preset


ResultsDir = Annotated[Path, typer.Option("--results-dir", metavar="DIR", help="Where everything goes.")]


@dataclass(frozen=True)
class RunningOptions:
    """The options of how the processes of many configurations are run."""

    resume: Annotated[
        bool,
        typer.Option("--resume", help="Keep the results that are there, and run the others."),
    ] = False
    launcher: Annotated[
        Literal["local", "slurm"], typer.Option("--launcher", help="slurm: one job a configuration.")
    ] = "local"
    launcher_option: Annotated[
        list[str] | None,
        typer.Option("--launcher-option", metavar="KEY=VALUE", help="submitit's, such as slurm_partition=gpu."),
    ] = None
    pause: Annotated[float, typer.Option(help="Seconds between two runs on a GPU.", min=0)] = 0

    def run(self, preset: "Preset", cells: "Sequence[Cell]", results_dir: Path, token: str | None) -> None:
        """Runs cells, whose results go to `results_dir`, and draws all that are there. Prints how it goes: a line for
        each run, or the stages of a single one; and at the end a summary.

        Raises:
            MemprofError: see engine.run_grid.
            typer.Exit: with code 1, where a cell neither finished nor ran out of memory.
        """
        from rich.console import Console

        from opacus_memprof.experiments.engine import run_grid
        from opacus_memprof.experiments.summary import terminal_summary

        console = Console()
        rows = run_grid(
            preset,
            cells,
            results_dir,
            console,
            resume=self.resume,
            cluster=None if self.launcher == "local" else _parsed(self.launcher_option or ()),
            pause=self.pause,
            token=token,
            on_line=print if len(cells) == 1 else lambda line: None,
        )
        print(terminal_summary(rows, results_dir))
        for reason in dict.fromkeys(row.result.data.reason for row in rows if row.result.data):
            console.print(f"data: {reason}", highlight=False, markup=False, soft_wrap=True)
        counts = Counter(row.outcome for row in rows)
        listed = ", ".join(f"{count} {outcome}" for outcome, count in counts.items())
        console.print(f"{listed}. The results are in {results_dir.absolute()}", highlight=False, soft_wrap=True)
        if any(not row.finished and not row.ran_out_of_memory for row in rows):
            raise typer.Exit(1)


@dataclass(frozen=True)
class MethodRunningOptions(RunningOptions):
    """The same for commands that compare times: the GPU rests between two runs."""

    pause: Annotated[float, typer.Option(envvar="PAUSE", help="Seconds between two runs on a GPU.", min=0)] = 3


def _parsed(options: Sequence[str]) -> dict[str, str | int]:
    """`KEY=VALUE` by key; whole numbers are numbers. Raises MemprofError for anything else."""
    parsed: dict[str, str | int] = {}
    for option in options:
        key, equals, value = option.partition("=")
        if not key or not equals:
            raise MemprofError(f"--launcher-option {option!r} is not of the form KEY=VALUE, as slurm_partition=gpu is")
        parsed[key] = int(value) if value.isdigit() else value
    return parsed
