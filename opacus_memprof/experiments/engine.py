# SPDX-License-Identifier: Apache-2.0
"""Runs a grid of configurations, each in a new process, and writes tables and pictures of their results.

Launchers run the configurations: on this machine, or as calls of an executor, such as jobs of a cluster.
"""

import contextlib
import os
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console
from rich.text import Text

from opacus_memprof.analysis.diff import peak_tax
from opacus_memprof.errors import MemprofError, require
from opacus_memprof.experiments import process
from opacus_memprof.experiments.configuration import Cell, Configuration, Device
from opacus_memprof.experiments.directory import Preset, ResultsDirectory
from opacus_memprof.experiments.files import read_result, write_json
from opacus_memprof.experiments.rows import Row, find_vanilla
from opacus_memprof.experiments.summary import describe_outcome
from opacus_memprof.jobs.executors import SubmititExecutor, executor_of
from opacus_memprof.jobs.pool import DevicePool, PendingJobs, Processes, usable_workers
from opacus_memprof.jobs.progress import ProgressBoard
from opacus_memprof.language import tr
from opacus_memprof.profiles.difference import Tax
from opacus_memprof.profiles.experiment_result import ExperimentResult

JOBS = "jobs"  # submitit's files, in the directory of the results

Results = Generator[tuple[Cell, ExperimentResult], None, None]
_STYLE = {"finished": "green", "out_of_memory": "magenta"}


class Launcher(Protocol):
    """Runs cells, `workers` of them at once. `run` yields each cell with its result when it has ended.

    Closing the generator ends the cells that still run.
    """

    workers: int

    def run(self, cells: Sequence[Cell]) -> Results: ...


class LocalLauncher:
    """A launcher that runs cells on this machine: one at a time on each GPU, or a single one on the CPU.

    Args:
        directory: the directory for the results.
        gpus: the numbers of the GPUs to use, as this process sees them; empty for the CPU.
        token: token of the Hugging Face hub.
        pause: seconds between two cells on a GPU.
        on_line: see `process.run`.
    """

    def __init__(
        self,
        directory: ResultsDirectory,
        gpus: Sequence[int | None],
        token: str | None,
        pause: float,
        on_line: Callable[[str], object],
    ) -> None:
        self._directory, self._token, self._on_line = directory, token, on_line
        self._processes = Processes()
        self._pool = DevicePool[int | None](gpus or [None], pause=pause, stop=self._processes.kill)
        self.workers = self._pool.workers

    def run(self, cells: Sequence[Cell]) -> Results:
        """Runs the cells. Raises MemprofError if one cannot be run."""
        pending = PendingJobs[Cell, ExperimentResult]()
        try:
            for cell in cells:
                pending.add(cell, self._pool.submit(partial(self._run_cell, cell)))
            for cell, future in pending.as_completed():
                yield cell, future.result()
        finally:
            self._pool.close()

    def _run_cell(self, cell: Cell, gpu: int | None) -> ExperimentResult:
        return process.run(
            cell.configuration,
            self._directory.run_directory(cell.name),
            token=self._token,
            gpu=gpu,
            on_line=self._on_line,
            processes=self._processes,
        )


class ExecutorLauncher:
    """A launcher that runs each cell as a call of an executor.

    Args:
        directory: the directory for the results, on a disk that the executor's processes see.
        executor: an executor whose calls run in other processes.
        workers: the number of its concurrent calls.
        batch: makes a context manager within which all cells are submitted.
    """

    def __init__(
        self,
        directory: ResultsDirectory,
        executor: Executor,
        workers: int,
        batch: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        self._directory, self._executor, self._batch = directory, executor, batch
        self.workers = workers

    def run(self, cells: Sequence[Cell]) -> Results:
        """Submits all cells. Raises MemprofError if they cannot be submitted."""
        for cell in cells:  # an earlier result, which would be mistaken for that of a job that dies before it begins
            with contextlib.suppress(FileNotFoundError):
                (self._directory.run_directory(cell.name) / process.RESULT).unlink()
        pending = PendingJobs[Cell, None]()
        try:
            with self._batch():
                for cell in cells:
                    path = str(self._directory.run_directory(cell.name))
                    pending.add(cell, self._executor.submit(train, cell.configuration.to_json(), path))
            for cell, future in pending.as_completed():
                yield cell, self._result(cell, future.exception())
        finally:
            self._executor.shutdown(wait=False, cancel_futures=True)

    def _result(self, cell: Cell, error: BaseException | None) -> ExperimentResult:
        """Returns the result of a cell. If its job left none (cancelled, out of time), makes one from its events."""
        path = self._directory.run_directory(cell.name)
        if not (path / process.RESULT).exists():
            from opacus_memprof.experiments.result import result_from_events  # loads torch

            result = result_from_events(cell.configuration, path / process.PROFILE_DIRECTORY, 1, "")
            result.status, result.error = "killed", str(error or "the job ended without a result")
            write_json(path / process.RESULT, result)
        return read_result(path / process.RESULT)


def train(configuration: Mapping[str, Any], directory: str) -> None:
    """Runs a job: trains in a separate process, which writes result.json in `directory`."""
    process.run(Configuration.from_json(configuration), directory)


def cluster_launcher(
    directory: ResultsDirectory, cluster: str, options: Mapping[str, Any], token: str | None = None
) -> ExecutorLauncher:
    """Makes a launcher that submits each cell as a job. submitit's own files go to `jobs` in the directory.

    Args:
        directory: the directory for the results.
        cluster: see SubmititExecutor.
        options: see SubmititExecutor.
        token: token of the Hugging Face hub. Jobs inherit it in their environment; it is not written to any file.

    Raises:
        MemprofError: see SubmititExecutor.
    """
    if token:
        os.environ["HF_TOKEN"] = token
    executor = SubmititExecutor(directory.path / JOBS, cluster, options)
    return ExecutorLauncher(directory, executor, executor.workers, executor.batch)


def choose_device(cells: Sequence[Cell]) -> tuple[list[Cell], Sequence[int | None]]:
    """Returns the cells with "auto" replaced by a device, and the numbers of the GPUs to use.

    For virtual GPUs, the numbers are None, one for each cell that this machine can run at a time.

    Raises:
        MemprofError: a GPU is requested and there is none.
    """
    device_name, processes = cells[0].configuration.device, cells[0].configuration.nproc
    if device_name == "cpu":
        return list(cells), []
    if cells[0].configuration.virtual_gpu is not None:
        return list(cells), [None] * usable_workers()
    import torch

    from opacus_memprof.recording.allocators import resolve_device

    if processes > 1:  # one cell at a time, which uses all GPUs
        if device_name == "cuda" and processes > torch.cuda.device_count():
            raise MemprofError(f"--nproc is {processes} and there are {torch.cuda.device_count()} GPUs: lower it")
        return list(cells), []
    device: Device = "cuda" if resolve_device(device_name) == "cuda" else "cpu"
    gpus = range(torch.cuda.device_count()) if device == "cuda" else []
    return [replace(cell, configuration=replace(cell.configuration, device=device)) for cell in cells], list(gpus)


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
        said = tr("{kept} of {all} configurations have a result already", kept=kept, all=len(directory.names))
        console.print(said, highlight=False)
    if cells:  # an empty bar would wait for its first result
        what = tr("configurations")
        if launcher.workers > 1:
            what = tr("configurations, {count} at once", count=launcher.workers)
        board = ProgressBoard(console, what, len(cells))
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
