# SPDX-License-Identifier: Apache-2.0
"""Jobs: how they share devices, how they are stopped, and what is left of them."""

import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from itertools import pairwise
from pathlib import Path

import pytest

from opacus_memprof.errors import MemprofError
from opacus_memprof.jobs.pool import DevicePool, PendingJobs, Processes
from opacus_memprof.planning.runs import Journal
from opacus_memprof.profiles.directory import locked_directory

JOBS = range(12)


def run_all(
    run: Callable[[int, int], object],
    devices: Sequence[int],
    jobs: Sequence[int] = JOBS,
    *,
    pause: float = 0,
    stop: Callable[[], object] = lambda: None,
) -> Iterator[tuple[int, object]]:
    """Runs jobs on devices, and yields each with its result as it ends."""
    pending = PendingJobs[int, object]()
    with closing(DevicePool(devices, pause=pause, stop=stop)) as pool:
        for job in jobs:
            pending.add(job, pool.submit(lambda device, job=job: run(job, device)))  # type: ignore[misc]
        for job, future in pending.as_completed():
            yield job, future.result()


def test_jobs_run_once_and_one_at_a_time_per_device() -> None:
    busy, lock = Counter[int](), threading.Lock()
    most, used = 0, set()

    def run(job: int, device: int) -> int:
        nonlocal most
        with lock:
            busy[device] += 1
            most = max(most, busy[device])
            used.add(device)
        threading.Event().wait(0.01)
        with lock:
            busy[device] -= 1
        return 10 * job

    ended = list(run_all(run, [0, 1, 5]))
    assert sorted(ended) == [(job, 10 * job) for job in JOBS]
    assert most == 1
    assert used == {0, 1, 5}


def test_devices_work_side_by_side() -> None:
    together = threading.Barrier(4)  # breaks unless four wait at once
    ended = list(run_all(lambda job, device: together.wait(timeout=10), [0, 1, 2, 3]))
    assert len(ended) == len(JOBS)


def test_a_single_device_runs_jobs_in_order() -> None:
    started: list[int] = []
    ended = list(run_all(lambda job, device: started.append(job), [0]))
    assert started == list(JOBS)
    assert sorted(job for job, _ in ended) == list(JOBS)


def test_closing_stops_running_jobs_and_starts_no_more() -> None:
    stopped, started = threading.Event(), []

    def run(job: int, device: int) -> None:
        started.append(job)
        if job:
            assert stopped.wait(timeout=10)  # as a process that is waited for until it is killed

    with closing(run_all(run, [0, 1], stop=stopped.set)) as results:  # type: ignore[type-var]
        first, _ = next(results)
    assert first == 0
    assert stopped.is_set()
    assert len(started) <= 3


def test_a_job_that_raises_stops_the_others() -> None:
    stopped = threading.Event()

    def run(job: int, device: int) -> None:
        if job == 0:
            raise OSError("the disk is full")
        assert stopped.wait(timeout=10)

    with pytest.raises(OSError, match="the disk is full"):
        list(run_all(run, [0, 1], stop=stopped.set))
    assert stopped.is_set()


def test_a_device_rests_only_between_two_jobs() -> None:
    times: dict[int, list[float]] = {0: [], 1: []}
    begin = time.monotonic()
    list(run_all(lambda job, device: times[device].append(time.monotonic()), [0, 1], range(4), pause=0.2))
    for begun in times.values():
        assert begun[0] - begin < 0.15
        assert all(later - earlier >= 0.2 for earlier, later in pairwise(begun))


def test_jobs_that_are_added_meanwhile_are_waited_for() -> None:
    pending = PendingJobs[str, int]()
    with ThreadPoolExecutor(1) as executor:
        pending.add("first", executor.submit(int, "1"))
        ended = []
        for key, future in pending.as_completed():
            ended.append((key, future.result()))
            if key == "first":
                known: Future[int] = Future()
                known.set_result(2)
                pending.add("second", known)
    assert ended == [("first", 1), ("second", 2)]


def test_killed_processes_end_and_later_ones_too(tmp_path: Path) -> None:
    processes = Processes()
    command = [sys.executable, "-c", "import time; time.sleep(60)"]
    with ThreadPoolExecutor(1) as executor:
        running = executor.submit(processes.run, command, {}, tmp_path / "log.txt")
        while not processes._children:
            time.sleep(0.01)
        processes.kill()
        assert running.result(timeout=10) == -9
    assert processes.run(command, {}, tmp_path / "log.txt") == -9


def read_one_line(processes: list[subprocess.Popen[str]]) -> None:
    """Starts a process, and is interrupted while it reads its lines."""
    command = [sys.executable, "-c", "print('ready', flush=True); import time; time.sleep(60)"]
    with Processes().lines(command, {}) as child:
        processes.append(child)
        assert child.stdout is not None
        child.stdout.readline()
        raise KeyboardInterrupt


def test_a_process_is_killed_if_reading_its_lines_raises() -> None:
    processes: list[subprocess.Popen[str]] = []
    with pytest.raises(KeyboardInterrupt):
        read_one_line(processes)
    assert processes[0].poll() == -9


def test_a_directory_has_one_writer(tmp_path: Path) -> None:
    path = tmp_path / "results"
    other = locked_directory(path, lambda: None)
    with locked_directory(path, lambda: None), pytest.raises(MemprofError, match="another profiler"):
        other.__enter__()
    assert list(path.iterdir()) == []
    with locked_directory(path, lambda: None):
        pass


def test_other_files_are_refused_and_stay_unlocked(tmp_path: Path) -> None:
    def refuse() -> None:
        raise MemprofError("other files")

    with pytest.raises(MemprofError, match="other files"), locked_directory(tmp_path / "results", refuse):
        pass
    assert not (tmp_path / "results").exists()


def test_a_journal_skips_a_partial_line(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "runs.jsonl")
    assert list(journal.entries()) == []
    journal.append({"key": "a"})
    journal.append({"key": "b"})
    with open(tmp_path / "runs.jsonl", "a") as file:
        file.write('{"key": ')
    assert list(journal.entries()) == [{"key": "a"}, {"key": "b"}]
    journal.clear()
    assert list(journal.entries()) == []
