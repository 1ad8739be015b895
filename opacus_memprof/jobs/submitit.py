# SPDX-License-Identifier: Apache-2.0
"""Jobs on a cluster, through submitit. Their files must be on a disk that both the jobs and this process see."""

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Executor, Future
from pathlib import Path
from typing import Any, TypeVar

from opacus_memprof.errors import MemprofError
from opacus_memprof.profiles.optional import require

_POLL_SECONDS = 1.0
_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "slurm": {"timeout_min": 240, "gpus_per_node": 1, "slurm_array_parallelism": 64},
    "local": {"timeout_min": 240},
}

Result = TypeVar("Result")


class SubmititExecutor(Executor):
    """An executor that submits each call as a job. Jobs inherit the environment of this process.

    Args:
        folder: the folder for submitit's files: inputs and output of each job.
        cluster: "slurm", or "local" for processes of this machine.
        options: submitit's parameters, such as {"slurm_partition": "gpu", "timeout_min": 60}, over the defaults.

    Attributes:
        workers: the maximum number of jobs that run at once.

    Raises:
        MemprofError: submitit is missing, does not know a parameter, or finds no such cluster.
    """

    def __init__(self, folder: Path, cluster: str, options: Mapping[str, Any]) -> None:
        submitit = require("submitit", "jobs of a cluster")
        parameters = {**_DEFAULTS[cluster], **options}
        try:
            self._executor = submitit.AutoExecutor(folder=folder, cluster=cluster)
            self._executor.update_parameters(**parameters)
        except (RuntimeError, NameError, TypeError, ValueError, AssertionError) as error:
            raise MemprofError(f"no jobs can be submitted ({error}): correct --launcher-option") from error
        self.workers = int(parameters.get("slurm_array_parallelism", 1))
        self._is_array = cluster == "slurm"  # submitit's local executor runs the jobs of an array one by one
        self._jobs: dict[Future[Any], Any] = {}  # jobs that have not ended; while polled, only of submitted batches
        self._stopped = threading.Event()

    @contextlib.contextmanager
    def batch(self) -> Iterator[None]:
        """A context manager in which all calls are submitted together when it ends, on SLURM as one array.

        Raises:
            MemprofError: the cluster accepts no jobs.
        """
        try:
            with self._executor.batch() if self._is_array else contextlib.nullcontext():
                yield
        except Exception as error:  # submitit raises many types
            raise MemprofError(f"the cluster does not accept jobs: {str(error).strip().splitlines()[0]}") from error
        threading.Thread(target=self._poll, name="opacus-memprof jobs", daemon=True).start()

    def submit(self, fn: Callable[..., Result], /, *args: Any, **kwargs: Any) -> "Future[Result]":
        """Submits a call, within `batch`. The future of a job that dies raises RuntimeError."""
        future: Future[Result] = Future()
        self._jobs[future] = self._executor.submit(fn, *args, **kwargs)
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Stops waiting for jobs; with `cancel_futures` also cancels all that have not ended."""
        self._stopped.set()
        for job in list(self._jobs.values()) if cancel_futures else ():
            with contextlib.suppress(Exception):
                job.cancel()

    def _poll(self) -> None:
        while self._jobs and not self._stopped.is_set():
            for future, job in [each for each in self._jobs.items() if each[1].done()]:
                del self._jobs[future]
                try:
                    future.set_result(job.result())
                except Exception:  # raised by the job, or by submitit for a job that died
                    future.set_exception(RuntimeError(f"job {job.job_id} ended without a result ({job.state})"))
            self._stopped.wait(_POLL_SECONDS)
