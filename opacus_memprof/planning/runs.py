# SPDX-License-Identifier: Apache-2.0
"""Many virtual runs, side by side, each kept in runs.jsonl as it ends."""

import hashlib
import json
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

from opacus_memprof.errors import MemprofError
from opacus_memprof.planning.forked_runs import ForkedRuns
from opacus_memprof.planning.virtual_run import Configuration, VirtualRun, run_environment, run_virtually
from opacus_memprof.profiles.directory import EVENTS, PLAN, PLANNED_RUNS, RUNS, lock
from opacus_memprof.profiles.files import writing
from opacus_memprof.profiles.versions import VERSION

_MEMORY_OF_RUN = 3 * 2**30  # of this machine: the process with torch, and a model that is made on the CPU
_MOST_WORKERS = 32

Key = TypeVar("Key")


def usable_workers() -> int:
    """How many virtual runs this machine can carry side by side: one for each core, as far as its memory goes."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return max(1, min(len(os.sched_getaffinity(0)), memory // _MEMORY_OF_RUN, _MOST_WORKERS))


class PlannedRuns:
    """The runs of a plan, in its directory. Runs that are there from an interrupted plan are not run again.

    Args:
        directory: of the plan; locked by `open_runs`.
        on_end: called with the configuration and the run, whenever one has ended.
    """

    def __init__(self, directory: Path, workers: int, on_end: Callable[[Configuration, VirtualRun], object]) -> None:
        self.directory = directory
        self.workers = workers
        self._on_end = on_end
        self._known: dict[str, VirtualRun] = {}
        self._packages: tuple[str, ...] = ()  # that the program imports, once a run has shown it
        self.kept = self._read()
        self._pool = ThreadPoolExecutor(workers)
        self._threads = max(1, len(os.sched_getaffinity(0)) // workers)
        self._forked: dict[int, ForkedRuns] = {}  # by thread of the pool

    def all(self, configurations: Sequence[Configuration]) -> list[VirtualRun]:
        """Runs these, side by side, and returns their results in the same order."""
        found: dict[int, VirtualRun] = {}
        waiting = Waiting[int](self)
        for index, configuration in enumerate(configurations):
            waiting.add(index, configuration)
        for index, run in waiting.ended():
            found[index] = run
        return [found[index] for index in range(len(configurations))]

    def start(self, configuration: Configuration) -> "Future[VirtualRun]":
        key = _key(configuration)
        if key in self._known:
            done: Future[VirtualRun] = Future()
            done.set_result(self._known[key])
            return done
        return self._pool.submit(self._run, configuration, self.directory / RUNS / key)

    def _run(self, configuration: Configuration, directory: Path) -> VirtualRun:
        return run_virtually(configuration, directory, self._threads, self._forked_runs(configuration))

    def _forked_runs(self, configuration: Configuration) -> ForkedRuns | None:
        """The ForkedRuns of this thread; None for the first of the program, and where settings are to be tried."""
        environment = run_environment(configuration, self._threads)
        if not self._packages or environment != run_environment(replace(configuration, changes=()), self._threads):
            return None
        thread = threading.get_ident()
        if thread not in self._forked:
            self._forked[thread] = ForkedRuns(self._packages, environment)
        return self._forked[thread]

    def keep(self, configuration: Configuration, run: VirtualRun) -> None:
        key = _key(configuration)
        self._packages = self._packages or run.packages
        if key in self._known:
            return
        self._known[key] = run
        with writing(self.directory / PLANNED_RUNS), open(self.directory / PLANNED_RUNS, "a", encoding="utf-8") as file:
            file.write(json.dumps({"key": key, "configuration": configuration.to_json(), "run": asdict(run)}) + "\n")
        self._on_end(configuration, run)

    def close(self) -> None:
        for forked in self._forked.values():
            forked.close()
        self._pool.shutdown(cancel_futures=True)

    def _read(self) -> int:
        """Reads the runs that are known from before, and returns their number. A plan that was killed may leave half
        a line at the end."""
        file = self.directory / PLANNED_RUNS
        for line in file.read_text(encoding="utf-8").splitlines() if file.exists() else ():
            try:
                entry = json.loads(line)
                run = VirtualRun(**entry["run"])
            except (ValueError, KeyError, TypeError):
                continue
            if Path(run.directory).is_dir():
                self._known[entry["key"]] = run
        return len(self._known)


class Waiting(Generic[Key]):
    """Runs that were started and have not ended, each under a key of the caller's."""

    def __init__(self, runs: PlannedRuns) -> None:
        self._runs = runs
        self._started: dict[Future[VirtualRun], tuple[Key, Configuration]] = {}

    def add(self, key: Key, configuration: Configuration) -> None:
        self._started[self._runs.start(configuration)] = key, configuration

    def __len__(self) -> int:
        return len(self._started)

    def ended(self) -> Iterator[tuple[Key, VirtualRun]]:
        """Yields each run as it ends, those included that are added meanwhile."""
        while self._started:
            for future in wait(self._started, return_when=FIRST_COMPLETED).done:
                key, configuration = self._started.pop(future)
                run = future.result()
                self._runs.keep(configuration, run)
                yield key, run


@contextmanager
def open_runs(
    directory: Path, *, resume: bool, on_end: Callable[[Configuration, VirtualRun], object]
) -> Iterator[PlannedRuns]:
    """The runs of the plan in `directory`, which is locked meanwhile.

    Args:
        resume: keep the runs that are there.

    Raises:
        MemprofError: the directory cannot be written, is in use, or holds other files than a plan or a profile.
    """
    path = directory.absolute()
    files = {EVENTS, PLAN, PLANNED_RUNS}
    with writing(path):
        if path.is_dir() and any(path.iterdir()) and not any((path / name).exists() for name in files):
            raise MemprofError(f"{path} holds files that are neither a plan nor a profile: choose another directory")
        path.mkdir(parents=True, exist_ok=True)
        descriptor = lock(path)
    try:
        if not resume:
            (path / PLANNED_RUNS).unlink(missing_ok=True)
        with writing(path):
            (path / PLANNED_RUNS).touch()  # from now on the directory is a plan's
        runs = PlannedRuns(path, usable_workers(), on_end)
        try:
            yield runs
        finally:
            runs.close()
    finally:
        os.close(descriptor)


def _key(configuration: Configuration) -> str:
    """The same for the same run: of the same source of the script, under the same release."""
    content: dict[str, Any] = {"version": VERSION, **configuration.to_json()}
    if not configuration.program.module:
        content["source"] = Path(configuration.program.target).read_text(encoding="utf-8", errors="replace")
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]
