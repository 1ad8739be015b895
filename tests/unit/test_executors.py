# SPDX-License-Identifier: Apache-2.0
"""Executors by name, and calls whose workers die."""

import importlib.util
import os
import signal
import sys
import threading
from concurrent.futures import BrokenExecutor, Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from opacus_memprof.cli import app
from opacus_memprof.errors import MemprofError
from opacus_memprof.jobs.executors import PersistentExecutor, executor_of
from opacus_memprof.planning.configuration import PlannedConfiguration, PlannedProgram
from opacus_memprof.planning.runs import open_runs


def two_processes() -> Executor:
    return ProcessPoolExecutor(2)


def no_executor() -> str:
    return "mine"


def fails() -> Executor:
    raise OSError("no route to the scheduler")


def dies_at_first(folder: str, times: int, number: int) -> int:
    """Kills its process at the first `times` calls with this number."""
    for attempt in range(times):
        try:
            Path(folder, f"{number}.{attempt}").touch(exist_ok=False)
        except FileExistsError:
            continue
        os.kill(os.getpid(), signal.SIGKILL)
    return number * number


def raises_at_first(folder: str, number: int) -> int:
    if not Path(folder, "raised").exists():
        Path(folder, "raised").touch()
        raise OSError("a disk that is not mounted yet")
    return number * number


def refuses(folder: str) -> None:
    Path(folder, str(len(os.listdir(folder)))).touch()
    raise MemprofError("the model is unknown")


def test_calls_whose_workers_were_killed_are_run_again(tmp_path: Path) -> None:
    executor = executor_of(f"{__name__}:two_processes")
    assert executor.workers == 2
    futures = [executor.submit(dies_at_first, str(tmp_path), int(number == 3), number) for number in range(6)]
    assert [future.result(60) for future in futures] == [0, 1, 4, 9, 16, 25]
    executor.shutdown()


def test_a_call_that_always_kills_its_worker_ends(tmp_path: Path) -> None:
    executor = executor_of(f"{__name__}:two_processes")
    error = executor.submit(dies_at_first, str(tmp_path), 99, 1).exception(60)
    assert type(error).__name__ == "BrokenProcessPool"
    assert len(list(tmp_path.iterdir())) == 3
    executor.shutdown()


@pytest.mark.parametrize("dies", [True, False])
def test_a_call_ends_if_no_executor_takes_it_again(dies: bool) -> None:
    """The first attempt has failed, the executor is closed, and no other can be made."""
    made = [ThreadPoolExecutor(1)]
    executor = PersistentExecutor(made.pop)

    def closes_the_executor() -> None:
        executor._executor.shutdown(wait=False)
        raise BrokenExecutor("all workers died") if dies else OSError("a disk that is not mounted yet")

    error = executor.submit(closes_the_executor).exception(10)
    assert str(error) == ("pop from empty list" if dies else "cannot schedule new futures after shutdown")


def test_a_refusal_is_not_tried_again(tmp_path: Path) -> None:
    executor = PersistentExecutor(partial(ThreadPoolExecutor, 1))
    with pytest.raises(MemprofError, match="the model is unknown"):
        executor.submit(refuses, str(tmp_path)).result(10)
    assert len(list(tmp_path.iterdir())) == 1


def test_after_its_end_no_call_is_tried_again() -> None:
    executor = PersistentExecutor(partial(ThreadPoolExecutor, 1))
    begun, end = threading.Event(), threading.Event()
    calls = []

    def call() -> None:
        calls.append(1)
        begun.set()
        end.wait(10)
        raise OSError

    future, waiting = executor.submit(call), executor.submit(call)
    begun.wait(10)
    executor.shutdown(wait=False, cancel_futures=True)
    end.set()
    assert isinstance(future.exception(10), OSError)
    assert waiting.cancelled()
    assert calls == [1]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("slurmy", "'slurmy' is not an executor: choose local, submitit, dask, ray, or module:callable"),
        ("nowhere:make", r"the executor nowhere:make cannot be made \(ModuleNotFoundError"),
        (f"{__name__}:nothing", "AttributeError"),
        (f"{__name__}:fails", "OSError: no route to the scheduler"),
        (
            f"{__name__}:no_executor",
            "returns an object of type str: return a concurrent.futures.Executor that runs calls",
        ),
        ("concurrent.futures:Executor", "returns an object of type Executor: return "),
    ],
)
def test_what_is_not_an_executor_is_refused_in_a_sentence(name: str, message: str) -> None:
    with pytest.raises(MemprofError, match=message):
        executor_of(name)


