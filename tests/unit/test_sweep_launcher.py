# SPDX-License-Identifier: Apache-2.0
"""How cells are spread over GPUs."""

import threading
import time
from collections import Counter
from contextlib import closing
from itertools import pairwise

import pytest

from opacus_memprof.experiments.grid import Cell, grid
from opacus_memprof.experiments.launcher import LocalLauncher
from tests.unit.sweep_results import BASE


@pytest.fixture
def cells() -> list[Cell]:
    return grid(BASE, [16, 32], [8], [1, 2, 4], [0, 8])[0]


def test_every_cell_runs_once_and_a_gpu_has_one_at_a_time(cells: list[Cell]) -> None:
    busy, lock = Counter[int | None](), threading.Lock()
    most, used = 0, set()

    def run_cell(cell: Cell, gpu: int | None) -> dict[str, object]:
        nonlocal most
        with lock:
            busy[gpu] += 1
            most = max(most, busy[gpu])
            used.add(gpu)
        threading.Event().wait(0.01)
        with lock:
            busy[gpu] -= 1
        return {"of": cell.name}

    launcher = LocalLauncher(run_cell, lambda: None, [0, 1, 5])
    ended = list(launcher.run(cells))
    assert launcher.workers == 3
    assert sorted(cell.name for cell, _ in ended) == sorted(cell.name for cell in cells)
    assert all(result == {"of": cell.name} for cell, result in ended)
    assert most == 1
    assert used == {0, 1, 5}


def test_gpus_work_side_by_side(cells: list[Cell]) -> None:
    together = threading.Barrier(4)  # breaks unless four wait at once

    def run_cell(cell: Cell, gpu: int | None) -> dict[str, object]:
        together.wait(timeout=10)
        return {}

    assert len(list(LocalLauncher(run_cell, lambda: None, [0, 1, 2, 3]).run(cells))) == len(cells) == 12


def test_the_cpu_has_one_at_a_time(cells: list[Cell]) -> None:
    gpus, lock = set(), threading.Lock()

    def run_cell(cell: Cell, gpu: int | None) -> dict[str, object]:
        assert lock.acquire(blocking=False)
        gpus.add(gpu)
        lock.release()
        return {}

    launcher = LocalLauncher(run_cell, lambda: None, [])
    assert launcher.workers == 1
    assert [cell for cell, _ in launcher.run(cells)] == cells
    assert gpus == {None}


def test_closing_ends_what_runs_and_starts_no_more(cells: list[Cell]) -> None:
    stopped, started = threading.Event(), []

    def run_cell(cell: Cell, gpu: int | None) -> dict[str, object]:
        started.append(cell)
        if cell is not cells[0]:
            assert stopped.wait(timeout=10)  # as a process that is waited for until it is killed
        return {}

    with closing(LocalLauncher(run_cell, stopped.set, [0, 1]).run(cells)) as results:
        first, _ = next(results)
    assert first is cells[0]
    assert stopped.is_set()
    assert len(started) <= 3


def test_a_cell_that_cannot_be_run_ends_the_others(cells: list[Cell]) -> None:
    stopped = threading.Event()

    def run_cell(cell: Cell, gpu: int | None) -> dict[str, object]:
        if cell is cells[0]:
            raise OSError("the disk is full")
        assert stopped.wait(timeout=10)
        return {}

    with pytest.raises(OSError, match="the disk is full"):
        list(LocalLauncher(run_cell, stopped.set, [0, 1]).run(cells))
    assert stopped.is_set()


def test_a_gpu_rests_between_two_cells_and_not_before_the_first(cells: list[Cell]) -> None:
    times: dict[int | None, list[float]] = {0: [], 1: []}

    def run_cell(cell: Cell, gpu: int | None) -> dict[str, object]:
        times[gpu].append(time.monotonic())
        return {}

    begin = time.monotonic()
    list(LocalLauncher(run_cell, lambda: None, [0, 1], pause=0.2).run(cells[:4]))
    for begun in times.values():
        assert begun[0] - begin < 0.15
        assert all(later - earlier >= 0.2 for earlier, later in pairwise(begun))
