# SPDX-License-Identifier: Apache-2.0
"""Where cells run. A launcher takes all that are to be run and hands back each result as it comes."""

import queue
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any, Protocol

from opacus_memprof.experiments.sweep.grid import Cell

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
        gpus: the numbers of those to use, as this process sees them; empty is the CPU.
    """

    def __init__(
        self, run_cell: Callable[[Cell, int | None], Result], stop: Callable[[], object], gpus: Sequence[int | None]
    ) -> None:
        self.workers = max(1, len(gpus))
        self._run_cell, self._stop = run_cell, stop
        self._free: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        for gpu in gpus or (None,):
            self._free.put(gpu)

    def run(self, cells: Sequence[Cell]) -> Generator[tuple[Cell, Result], None, None]:
        pool = ThreadPoolExecutor(self.workers)
        try:
            futures = {pool.submit(self._on_a_free_gpu, cell): cell for cell in cells}
            for future in as_completed(futures):
                yield futures[future], future.result()
        except BaseException:  # the generator was closed, a cell could not be run, or Ctrl-C
            pool.shutdown(wait=False, cancel_futures=True)
            self._stop()
            raise
        finally:
            pool.shutdown()

    def _on_a_free_gpu(self, cell: Cell) -> Result:
        gpu = self._free.get()
        try:
            return self._run_cell(cell, gpu)
        finally:
            self._free.put(gpu)
