# SPDX-License-Identifier: Apache-2.0
"""Runs the cells of a results directory that have no result yet, and writes the tables as results come."""

import subprocess
import threading
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace

from rich.console import Console

from opacus_memprof.errors import MemprofError
from opacus_memprof.experiments import process
from opacus_memprof.experiments.configuration import Device
from opacus_memprof.experiments.sweep.grid import Cell
from opacus_memprof.experiments.sweep.launcher import Launcher, Local, Result
from opacus_memprof.experiments.sweep.progress import board
from opacus_memprof.experiments.sweep.results import ResultsDirectory
from opacus_memprof.experiments.sweep.tables import write_tables


def on_device(cells: Sequence[Cell]) -> tuple[list[Cell], list[int]]:
    """The cells on the device that "auto" stands for, and the numbers of the GPUs to run them on.

    Raises:
        MemprofError: a GPU is asked for and there is none.
    """
    wanted = cells[0].configuration.device
    if wanted == "cpu":
        return list(cells), []
    import torch

    from opacus_memprof.adaptors import resolve_device

    if (needed := cells[0].configuration.nproc) > 1:  # one cell at a time, which sees all GPUs
        if wanted == "cuda" and needed > torch.cuda.device_count():
            raise MemprofError(f"--nproc is {needed} and there are {torch.cuda.device_count()} GPUs: lower it")
        return list(cells), []
    device: Device = "cuda" if resolve_device(wanted) == "cuda" else "cpu"
    gpus = range(torch.cuda.device_count()) if device == "cuda" else []
    return [Cell(replace(cell.configuration, device=device)) for cell in cells], list(gpus)


def local_launcher(
    directory: ResultsDirectory,
    gpus: Sequence[int],
    token: str | None,
    on_line: Callable[[str], object] = lambda line: None,
) -> Local:
    """Runs cells on this machine, as `process.run` does it; `gpus` as for `Local`."""
    children: set[subprocess.Popen[str]] = set()
    stopping = threading.Event()

    def started(child: "subprocess.Popen[str]") -> None:
        children.add(child)
        if stopping.is_set():  # too late for `stop` to see it
            child.kill()

    def run_cell(cell: Cell, gpu: int | None) -> Result:
        return process.run(
            cell.configuration,
            directory.run_directory(cell.name),
            token=token,
            gpu=gpu,
            on_line=on_line,
            on_start=started,
        )

    def stop() -> None:
        stopping.set()
        for child in list(children):
            child.kill()  # harmless where it has ended

    return Local(run_cell, stop, gpus)


def run_missing(directory: ResultsDirectory, launcher: Launcher, console: Console, *, detailed: bool) -> None:
    """Runs what has no result yet. The tables are written after each.

    Raises:
        MemprofError: the first cell was refused, as all would be: of an unknown model, most of all. Or a file cannot be
            written.
    """
    cells, refused = directory.missing(), False
    if kept := len(directory.names) - len(cells):
        console.print(f"{kept} of {len(directory.names)} configurations have a result already", highlight=False)
    if cells:  # a bar of nothing would wait for its first result
        with board(console, len(cells), launcher.workers) as ended, closing(launcher.run(cells)) as results:
            for cell, result in results:
                if refused := result["refused"] and not directory.any_done():
                    break
                ended(cell.name, result)
                write_tables(directory.results(), directory.path, detailed=detailed)
    if refused:
        raise MemprofError(result["error"])
    write_tables(directory.results(), directory.path, detailed=detailed)
