# SPDX-License-Identifier: Apache-2.0
"""Runs a grid of configurations, each in a new process, and writes tables and pictures of their results."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from opacus_memprof.analysis.diff import peak_tax
from opacus_memprof.errors import MemprofError
from opacus_memprof.experiments.directory import ResultsDirectory
from opacus_memprof.experiments.grid import Cell
from opacus_memprof.experiments.launcher import (
    ExecutorLauncher,
    Launcher,
    LocalLauncher,
    choose_device,
    cluster_launcher,
)
from opacus_memprof.experiments.presets import Preset
from opacus_memprof.experiments.rows import Row, find_vanilla
from opacus_memprof.experiments.summary import describe_outcome
from opacus_memprof.jobs.executors import executor_of
from opacus_memprof.jobs.progress import ProgressBoard
from opacus_memprof.profiles.difference import Tax
from opacus_memprof.profiles.experiment_result import ExperimentResult
from opacus_memprof.profiles.optional import require

_STYLE = {"finished": "green", "out_of_memory": "magenta"}


def run_grid(
    preset: Preset,
    cells: Sequence[Cell],
    path: Path,
    console: Console,
    *,
    resume: bool = False,
    executor: str = "local",
    cluster: Mapping[str, Any] | None = None,
    pause: float = 0,
    token: str | None = None,
    on_line: Callable[[str], object] = lambda line: None,
) -> list[Row]:
    """Runs cells, and draws all results in their directory. Returns the rows of the cells.

    Args:
        preset: where results go, and which tables and pictures are written.
        cells: the configurations.
        path: the directory of the results.
        console: receives the progress.
        resume: whether to keep existing results, and run the other cells only.
        executor: "local" for this machine, "submitit" for jobs on SLURM, otherwise see jobs.executors.executor_of.
        cluster: parameters of submitit.
        pause: seconds between two runs on the same GPU.
        token: token of the Hugging Face hub.
        on_line: called with each line on a run's progress, on this machine.

    Raises:
        MemprofError: see ResultsDirectory, choose_device, SubmititExecutor and executor_of; or the first cell was
            refused, as all others would be, for example because the model is unknown.
    """
    require("matplotlib", "pictures")  # now, not after hours of training
    gpus: Sequence[int | None] = ()
    workers = None
    if executor == "local":
        cells, gpus = choose_device(cells)
    elif executor != "submitit":
        workers = executor_of(executor)
    with ResultsDirectory(path, preset, cells, resume=resume) as directory:
        if workers is not None:
            launcher: Launcher = ExecutorLauncher(directory, workers, workers.workers)
        elif executor == "local":
            together = preset.side_by_side or cells[0].configuration.virtual_gpu is not None  # no times if virtual
            chosen = gpus if together else gpus[:1]
            launcher = LocalLauncher(directory, chosen, token, pause, on_line)
        else:
            launcher = cluster_launcher(directory, "slurm", cluster or {}, token)
        _run_missing(directory, preset, launcher, console)
        rows = directory.rows()
        preset.draw(rows, directory.outputs)
    names = [cell.name for cell in cells]
    return [row for row in rows if row.name in names]


def _run_missing(directory: ResultsDirectory, preset: Preset, launcher: Launcher, console: Console) -> None:
    """Runs the cells that have no result yet, and writes the tables after each."""
    cells, refused = directory.pending(), ""
    if kept := len(directory.names) - len(cells):
        console.print(f"{kept} of {len(directory.names)} configurations have a result already", highlight=False)
    if cells:  # an empty bar would wait for its first result
        at_once = f", {launcher.workers} at once" if launcher.workers > 1 else ""
        board = ProgressBoard(console, f"configurations{at_once}", len(cells))
        with board, closing(launcher.run(cells)) as results:
            for cell, result in results:
                # The other cells share the error of the first. Later cells may have layers that their mode cannot
                # train.
                if result.refused and all(row.result.refused for row in directory.rows()):
                    refused = result.error or ""
                    break
                result.tax = _tax(result, find_vanilla(directory.rows()))
                show_row(board, directory.add(cell, result))
                preset.write_tables(directory.rows(), directory.outputs)
    if refused:
        raise MemprofError(refused)
    preset.write_tables(directory.rows(), directory.outputs)


def show_row(board: ProgressBoard, row: Row) -> None:
    """Shows on a board that a run has ended."""
    board.advance()
    message = Text(f"{row.name}  ").append(describe_outcome(row), _STYLE.get(row.result.status, "red"))
    board.print(message.append(f"  [{board.position}]", "dim"))


def _tax(result: ExperimentResult, vanilla: Row | None) -> Tax | None:
    """Returns the cost of privacy, as `opacus-memprof tax` computes it; None if the two cannot be compared."""
    if vanilla is None or result.status != "finished" or result.config.mode == "vanilla":
        return None
    if result.peak is None or vanilla.peak is None:
        return None
    return Tax(devices={str(result.device): peak_tax(result.peak, vanilla.peak)}, notes=[])
