# SPDX-License-Identifier: Apache-2.0
"""Executors by name, and one for the jobs of a cluster: where runs happen.

Their files must be on a disk that both the workers and this process see.
"""

import contextlib
import importlib
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import BrokenExecutor, Executor, Future
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from opacus_memprof.errors import MemprofError, require

_ATTEMPTS = 3
_FINAL = {"KilledWorker"}  # Dask has run the call again itself, as often as its `allowed-failures` says

Result = TypeVar("Result")
_POLL_SECONDS = 1.0
_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "slurm": {"timeout_min": 240, "gpus_per_node": 1, "slurm_array_parallelism": 64},
    "local": {"timeout_min": 240},
}


def executor_of(name: str) -> "PersistentExecutor":
    """Returns an executor.

    Args:
        name: "dask" (the scheduler that its configuration names, otherwise workers of this machine), "ray" (the
            cluster that RAY_ADDRESS names, otherwise this machine), or `module:callable`, which is called without
            arguments and returns a `concurrent.futures.Executor`.

    Raises:
        MemprofError: there is no such executor, or it cannot be made.
    """
    make = {"dask": _Dask, "ray": _Ray}.get(name) or partial(_imported, name)
    try:
        return PersistentExecutor(make)
    except MemprofError:
        raise
    except Exception as error:  # a scheduler that does not answer, or a module of the user
        why = f"{type(error).__name__}: {error}"
        raise MemprofError(f"the executor {name} cannot be made ({why}): correct its name or its address") from error


class PersistentExecutor(Executor):
    """An executor that runs a call again whose worker has died, up to three times altogether.

    Args:
        make: makes the executor of the calls; called again if all of its workers have died.

    Attributes:
        workers: the number of concurrent calls; 1 if it is unknown.

    Raises:
        MemprofError: the executor cannot be made.
    """

    def __init__(self, make: Callable[[], Executor]) -> None:
        self._make = make
        self._executor = make()
        self._lock = threading.Lock()
        self._closed = False
        self.workers = int(getattr(self._executor, "_max_workers", 1))

    def submit(self, fn: Callable[..., Result], /, *args: Any, **kwargs: Any) -> "Future[Result]":
        """Submits a call. The future raises what the last attempt has raised; a MemprofError is not tried again."""
        future: Future[Result] = Future()
        self._try(future, partial(fn, *args, **kwargs), _ATTEMPTS)
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Ends the workers; calls whose workers die are not run again."""
        self._closed = True
        self._executor.shutdown(wait=wait, cancel_futures=cancel_futures)

    def _try(
        self, future: "Future[Result]", call: Callable[[], Result], attempts: int, broken: Executor | None = None
    ) -> None:
        try:
            executor = self._executor if broken is None else self._replace(broken)
            try:
                attempt = executor.submit(call)
            except BrokenExecutor:
                executor = self._replace(executor)
                attempt = executor.submit(call)
        except Exception as error:  # nothing else would end the future of a call that is run again
            future.set_exception(error)
            return
        attempt.add_done_callback(partial(self._ended, future, call, attempts - 1, executor))

    def _ended(
        self,
        future: "Future[Result]",
        call: Callable[[], Result],
        attempts: int,
        executor: Executor,
        attempt: "Future[Result]",
    ) -> None:
        if attempt.cancelled():
            future.cancel()
            return
        error = attempt.exception()
        if error is None:
            future.set_result(attempt.result())
        elif isinstance(error, MemprofError) or type(error).__name__ in _FINAL or not attempts or self._closed:
            future.set_exception(error)
        else:
            self._try(future, call, attempts, executor if isinstance(error, BrokenExecutor) else None)

    def _replace(self, broken: Executor) -> Executor:
        """Replaces an executor whose workers have died, once, and returns the present one."""
        with self._lock:
            if self._executor is broken:
                broken.shutdown(wait=False)
                self._executor = self._make()
            return self._executor


def _imported(path: str) -> Executor:
    module, colon, attributes = path.partition(":")
    if not colon or not module or not attributes:
        raise MemprofError(
            f"{path!r} is not an executor: choose local, submitit, dask, ray, or module:callable, which returns a "
            "concurrent.futures.Executor"
        )
    if (here := os.getcwd()) not in sys.path:  # an installed command has its own folder there, `python -m` this one
        sys.path.insert(0, here)
    found: Any = importlib.import_module(module)
    for attribute in attributes.split("."):
        found = getattr(found, attribute)
    executor = found()
    if not isinstance(executor, Executor) or type(executor).submit is Executor.submit:  # the abstract class
        raise MemprofError(
            f"{path} returns an object of type {type(executor).__name__}: return a concurrent.futures.Executor that "
            "runs calls"
        )
    return executor


class _Dask(Executor):
    """Calls as tasks of Dask, each of its own: Dask would answer a call that it has seen with its earlier result."""

    def __init__(self) -> None:
        self._client = require("distributed", "runs on Dask").Client()
        self._executor = self._client.get_executor(retries=0, pure=False)
        self._max_workers = max(1, sum(self._client.ncores().values()))

    def submit(self, fn: Callable[..., Result], /, *args: Any, **kwargs: Any) -> "Future[Result]":
        future: Future[Result] = self._executor.submit(fn, *args, **kwargs)
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        if wait or cancel_futures:
            self._executor.shutdown(wait=not cancel_futures)
            self._client.close()


class _Ray(Executor):
    """Calls as tasks of Ray, each with a GPU if there are any, because Ray hides them from tasks that ask for none."""

    def __init__(self) -> None:
        self._ray = require("ray", "runs on Ray")
        self._ray.init(ignore_reinit_error=True, log_to_driver=False)
        resources = self._ray.cluster_resources()
        self._options = {"max_retries": 0, "num_gpus": min(1, int(resources.get("GPU", 0)))}
        self._max_workers = max(1, int(resources.get("GPU" if self._options["num_gpus"] else "CPU", 1)))
        self._tasks: list[Any] = []

    def submit(self, fn: Callable[..., Result], /, *args: Any, **kwargs: Any) -> "Future[Result]":
        task = self._ray.remote(**self._options)(_call).remote(partial(fn, *args, **kwargs))
        self._tasks.append(task)
        future: Future[Result] = task.future()
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        for task in self._tasks if cancel_futures else ():
            self._ray.cancel(task, force=True)


def _call(call: Callable[[], Result]) -> Result:
    return call()


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
