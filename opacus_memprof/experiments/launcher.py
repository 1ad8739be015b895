# SPDX-License-Identifier: Apache-2.0
"""Where cells run. A launcher takes all that are to be run and hands back each result as it comes."""

import queue
import subprocess
import threading
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import replace
from typing import Any, Protocol

from opacus_memprof.errors import MemprofError
from opacus_memprof.experiments import process
from opacus_memprof.experiments.configuration import Device
from opacus_memprof.experiments.directory import ResultsDirectory
from opacus_memprof.experiments.grid import Cell
from opacus_memprof.planning.runs import usable_workers

Result = dict[str, Any]


class Launcher(Protocol):
    """`workers` is how many cells run at once. `run` yields every cell once, with its result, as they end; when its
    generator is closed, what still runs is ended."""

    workers: int

    def run(self, cells: Sequence[Cell]) -> Generator[tuple[Cell, Result], None, None]: ...


class Local:
    """Side by side on this machine: one cell at a time on each GPU, or one at all on the CPU.

    Args:
        run_cell: runs a cell in a process of its own, on the given GPU (None: wherever the cell says), and returns its
            result. Called from several threads.
        stop: ends the processes that `run_cell` waits for.
        pause: seconds between two cells on a GPU.
        gpus: the numbers of those to use, as this process sees them; empty is the CPU.
    """

    def __init__(
        self,
        run_cell: Callable[[Cell, int | None], Result],
        stop: Callable[[], object],
        gpus: Sequence[int | None],
        pause: float = 0,
    ) -> None:
        self.workers = max(1, len(gpus))
        self._run_cell, self._stop, self._pause = run_cell, stop, pause
        self._stopped = threading.Event()
        self._free: queue.SimpleQueue[tuple[int | None, float]] = queue.SimpleQueue()  # and the pause before its next
        for gpu in gpus or (None,):
            self._free.put((gpu, 0.0))

    def run(self, cells: Sequence[Cell]) -> Generator[tuple[Cell, Result], None, None]:
        pool = ThreadPoolExecutor(self.workers)
        try:
            futures = {pool.submit(self._on_a_free_gpu, cell): cell for cell in cells}
            for future in as_completed(futures):
                yield futures[future], future.result()
        except BaseException:  # the generator was closed, a cell could not be run, or Ctrl-C
            pool.shutdown(wait=False, cancel_futures=True)
            self._stopped.set()
            self._stop()
            raise
        finally:
            pool.shutdown()

    def _on_a_free_gpu(self, cell: Cell) -> Result:
        gpu, pause = self._free.get()
        self._stopped.wait(pause)
        try:
            return self._run_cell(cell, gpu)
        finally:
            self._free.put((gpu, self._pause))


def on_device(cells: Sequence[Cell]) -> tuple[list[Cell], Sequence[int | None]]:
    """The cells on the device that "auto" stands for, and the numbers of the GPUs to run them on; on virtual ones a
    None for each cell that this machine can run at a time.

    Raises:
        MemprofError: a GPU is asked for and there is none.
    """
    wanted, needed = cells[0].configuration.device, cells[0].configuration.nproc
    if wanted == "cpu":
        return list(cells), []
    if cells[0].configuration.virtual_gpu is not None:
        return list(cells), [None] * usable_workers()
    import torch

    from opacus_memprof.recording.allocators import resolve_device

    if needed > 1:  # one cell at a time, which sees all GPUs
        if wanted == "cuda" and needed > torch.cuda.device_count():
            raise MemprofError(f"--nproc is {needed} and there are {torch.cuda.device_count()} GPUs: lower it")
        return list(cells), []
    device: Device = "cuda" if resolve_device(wanted) == "cuda" else "cpu"
    gpus = range(torch.cuda.device_count()) if device == "cuda" else []
    return [replace(cell, configuration=replace(cell.configuration, device=device)) for cell in cells], list(gpus)


def local_launcher(
    directory: ResultsDirectory,
    gpus: Sequence[int | None],
    token: str | None,
    pause: float,
    on_line: Callable[[str], object],
) -> Local:
    """Runs cells on this machine, as `process.run` does it; `gpus` and `pause` as for `Local`."""
    children: set[subprocess.Popen[str]] = set()
    stopping = threading.Event()

    def started(child: "subprocess.Popen[str]") -> None:
        children.add(child)
        if stopping.is_set():  # too late for `stop` to see it
            child.kill()

    def run_cell(cell: Cell, gpu: int | None) -> Result:
        path = directory.run_directory(cell.name)
        return process.run(cell.configuration, path, token=token, gpu=gpu, on_line=on_line, on_start=started)

    def stop() -> None:
        stopping.set()
        for child in list(children):
            child.kill()  # harmless where it has ended

    return Local(run_cell, stop, gpus, pause)
