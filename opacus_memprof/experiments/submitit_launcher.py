# SPDX-License-Identifier: Apache-2.0
"""Runs cells as jobs of a cluster, one job each, through submitit. The results directory must be on a disk that both
the jobs and this process see."""

import contextlib
import os
import time
from collections.abc import Generator, Mapping, Sequence
from typing import Any

from opacus_memprof.errors import MemprofError
from opacus_memprof.experiments import process
from opacus_memprof.experiments.configuration import Configuration
from opacus_memprof.experiments.directory import ResultsDirectory
from opacus_memprof.experiments.files import read_result, write_json
from opacus_memprof.experiments.grid import Cell
from opacus_memprof.profiles.experiment_result import ExperimentResult

JOBS = "jobs"  # submitit's files: what each job was given and has printed
_POLL_SECONDS = 1.0
_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "slurm": {"timeout_min": 240, "gpus_per_node": 1, "slurm_array_parallelism": 64},
    "local": {"timeout_min": 240},
}


class SubmititLauncher:
    """A launcher that submits one job per cell.

    Args:
        directory: where results go; submitit's own files go to `jobs` in it.
        cluster: "slurm", or "local" for processes of this machine.
        options: submitit's parameters, such as {"slurm_partition": "gpu", "timeout_min": 60}, over our defaults.
        token: of the Hugging Face hub. Jobs inherit it in their environment; it is written to no file.

    Raises:
        MemprofError: submitit is missing, knows no such parameter, or finds no such cluster.
    """

    def __init__(
        self, directory: ResultsDirectory, cluster: str, options: Mapping[str, Any], token: str | None = None
    ) -> None:
        try:
            import submitit
        except ImportError:
            raise MemprofError("jobs need submitit: pip install 'opacus-memprof[slurm]'") from None
        self._directory, self._batch = directory, cluster == "slurm"
        if token:
            os.environ["HF_TOKEN"] = token
        try:
            self._executor = submitit.AutoExecutor(folder=directory.path / JOBS, cluster=cluster)
            self._executor.update_parameters(**{**_DEFAULTS[cluster], **options})
        except (RuntimeError, NameError, TypeError, ValueError, AssertionError) as error:
            raise MemprofError(f"no jobs can be submitted ({error}): correct --launcher-option") from error
        self.workers = int(options.get("slurm_array_parallelism", _DEFAULTS[cluster].get("slurm_array_parallelism", 1)))

    def run(self, cells: Sequence[Cell]) -> Generator[tuple[Cell, ExperimentResult], None, None]:
        """Submits all, on SLURM as one array, and yields each as it ends; jobs that are left are cancelled when the
        generator is closed. Raises MemprofError where the cluster takes no jobs."""
        arguments = [(cell.configuration.to_json(), str(self._directory.run_directory(cell.name))) for cell in cells]
        for _, run_directory in arguments:
            _remove_result(run_directory)
        try:
            if self._batch:  # submitit's local executor runs the jobs of an array one after the other
                jobs = self._executor.map_array(train, *zip(*arguments, strict=True)) if arguments else []
            else:
                jobs = [self._executor.submit(train, *each) for each in arguments]
        except Exception as error:  # submitit's own, of many kinds
            raise MemprofError(f"the cluster takes no jobs: {str(error).strip().splitlines()[0]}") from error
        unfinished = dict(zip(jobs, cells, strict=True))
        try:
            while unfinished:
                for job in [job for job in unfinished if job.done()]:
                    cell = unfinished.pop(job)
                    yield cell, self._result(job, cell)
                if unfinished:
                    time.sleep(_POLL_SECONDS)
        finally:
            for job in unfinished:
                with contextlib.suppress(Exception):
                    job.cancel()

    def _result(self, job: Any, cell: Cell) -> ExperimentResult:
        """The result of a cell; of a job that ended without one (cancelled, out of time), that from its events."""
        path = self._directory.run_directory(cell.name)
        if not (path / process.RESULT).exists():
            from opacus_memprof.experiments.result import result_from_events  # loads torch

            result = result_from_events(cell.configuration, path / process.PROFILE_DIRECTORY, 1, "")
            result.status, result.error = "killed", f"job {job.job_id} ended without a result ({job.state})"
            write_json(path / process.RESULT, result)
        return read_result(path / process.RESULT)


def train(configuration: Mapping[str, Any], directory: str) -> None:
    """Runs a job: trains in a process of its own, which writes result.json in `directory`."""
    process.run(Configuration.from_json(configuration), directory)


def _remove_result(directory: str) -> None:
    """Removes an earlier result, which would be taken for that of a job that dies before it begins."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(os.path.join(directory, process.RESULT))
