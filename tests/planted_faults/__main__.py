# SPDX-License-Identifier: Apache-2.0
"""Plants faults and runs the tests that must catch them: ``python -m tests.planted_faults [words of names]``.

Works on a copy of the package and its tests. Prints a line for each fault, and fails unless all are caught.
"""

import argparse
import importlib
import os
import re
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import hypothesis  # noqa: F401  # as the next ones, so that forks have it
import opacus.optimizers  # noqa: F401
import pytest
import torch.distributed.fsdp
import torch.distributed.tensor
import torch.func

from tests.planted_faults import FAULTS
from tests.planted_faults.fault import ROOT, Fault

_LONGEST = 600  # seconds


def main() -> int:
    """Plants the chosen faults. Returns 0 if all of them are caught."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "words",
        nargs="*",
        help="plant faults whose name or path contains any of these (a name is its sentence with underscores)",
    )
    parser.add_argument("--cuda", action="store_true", help="also plant faults whose tests need a GPU")
    parser.add_argument("--skip-unchanged", action="store_true", help="do not run the tests without a fault first")
    parser.add_argument("--jobs", type=int, default=1, help="processes, each of which plants a part of the faults")
    arguments = parser.parse_args()
    chosen = [fault for fault in FAULTS if _is_chosen(fault, arguments.words, arguments.cuda)]
    torch.set_num_threads(1)  # a fork has no threads of its parent
    if not arguments.skip_unchanged:
        with tempfile.TemporaryDirectory() as folder:
            copy_sources(Path(folder))
            done = run_tests(Path(folder), dict.fromkeys(test for fault in chosen for test in fault.tests))
        if done.status:
            print(f"tests fail without a fault:\n{done.printed[-4000:]}")
            return 1
    processes = []
    for job in range(arguments.jobs):
        process = os.fork()
        if process == 0:
            os._exit(_plant_all(chosen[job :: arguments.jobs]))
        processes.append(process)
    statuses = [os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) for process in processes]
    return int(any(statuses))


def _plant_all(faults: list[Fault]) -> int:
    """Plants faults in a copy of the sources, and prints a line for each. Returns 0 if all of them are caught."""
    counts: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        copy_sources(Path(folder))
        for fault in faults:
            start = time.perf_counter()
            outcome, detail = plant(Path(folder), fault)
            counts[outcome] += 1
            print(f"{outcome:8} {fault.name[:79]:80} {time.perf_counter() - start:5.1f} s  {detail}", flush=True)
    print(", ".join(f"{count} {outcome}" for outcome, count in counts.items()), flush=True)
    return int(counts["caught"] < len(faults))


def _is_chosen(fault: Fault, words: list[str], cuda: bool) -> bool:
    if fault.needs_cuda and not cuda:
        return False
    return not words or any(word in f"{fault.name} {fault.path}" for word in words)


def copy_sources(tree: Path) -> None:
    """Copies the package and its tests, and makes links to extensions and to all else that tests read."""
    ignored = shutil.ignore_patterns("__pycache__", "*.so")
    for name in ("opacus_memprof", "tests"):
        shutil.copytree(ROOT / name, tree / name, ignore=ignored)
    for extension in (ROOT / "opacus_memprof").rglob("*.so"):
        (tree / extension.relative_to(ROOT)).symlink_to(extension)
    for path in ROOT.glob("[!.]*"):
        if not (tree / path.name).exists():
            (tree / path.name).symlink_to(path)


def plant(tree: Path, fault: Fault) -> tuple[str, str]:
    """Plants a fault and runs its tests.

    Args:
        tree: where the copy is.
        fault: the fault.

    Returns:
        "caught", "survived" or "broken", and the first test that failed. A fault is broken if tests cannot be run.
    """
    done = run_with(tree, fault.path, fault.planted(), fault.tests)
    outcome = {0: "survived", 1: "caught"}.get(done.status, "broken")
    if outcome == "broken":
        return outcome, done.printed[-400:]
    return outcome, done.first_failure().rpartition("::")[2]


def run_with(tree: Path, name: str, planted: str, tests: Iterable[str], longest: float = _LONGEST) -> "Result":
    """Runs tests in a copy in which one file has another text.

    Args:
        tree: where the copy is.
        name: the file in it.
        planted: its text.
        tests: the tests.
        longest: seconds that they may take.

    Returns:
        how they ended.
    """
    file = tree / name
    original = file.read_text()
    try:
        _write(file, planted)
        return run_tests(tree, tests, longest)
    finally:
        _write(file, original)


def _write(file: Path, text: str) -> None:
    """Writes a source file, and removes what Python has compiled of it: both may be of the same second and size."""
    file.write_text(text)
    for compiled in (file.parent / "__pycache__").glob(f"{file.stem}.*.pyc"):
        compiled.unlink()


@dataclass(frozen=True)
class Result:
    """How tests ended: pytest's exit status, or -1 if they took too long; and what it printed."""

    status: int
    printed: str

    def first_failure(self) -> str:
        """Returns the first test that failed, or ""."""
        failed = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", self.printed, re.MULTILINE)  # names may have spaces
        return failed[1] if failed else ""


def run_tests(tree: Path, tests: Iterable[str], longest: float = _LONGEST, plugins: Sequence[object] = ()) -> Result:
    """Runs tests in a copy, until one fails: in a fork of this process, which has imported what they need.

    Given plugins of pytest, runs all of the tests.
    """
    with tempfile.TemporaryFile("w+") as output:
        process = os.fork()
        if process == 0:
            status = 3  # pytest's, of an internal error
            try:
                status = _run_here(tree, list(tests), output.fileno(), plugins)
            finally:
                os._exit(status)
        status = _wait(process, longest)
        output.seek(0)
        return Result(status, output.read())


def _run_here(tree: Path, tests: list[str], output: int, plugins: Sequence[object]) -> int:
    os.setpgrp()
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.chdir(tree)
    os.environ["PYTHONPATH"] = str(tree)
    sys.path[:] = [str(tree), *(each for each in sys.path if each not in ("", str(ROOT)))]
    for name in [name for name in sys.modules if name.partition(".")[0] == "tests"]:
        del sys.modules[name]
    until = [] if plugins else ["-x"]
    status = int(pytest.main([*until, "-q", "--tb=short", "-p", "no:cacheprovider", *tests], plugins=[*plugins]))
    package = importlib.import_module("opacus_memprof")
    assert Path(package.__file__ or "").is_relative_to(tree), package.__file__
    sys.stdout.flush()
    return status


def _wait(process: int, longest: float) -> int:
    """Waits for a process and returns its exit status; ends it, with what it has started, if it takes too long."""
    end = time.monotonic() + longest
    while time.monotonic() < end:
        ended, status = os.waitpid(process, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.05)
    os.killpg(process, signal.SIGKILL)
    os.waitpid(process, 0)
    return -1


if __name__ == "__main__":
    raise SystemExit(main())
