# SPDX-License-Identifier: Apache-2.0
"""What `opacus-memprof sweep` and `single-gpu` share: running many configurations."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from opacus_memprof.cli.training_options import FineTuningOptions, hide_token
from opacus_memprof.errors import MemprofError
from opacus_memprof.experiments.configuration import Configuration

if TYPE_CHECKING:
    from opacus_memprof.experiments.sweep.grid import Cell
    from opacus_memprof.experiments.sweep.tables import Results


ResultsDir = Annotated[Path, typer.Option("--results-dir", metavar="DIR", help="Where everything goes.")]


@dataclass(frozen=True)
class RunningOptions:
    """How the processes of many configurations are run."""

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


def configuration(training: FineTuningOptions, default_model: str, **sizes: Any) -> Configuration:
    """Of sequence classification, as SNLI is. `default_model` is an id on the hub, for where no other model is given.

    Raises:
        MemprofError: values that cannot be trained.
    """
    hide_token(sys.argv)
    return training.configuration(
        default=default_model, pretrained=True, task="classification", warmup_steps=1, **sizes
    )


def run_side_by_side(
    command: str,
    cells: "Sequence[Cell]",
    results_dir: Path,
    draw: "Callable[[Results, Path], object]",
    *,
    token: str | None,
    running: RunningOptions,
    grows: bool,
    detailed: bool = False,
    on_line: Callable[[str], object] = lambda line: None,
) -> "Results":
    """Runs cells, whose results go to `results_dir`, and draws all that are there. Returns the cells' own, by name.

    Raises:
        MemprofError: see ResultsDirectory and run_missing.
        typer.Exit: with code 1, where a cell neither finished nor ran out of memory.
    """
    from rich.console import Console

    from opacus_memprof.experiments.sweep.results import ResultsDirectory
    from opacus_memprof.experiments.sweep.run import local_launcher, on_device, run_missing
    from opacus_memprof.experiments.sweep.submitted import Submitted

    gpus: Sequence[int] = ()
    if running.launcher == "local":
        cells, gpus = on_device(cells)
    console = Console()
    with ResultsDirectory(results_dir, command, cells, grows=grows, resume=running.resume) as directory:
        where = (
            local_launcher(directory, gpus, token, on_line)
            if running.launcher == "local"
            else Submitted(directory, running.launcher, _parsed(running.launcher_option or ()), token)
        )
        run_missing(directory, where, console, detailed=detailed)
        everything = directory.results()
        draw(everything, directory.path)
    results = {cell.name: everything[cell.name] for cell in cells}
    for reason in dict.fromkeys(result["data"]["reason"] for result in results.values() if result["data"]):
        console.print(f"data: {reason}", highlight=False, markup=False, soft_wrap=True)
    counts: dict[str, int] = {}
    for result in results.values():
        counts[result["status"]] = counts.get(result["status"], 0) + 1
    listed = ", ".join(f"{count} {status.replace('_', ' ')}" for status, count in counts.items())
    console.print(f"{listed}. The results are in {directory.path}", highlight=False, soft_wrap=True)
    if counts.keys() - {"finished", "out_of_memory"}:
        raise typer.Exit(1)
    return results


def _parsed(options: Sequence[str]) -> dict[str, str | int]:
    """`KEY=VALUE` by key; whole numbers are numbers. Raises MemprofError for anything else."""
    parsed: dict[str, str | int] = {}
    for option in options:
        key, equals, value = option.partition("=")
        if not key or not equals:
            raise MemprofError(f"--launcher-option {option!r} is not of the form KEY=VALUE, as slurm_partition=gpu is")
        parsed[key] = int(value) if value.isdigit() else value
    return parsed
