# SPDX-License-Identifier: Apache-2.0
"""Plants faults and runs the tests that must catch them: ``python -m tests.planted_faults [words of names]``.

Works on a copy of the package and its tests. Prints a line for each fault, and fails unless all are caught.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from tests.planted_faults import FAULTS
from tests.planted_faults.fault import PACKAGE, ROOT, Fault

_LONGEST = 600  # seconds


def main() -> int:
    """Plants the chosen faults. Returns 0 if all of them are caught."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("words", nargs="*", help="plant faults whose name or file contains any of these")
    parser.add_argument("--cuda", action="store_true", help="also plant faults whose tests need a GPU")
    parser.add_argument("--skip-unchanged", action="store_true", help="do not run the tests without a fault first")
    arguments = parser.parse_args()
    chosen = [fault for fault in FAULTS if _is_chosen(fault, arguments.words, arguments.cuda)]
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder)
        copy_sources(tree)
        if not arguments.skip_unchanged:
            tests = dict.fromkeys(test for fault in chosen for test in fault.tests)
            done = run_tests(tree, tests)
            if done.returncode:
                print(f"tests fail without a fault:\n{done.stdout[-4000:]}{done.stderr[-1000:]}")
                return 1
        counts: Counter[str] = Counter()
        for fault in chosen:
            start = time.perf_counter()
            outcome, detail = plant(tree, fault)
            counts[outcome] += 1
            print(f"{outcome:8} {fault.name:44} {time.perf_counter() - start:5.1f} s  {detail}", flush=True)
    print(", ".join(f"{count} {outcome}" for outcome, count in counts.items()))
    return int(counts["caught"] < len(chosen))


def _is_chosen(fault: Fault, words: list[str], cuda: bool) -> bool:
    if fault.needs_cuda and not cuda:
        return False
    return not words or any(word in f"{fault.name} {fault.file}" for word in words)


def copy_sources(tree: Path) -> None:
    """Copies the package, with links to its extensions, and its tests."""
    ignored = shutil.ignore_patterns("__pycache__", "*.so")
    for name in ("opacus_memprof", "tests"):
        shutil.copytree(ROOT / name, tree / name, ignore=ignored)
    for extension in (ROOT / "opacus_memprof").rglob("*.so"):
        (tree / extension.relative_to(ROOT)).symlink_to(extension)
    shutil.copy(ROOT / "pyproject.toml", tree)


def plant(tree: Path, fault: Fault) -> tuple[str, str]:
    """Plants a fault and runs its tests.

    Args:
        tree: where the copy is.
        fault: the fault.

    Returns:
        "caught", "survived" or "broken", and the first test that failed. A fault is broken if tests cannot be run.
    """
    file = tree / PACKAGE / fault.file
    original = file.read_text()
    try:
        _write(file, fault.planted())
        done = run_tests(tree, fault.tests)
    finally:
        _write(file, original)
    outcome = {0: "survived", 1: "caught"}.get(done.returncode, "broken")
    failed = re.search(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
    if outcome == "broken":
        return outcome, (done.stdout + done.stderr)[-400:]
    return outcome, failed[1].rpartition("::")[2] if failed else fault.why


def _write(file: Path, text: str) -> None:
    """Writes a source file, and removes what Python has compiled of it: both may be of the same second and size."""
    file.write_text(text)
    for compiled in (file.parent / "__pycache__").glob(f"{file.stem}.*.pyc"):
        compiled.unlink()


def run_tests(tree: Path, tests: Iterable[str]) -> "subprocess.CompletedProcess[str]":
    """Runs tests in a copy, until one fails."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "--tb=short", "-p", "no:cacheprovider", *tests]
    environment = {**os.environ, "PYTHONPATH": str(tree)}
    try:
        return subprocess.run(
            command, cwd=tree, env=environment, capture_output=True, text=True, timeout=_LONGEST, check=False
        )
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(command, -1, "", f"took more than {_LONGEST} s")


if __name__ == "__main__":
    raise SystemExit(main())
