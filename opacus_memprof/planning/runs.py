# SPDX-License-Identifier: Apache-2.0
"""Runs many virtual runs at once, and stores each in runs.jsonl when it ends."""

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from threading import Lock
from typing import Any, Generic, TypeVar

from opacus_memprof.errors import MemprofError
from opacus_memprof.jobs.executors import PersistentExecutor
from opacus_memprof.jobs.pool import DevicePool, PendingJobs, Processes, usable_workers
from opacus_memprof.planning.configuration import PlannedConfiguration
from opacus_memprof.planning.virtual_run import ForkedRuns, VirtualRun, run_environment, run_virtually
from opacus_memprof.profiles.directory import EVENTS, LOCK, PLAN, PLANNED_RUNS, RUNS, locked_directory
from opacus_memprof.profiles.files import read_regular, writing
from opacus_memprof.versions import VERSION

Key = TypeVar("Key")


class Journal:
    """A file with one JSON object per line, for each run that has ended.

    Args:
        path: the path of the file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def exists(self) -> bool:
        """Returns whether the file exists."""
        return self._path.exists()

    def clear(self) -> None:
        """Empties the file, and creates it if needed. Raises MemprofError if it cannot be written."""
        with writing(self._path):
            self._path.write_bytes(b"")

    def append(self, entry: Mapping[str, Any]) -> None:
        """Appends an entry. Raises MemprofError if the file cannot be written."""
        with writing(self._path), open(self._path, "a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")

    def entries(self) -> Iterator[Any]:
        """Yields the entries. Skips a partial line, which a killed process may leave."""
        if not self.exists():
            return
        try:
            lines = read_regular(self._path).splitlines()
        except OSError as error:
            raise MemprofError(f"{self._path} cannot be read ({error.strerror}): choose another directory") from error
        for line in lines:
            with contextlib.suppress(ValueError, RecursionError):
                yield json.loads(line)


class PlannedRuns:
    """The runs of a plan. Completed runs of an interrupted plan in its directory are not repeated.

    Args:
        directory: the directory of the plan, locked by `open_runs`.
        workers: the number of concurrent runs.
        on_end: called with the configuration and the run, whenever one has ended.
        executor: where programs run, with this working directory and disk; None for this machine.

    Attributes:
        kept: number of runs that were in the directory.
    """

    def __init__(
        self,
        directory: Path,
        workers: int,
        on_end: Callable[[PlannedConfiguration, VirtualRun], object],
        executor: Executor | None = None,
    ) -> None:
        self.directory = directory
        self.workers = workers
        self._on_end = on_end
        self._executor = executor
        self._journal = Journal(directory / PLANNED_RUNS)
        self._known = self._read_known()
        self.kept = len(self._known)
        self._processes = Processes()
        self._stopped = False
        self._pool = DevicePool(range(workers), stop=self._stop)
        self._threads = max(1, len(os.sched_getaffinity(0)) // workers)
        self._forked: dict[frozenset[tuple[str, str]], ForkedRuns] = {}  # by environment
        self._starting = Lock()

    @property
    def is_elsewhere(self) -> bool:
        """Whether an executor runs the programs."""
        return self._executor is not None

    def all(self, configurations: Sequence[PlannedConfiguration]) -> list[VirtualRun]:
        """Runs configurations, several at once. Returns the runs in the order of the configurations."""
        found: dict[int, VirtualRun] = {}
        pending = PendingRuns[int](self)
        for index, configuration in enumerate(configurations):
            pending.add(index, configuration)
        for index, run in pending.as_completed():
            found[index] = run
        return [found[index] for index in range(len(configurations))]

    def start(self, configuration: PlannedConfiguration) -> "Future[VirtualRun]":
        """Starts a run as soon as a worker is free. The future of a known run is complete already."""
        key = _key(configuration)
        if key in self._known:
            done: Future[VirtualRun] = Future()
            done.set_result(self._known[key])
            return done
        directory = self.directory / RUNS / key
        if self._executor is not None:
            return self._executor.submit(run_elsewhere, configuration.to_json(), str(directory))
        return self._pool.submit(lambda worker: self._run(configuration, directory))

    def _run(self, configuration: PlannedConfiguration, directory: Path) -> VirtualRun:
        forked = self._forked_runs(run_environment(configuration, self._threads))
        run = run_virtually(configuration, directory, self._threads, forked, self._processes)
        if run.status == "killed" and not self._stopped:  # perhaps the machine had no memory left for it
            run = run_virtually(configuration, directory, self._threads, forked, self._processes)
        return run

    def _forked_runs(self, environment: Mapping[str, str]) -> ForkedRuns:
        with self._starting:
            key = frozenset(environment.items())
            if key not in self._forked:
                self._forked[key] = ForkedRuns(environment)
                if self._stopped:
                    self._forked[key].close()
            return self._forked[key]

    def keep(self, configuration: PlannedConfiguration, run: VirtualRun) -> None:
        """Writes a completed run to the journal, unless it is known."""
        key = _key(configuration)
        if key in self._known:
            return
        self._known[key] = run
        self._journal.append({"key": key, "configuration": configuration.to_json(), "run": asdict(run)})
        self._on_end(configuration, run)

    def close(self) -> None:
        """Kills the runs in progress, and cancels the others."""
        if self._executor is not None:
            self._executor.shutdown(wait=False, cancel_futures=True)
        self._pool.close()

    def _stop(self) -> None:
        self._stopped = True
        self._processes.kill()
        with self._starting:
            for forked in self._forked.values():
                forked.close()

    def _read_known(self) -> dict[str, VirtualRun]:
        known = {}
        for entry in self._journal.entries():
            try:
                run = VirtualRun(**entry["run"])
                if run.status in ("finished", "out_of_memory") and Path(run.directory).is_dir():
                    known[entry["key"]] = run
            except (KeyError, TypeError):
                continue
        return known


def run_elsewhere(configuration: Mapping[str, Any], directory: str) -> VirtualRun:
    """Runs a program in a process of an executor. Raises MemprofError; see run_virtually."""
    return run_virtually(PlannedConfiguration.from_json(configuration), Path(directory))


class PendingRuns(Generic[Key]):
    """Runs that have not ended, each with a key that the caller chooses."""

    def __init__(self, runs: PlannedRuns) -> None:
        self._runs = runs
        self._jobs = PendingJobs[tuple[Key, PlannedConfiguration], VirtualRun]()

    def add(self, key: Key, configuration: PlannedConfiguration) -> None:
        """Starts a run."""
        self._jobs.add((key, configuration), self._runs.start(configuration))

    def as_completed(self) -> Iterator[tuple[Key, VirtualRun]]:
        """Yields each run as it ends, including runs that are added meanwhile.

        Raises:
            MemprofError: a run cannot begin, or the executor's workers died whenever they were to run it.
        """
        for (key, configuration), job in self._jobs.as_completed():
            try:
                run = job.result()
            except MemprofError:
                raise
            except Exception as error:
                if not self._runs.is_elsewhere:
                    raise
                reason = (str(error).splitlines() or [""])[0].rstrip(".")
                raise MemprofError(
                    f"workers of the executor could not run the program ({type(error).__name__}: {reason}): see what "
                    "they have logged, or plan with --executor local"
                ) from error
            self._runs.keep(configuration, run)
            yield key, run


@contextmanager
def open_runs(
    directory: Path,
    *,
    resume: bool,
    on_end: Callable[[PlannedConfiguration, VirtualRun], object],
    executor: PersistentExecutor | None = None,
) -> Iterator[PlannedRuns]:
    """A context manager that opens the runs of the plan in a directory, and locks it.

    Args:
        directory: the directory of the plan; made if it does not exist.
        resume: whether to keep the runs that are there.
        on_end: see PlannedRuns.
        executor: see PlannedRuns.

    Raises:
        MemprofError: the directory cannot be written, is in use, or holds files that are neither a plan nor a profile.
    """
    path = directory.absolute()
    with ExitStack() as stack:
        with writing(path):
            stack.enter_context(locked_directory(path, lambda: _refuse_other_files(path)))
        journal = Journal(path / PLANNED_RUNS)
        if not (resume and journal.exists()):
            journal.clear()  # from now on the directory is a plan's
        runs = PlannedRuns(path, usable_workers() if executor is None else executor.workers, on_end, executor)
        stack.callback(runs.close)
        yield runs


def _refuse_other_files(path: Path) -> None:
    entries = {entry.name for entry in path.iterdir()} - {LOCK} if path.is_dir() else set()
    if entries and not entries & {EVENTS, PLAN, PLANNED_RUNS}:
        raise MemprofError(f"{path} holds files that are neither a plan nor a profile: choose another directory")


def _key(configuration: PlannedConfiguration) -> str:
    """Returns a key that is equal for equal runs: with the same configuration, source and release."""
    content: dict[str, Any] = {"version": VERSION, **configuration.to_json()}
    if not configuration.program.module:
        content["source"] = Path(configuration.program.target).read_text(encoding="utf-8", errors="replace")
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]
