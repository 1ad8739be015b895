# SPDX-License-Identifier: Apache-2.0
"""Runs scripts with and without `opacus-memprof run`."""

import json
import re
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from tests.warm_python import ENVIRONMENT, interpreter

SCRIPTS = Path(__file__).parent / "scripts"
TRAIN = str(SCRIPTS / "train.py")
RUN = ("-m", "opacus_memprof", "run", "--device", "cpu")

Completed = subprocess.CompletedProcess[str]


def python(*arguments: str | Path, cwd: Path | None = None) -> Completed:
    return _run([*interpreter(), *map(str, arguments)], cwd)


def new_python(*arguments: str | Path, cwd: Path | None = None) -> Completed:
    """The same where it matters how a process is started, and what Python itself prints."""
    return _run([sys.executable, *map(str, arguments)], cwd)


def _run(command: list[str], cwd: Path | None) -> Completed:
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=ENVIRONMENT, cwd=cwd)


@cache
def plain(*arguments: str) -> Completed:
    """The same without the profiler."""
    return python(*arguments)


def profile_of(directory: Path) -> dict[str, Any]:
    return json.loads((directory / "profile.json").read_text())


def losses(output: str) -> list[str]:
    return re.findall(r"^step \d+ .*$", output, re.MULTILINE)


def assert_reconciled(profile: dict[str, Any], directory: Path) -> None:
    """Every sum there is, and at least one."""
    peak = profile["devices"]["cpu"]["peak"]
    assert sum(peak["categories"].values()) == peak["requested_bytes"] > 0
    snapshots = [json.loads(line) for line in (directory / "snapshots.jsonl").read_text().splitlines()]
    assert snapshots
    for snapshot in snapshots:
        device = snapshot["devices"]["cpu"]
        assert device["remainder"] == 0
        assert sum(device["categories"].values()) == device["requested_bytes"] == device["allocated_bytes"]


Start = Callable[..., "subprocess.Popen[str]"]


def read_rest(process: "subprocess.Popen[str]") -> tuple[str, str]:
    """What it prints until its end on stdout (after what `start` has read) and on stderr."""
    output = process.stdout.read()  # not communicate(), which knows nothing of what readline has buffered
    return output, process.stderr.read()
