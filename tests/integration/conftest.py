# SPDX-License-Identifier: Apache-2.0
"""Fixtures for tests that start where no other has left anything, and for scripts that tests start."""

import gc
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

import opacus_memprof
from opacus_memprof.analysis import findings
from opacus_memprof.planning import runs as planning_runs
from opacus_memprof.planning.virtual_run import ForkedRuns
from opacus_memprof.recording import native
from tests.integration.run_scripts import ENVIRONMENT, Start
from tests.warm_python import ROOT


@pytest.fixture
def clean_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No garbage of an earlier test is released in this one, and its session ends also where it fails.

    What an earlier test has allocated under a session and still keeps counts at this one's peak, so that no share of
    the peak decides here whether a finding is made.
    """
    monkeypatch.setattr(findings, "MATERIAL", 0.0)
    gc.collect()
    yield
    if (left := opacus_memprof.session.current()) is not None:
        left.close()
    gc.collect()


@pytest.fixture
def collected_garbage() -> Iterator[None]:
    gc.collect()  # an earlier test's model, whose parameters would count as well
    yield
    assert opacus_memprof.session.current() is None
    opacus_memprof.uninstall()


@pytest.fixture
def recorder() -> Iterator[None]:
    """The recording CPU allocator, with no earlier test's tensors."""
    gc.collect()
    opacus_memprof.install("cpu")
    native.reset_peaks()
    yield
    opacus_memprof.uninstall()


@pytest.fixture
def start_script() -> Iterator[Start]:
    """Starts python and waits for the line that the script prints after its steps (step `last`)."""
    processes = []

    def begin(*arguments: str | Path, last: int = 2) -> "subprocess.Popen[str]":
        command = [sys.executable, *map(str, arguments)]
        # Ignored by what a shell starts with `&`, and then by all its children.
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT
            )
        finally:
            signal.signal(signal.SIGINT, before)
        processes.append(process)
        line = "\n"
        while line and not line.startswith(f"step {last} "):
            line = process.stdout.readline()
        assert line, process.stderr.read()
        return process

    yield begin
    for process in processes:
        with process:  # closes its pipes and waits
            process.kill()


class _KeptRuns(ForkedRuns):
    def close(self) -> None:
        """The next plan forks its runs from this process, too."""


@pytest.fixture(scope="session")
def _kept_runs() -> Iterator[dict[frozenset[tuple[str, str]], _KeptRuns]]:
    kept: dict[frozenset[tuple[str, str]], _KeptRuns] = {}
    yield kept
    for each in kept.values():
        ForkedRuns.close(each)


@pytest.fixture
def shared_forks(
    _kept_runs: dict[frozenset[tuple[str, str]], _KeptRuns], monkeypatch: pytest.MonkeyPatch
) -> dict[frozenset[tuple[str, str]], _KeptRuns]:
    """Plans of this process fork their runs from one process for each environment, which imports torch once."""

    def start(environment: Mapping[str, str]) -> _KeptRuns:
        environment = {name: value for name, value in environment.items() if name != "PYTEST_CURRENT_TEST"}
        key = frozenset(environment.items())
        if key not in _kept_runs:
            _kept_runs[key] = _KeptRuns(environment)
        return _kept_runs[key]

    monkeypatch.setattr(planning_runs, "ForkedRuns", start)
    monkeypatch.setenv("PYTHONPATH", ROOT)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return _kept_runs
