# SPDX-License-Identifier: Apache-2.0
"""Worker threads that share devices, jobs that have not ended, and child processes that can be killed together."""

import os
import queue
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Generic, TypeVar

_MEMORY_PER_RUN = 3 * 2**30  # of this machine: for a process with torch, and a model that is created on the CPU
_MOST_WORKERS = 32

Device = TypeVar("Device")
Key = TypeVar("Key")
Result = TypeVar("Result")


def usable_workers() -> int:
    """Returns how many virtual runs this machine can run at once: one per core, if its memory is large enough."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return max(1, min(len(os.sched_getaffinity(0)), memory // _MEMORY_PER_RUN, _MOST_WORKERS))


class DevicePool(Generic[Device]):
    """Worker threads, one per device. Each job uses a device alone.

    Args:
        devices: objects that distinguish devices, such as the numbers of GPUs; not empty.
        pause: seconds between two jobs on a device.
        stop: makes running jobs return soon, for example by killing their processes.
    """

    def __init__(self, devices: Sequence[Device], *, pause: float = 0, stop: Callable[[], object]) -> None:
        self.workers = len(devices)
        self._pause, self._stop = pause, stop
        self._stopped = threading.Event()
        self._threads = ThreadPoolExecutor(self.workers)
        # Each with the pause before its next job.
        self._free: queue.SimpleQueue[tuple[Device, float]] = queue.SimpleQueue()
        for device in devices:
            self._free.put((device, 0.0))

    def submit(self, job: Callable[[Device], Result]) -> "Future[Result]":
        """Calls `job` with a free device in a worker thread."""
        return self._threads.submit(self._run_on_free_device, job)

    def _run_on_free_device(self, job: Callable[[Device], Result]) -> Result:
        device, pause = self._free.get()
        self._stopped.wait(pause)
        try:
            return job(device)
        finally:
            self._free.put((device, self._pause))

    def close(self) -> None:
        """Stops the running jobs, cancels the others, and waits for the threads."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._stopped.set()
        self._stop()
        self._threads.shutdown()


class PendingJobs(Generic[Key, Result]):
    """Jobs that have not ended, each with a key. Works with the futures of any `concurrent.futures.Executor`."""

    def __init__(self) -> None:
        self._keys: dict[Future[Result], Key] = {}

    def add(self, key: Key, future: "Future[Result]") -> None:
        """Adds a job."""
        self._keys[future] = key

    def as_completed(self) -> Iterator[tuple[Key, "Future[Result]"]]:
        """Yields each job as it ends, including jobs that are added meanwhile."""
        while self._keys:
            for future in wait(self._keys, return_when=FIRST_COMPLETED).done:
                yield self._keys.pop(future), future


class Processes:
    """Runs child processes, from any thread. Kills a child if an exception, as of Ctrl-C, ends the wait for it."""

    def __init__(self) -> None:
        self._children: set[subprocess.Popen[Any]] = set()
        self._killed = threading.Event()

    def run(self, command: Sequence[str], environment: Mapping[str, str], log: Path) -> int:
        """Runs a command with its output in the file `log`.

        Returns:
            The exit code; if negative, the number of the signal that killed the process.
        """
        with (
            open(log, "w", encoding="utf-8") as output,
            subprocess.Popen(
                command, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
            ) as child,
            self._tracked(child),
        ):
            return child.wait()

    @contextmanager
    def lines(self, command: Sequence[str], environment: Mapping[str, str]) -> "Iterator[subprocess.Popen[str]]":
        """A context manager that starts a command and returns its process, whose `stdout` yields lines of text."""
        with (
            subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                encoding="utf-8",
                errors="backslashreplace",
            ) as child,
            self._tracked(child),
        ):
            yield child

    def kill(self) -> None:
        """Kills all processes, including later ones."""
        self._killed.set()
        for child in list(self._children):
            child.kill()  # does nothing if it has ended

    @contextmanager
    def _tracked(self, child: "subprocess.Popen[Any]") -> Iterator[None]:
        self._children.add(child)
        try:
            if self._killed.is_set():  # `kill` may not have seen it
                child.kill()
            yield
        except BaseException:
            child.kill()
            raise
        finally:
            self._children.discard(child)
