# SPDX-License-Identifier: Apache-2.0
"""Executors by name: where runs happen. Their files must be on a disk that the workers and this process see."""

import importlib
import threading
from collections.abc import Callable
from concurrent.futures import BrokenExecutor, Executor, Future
from functools import partial
from typing import Any, TypeVar

from opacus_memprof.errors import MemprofError
from opacus_memprof.profiles.optional import require

_ATTEMPTS = 3

Result = TypeVar("Result")


def executor_of(name: str) -> "PersistentExecutor":
    """Returns an executor.

    Args:
        name: "dask" (the scheduler that its configuration names, otherwise workers of this machine), "ray" (the
            cluster that RAY_ADDRESS names, otherwise this machine), or `module:callable`, which is called without
            arguments and returns a `concurrent.futures.Executor`.

    Raises:
        MemprofError: there is no such executor, or it cannot be made.
    """
    make = {"dask": _dask, "ray": _Ray}.get(name) or partial(_imported, name)
    return PersistentExecutor(make)


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

    def _try(self, future: "Future[Result]", call: Callable[[], Result], attempts: int) -> None:
        executor = self._executor
        try:
            attempt = executor.submit(call)
        except BrokenExecutor:
            executor = self._replace(executor)
            attempt = executor.submit(call)
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
        elif isinstance(error, MemprofError) or not attempts or self._closed:
            future.set_exception(error)
        else:
            if isinstance(error, BrokenExecutor):
                self._replace(executor)
            self._try(future, call, attempts)

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
    try:
        found: Any = importlib.import_module(module)
        for attribute in attributes.split("."):
            found = getattr(found, attribute)
        executor = found()
    except Exception as error:  # the module is the user's
        raise MemprofError(f"the executor {path} cannot be made ({type(error).__name__}: {error})") from error
    if not isinstance(executor, Executor):
        raise MemprofError(f"{path} returns a {type(executor).__name__}: return a concurrent.futures.Executor")
    return executor


def _dask() -> Executor:
    distributed = require("distributed", "runs on Dask")
    executor: Executor = distributed.Client().get_executor(retries=0)
    return executor


class _Ray(Executor):
    """Calls as tasks of Ray."""

    def __init__(self) -> None:
        self._ray = require("ray", "runs on Ray")
        self._ray.init(ignore_reinit_error=True, log_to_driver=False)
        self._tasks: list[Any] = []

    def submit(self, fn: Callable[..., Result], /, *args: Any, **kwargs: Any) -> "Future[Result]":
        task = self._ray.remote(max_retries=0)(_call).remote(partial(fn, *args, **kwargs))
        self._tasks.append(task)
        future: Future[Result] = task.future()
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        for task in self._tasks if cancel_futures else ():
            self._ray.cancel(task, force=True)


def _call(call: Callable[[], Result]) -> Result:
    return call()