def test_a_module_in_the_current_directory_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_pool.py").write_text("from concurrent.futures import ThreadPoolExecutor as make\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path not in ("", str(tmp_path))])
    with executor_of("my_pool:make") as executor:
        assert executor.submit(abs, -1).result() == 1


@pytest.mark.parametrize("name", ["dask", "ray"])
def test_schedulers(name: str, tmp_path: Path) -> None:
    module = {"dask": "distributed"}.get(name, name)
    if importlib.util.find_spec(module) is None:
        with pytest.raises(MemprofError, match=f"pip install {module}"):
            executor_of(name)
        return
    executor = executor_of(name)
    assert executor.workers >= 1
    if name == "ray":  # whose workers do not find this module
        importlib.import_module("ray.cloudpickle").register_pickle_by_value(sys.modules[__name__])
    again = executor.submit(raises_at_first, str(tmp_path), 7)
    killed = [executor.submit(dies_at_first, str(tmp_path), int(number == 1), number) for number in range(3)]
    assert [future.result(120) for future in [again, *killed]] == [49, 0, 1, 4]
    executor.shutdown()


def test_a_scheduler_that_does_not_answer() -> None:
    pytest.importorskip("distributed")
    unreachable = {"scheduler-address": "tcp://127.0.0.1:1", "distributed.comm.timeouts.connect": "0.2s"}
    with (
        importlib.import_module("dask.config").set(unreachable),
        pytest.raises(MemprofError, match=r"the executor dask cannot be made \(OSError: Timed out"),
    ):
        executor_of("dask")


def test_a_plan_s_runs_go_to_the_executor(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("raise SystemExit(7)\n")
    configuration = PlannedConfiguration(PlannedProgram(str(tmp_path / "train.py")), "h200")
    submitted: list[Any] = []

    class Recording(ThreadPoolExecutor):
        def submit(self, call: Any, /, *args: Any, **kwargs: Any) -> Any:
            submitted.append(call.args)
            return super().submit(call, *args, **kwargs)

    executor = PersistentExecutor(partial(Recording, 2))
    with open_runs(tmp_path / "plan", resume=False, on_end=lambda *end: None, executor=executor) as runs:
        (run,) = runs.all([configuration])
    assert [content for content, _ in submitted] == [configuration.to_json()]
    assert run.status == "failed"


def test_a_plan_whose_workers_always_die_ends_in_a_sentence(tmp_path: Path) -> None:
    class Dying(Executor):
        def submit(self, call: Any, /, *args: Any, **kwargs: Any) -> Any:
            ended: Future[Any] = Future()
            ended.set_exception(BrokenExecutor("a worker was terminated.\nMore."))
            return ended

    (tmp_path / "train.py").touch()
    configuration = PlannedConfiguration(PlannedProgram(str(tmp_path / "train.py")), "h200")
    with (
        open_runs(
            tmp_path / "plan", resume=False, on_end=lambda *end: None, executor=PersistentExecutor(Dying)
        ) as runs,
        pytest.raises(MemprofError, match=r"program \(BrokenExecutor: a worker was terminated\): see what they have"),
    ):
        runs.all([configuration])


def test_commands_refuse_unknown_executors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").touch()
    small = ["--vocab-size", "16", "--hidden-dim", "8", "--num-layers", "1", "--num-heads", "1"]
    for command in (["experiments", "--mode", "vanilla", *small], ["plan", "train.py"]):
        name, *rest = command
        result = CliRunner().invoke(app, [name, "--executor", "slurmy", *rest])
        assert isinstance(result.exception, MemprofError), result.output
        assert "'slurmy' is not an executor" in str(result.exception)
        assert [file.name for file in tmp_path.iterdir()] == ["train.py"]
