# SPDX-License-Identifier: Apache-2.0
"""Launchers, which run cells and return their results as they come; and the one that runs them on this machine."""

import queue
import subprocess
import threading
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import replace
from typing import Protocol

from opacus_memprof.errors import MemprofError
from opacus_memprof.experiments import process
from opacus_memprof.experiments.configuration import Device
from opacus_memprof.experiments.directory import ResultsDirectory
from opacus_memprof.experiments.grid import Cell
from opacus_memprof.planning.runs import usable_workers
from opacus_memprof.profiles.experiment_result import ExperimentResult


class Launcher(Protocol):
    """Runs cells, `workers` of them at once. `run` yields each cell with its result when it has ended; closing the
    generator ends the cells that still run."""

    workers: int

    def run(self, cells: Sequence[Cell]) -> Generator[tuple[Cell, ExperimentResult], None, None]: ...


class LocalLauncher:
    """A launcher that runs cells on this machine: one at a time on each GPU, or a single one on the CPU.

    Args:
        run_cell: runs a cell in a process of its own, on the given GPU (None: wherever the cell says), and returns its
            result. Called from several threads.
        stop: ends the processes that `run_cell` waits for.
        pause: seconds between two cells on a GPU.
        gpus: the numbers of those to use, as this process sees them; empty is the CPU.
    """

    def __init__(
        self,
        run_cell: Callable[[Cell, int | None], ExperimentResult],
        stop: Callable[[], object],
        gpus: Sequence[int | None],
        pause: float = 0,
    ) -> None:
        self.workers = max(1, len(gpus))
        self._run_cell, self._stop, self._pause = run_cell, stop, pause
        self._stopped = threading.Event()
        self._free: queue.SimpleQueue[tuple[int | None, float]] = (
            queue.SimpleQueue()
        )  # with the pause before the next cell
        for gpu in gpus or (None,):
            self._free.put((gpu, 0.0))

    def run(self, cells: Sequence[Cell]) -> Generator[tuple[Cell, ExperimentResult], None, None]:
        pool = ThreadPoolExecutor(self.workers)
        try:
            futures = {pool.submit(self._run_on_free_gpu, cell): cell for cell in cells}
            for future in as_completed(futures):
                yield futures[future], future.result()
        except BaseException:  # the generator was closed, a cell could not be run, or Ctrl-C
            pool.shutdown(wait=False, cancel_futures=True)
            self._stopped.set()
            self._stop()
            raise
        finally:
            pool.shutdown()

    def _run_on_free_gpu(self, cell: Cell) -> ExperimentResult:
        gpu, pause = self._free.get()
        self._stopped.wait(pause)
        try:
            return self._run_cell(cell, gpu)
        finally:
            self._free.put((gpu, self._pause))


def choose_device(cells: Sequence[Cell]) -> tuple[list[Cell], Sequence[int | None]]:
    """The cells with "auto" replaced by a device, and the numbers of the GPUs to run them on; for virtual GPUs, a None
    for each cell that this machine can run at a time.

    Raises:
        MemprofError: a GPU is asked for and there is none.
    """
    device_name, processes = cells[0].configuration.device, cells[0].configuration.nproc
    if device_name == "cpu":
        return list(cells), []
    if cells[0].configuration.virtual_gpu is not None:
        return list(cells), [None] * usable_workers()
    import torch

    from opacus_memprof.recording.allocators import resolve_device

    if processes > 1:  # one cell at a time, which sees all GPUs
        if device_name == "cuda" and processes > torch.cuda.device_count():
            raise MemprofError(f"--nproc is {processes} and there are {torch.cuda.device_count()} GPUs: lower it")
        return list(cells), []
    device: Device = "cuda" if resolve_device(device_name) == "cuda" else "cpu"
    gpus = range(torch.cuda.device_count()) if device == "cuda" else []
    return [replace(cell, configuration=replace(cell.configuration, device=device)) for cell in cells], list(gpus)


def local_launcher(
    directory: ResultsDirectory,
    gpus: Sequence[int | None],
    token: str | None,
    pause: float,
    on_line: Callable[[str], object],
) -> LocalLauncher:
    """A LocalLauncher that runs cells by `process.run`. Arguments are those of `process.run` and LocalLauncher."""
    children: set[subprocess.Popen[str]] = set()
    stopping = threading.Event()

    def add_child(child: "subprocess.Popen[str]") -> None:
        children.add(child)
        if stopping.is_set():  # too late for `stop` to see it
            child.kill()

    def run_cell(cell: Cell, gpu: int | None) -> ExperimentResult:
        path = directory.run_directory(cell.name)
        return process.run(cell.configuration, path, token=token, gpu=gpu, on_line=on_line, on_start=add_child)

    def stop() -> None:
        stopping.set()
        for child in list(children):
            child.kill()  # harmless where it has ended

    return LocalLauncher(run_cell, stop, gpus, pause)
