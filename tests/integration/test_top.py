# SPDX-License-Identifier: Apache-2.0
"""`opacus-memprof top` on a process that is still running: what it shows is what that process itself counts."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from opacus_memprof.analysis.live import ProfileFollower, directory_of_process
from opacus_memprof.cli import app

ENVIRONMENT = os.environ | {"PYTHONPATH": str(Path(__file__).resolve().parents[2])}

# Prints what it counts itself, and goes on when it is told to.
SCRIPT = """
import json, sys
import torch
import opacus_memprof
from opacus_memprof import session

model = torch.nn.Linear(100, 50, bias=False)
session.current().attach(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
kept = []
for size in (0, 1, 2):
    with opacus_memprof.tag("mine"):
        kept += [torch.ones(1000) for _ in range(size)]
    session.current().snapshot(f"{size} more")
    print(json.dumps(session.current().breakdown()), flush=True)
    sys.stdin.readline()
"""


@pytest.fixture
def running(tmp_path: Path) -> Iterator["subprocess.Popen[str]"]:
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "opacus_memprof", "run", "-o", "profile", "--device", "cpu", "script.py"]
    process = subprocess.Popen(
        command, cwd=tmp_path, env=ENVIRONMENT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    yield process
    process.kill()
    process.wait()


def read_counts(process: "subprocess.Popen[str]") -> dict[str, Any]:
    assert process.stdout is not None
    return dict(json.loads(process.stdout.readline()))


def let_continue(process: "subprocess.Popen[str]") -> None:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


def read_until(follower: ProfileFollower, categories: dict[str, int]) -> dict[str, Any]:
    """What the follower sees once it has these.

    Events are written every 5 milliseconds, and names reach meta.json within a second of their first use.
    """
    until = time.monotonic() + 20
    while True:
        seen = follower.read()
        if seen["devices"]["cpu"]["categories"] == categories or time.monotonic() > until:
            return seen
        time.sleep(0.1)


def test_a_running_process_is_followed(running: "subprocess.Popen[str]", tmp_path: Path) -> None:
    first = read_counts(running)
    assert directory_of_process(running.pid) == tmp_path / "profile"
    follower = ProfileFollower(tmp_path / "profile")
    for size in (0, 1, 3):
        counted = first if size == 0 else read_counts(running)
        seen = read_until(follower, counted["cpu"])
        assert seen["status"] == "running"
        assert seen["pid"] == running.pid
        device = seen["devices"]["cpu"]
        assert device["categories"] == counted["cpu"]
        assert device["categories"].get("mine", 0) == 4000 * size
        assert device["modules"][""].get("mine", 0) == 4000 * size
        assert device["requested_bytes"] == sum(counted["cpu"].values())
        if size < 3:
            let_continue(running)
    running.kill()
    running.wait()
    assert follower.read()["status"] == "killed"
    printed = CliRunner().invoke(app, ["top", str(tmp_path / "profile"), "--once"])
    assert printed.exit_code == 0
    assert "killed" in printed.stdout
    assert "11.72 KiB" in printed.stdout  # 3 tensors of 4000 bytes of the script's own category
