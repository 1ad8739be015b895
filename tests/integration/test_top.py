# SPDX-License-Identifier: Apache-2.0
"""`opacus-memprof top` on a process that is still running: what it shows is what that process itself counts."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from typer.testing import CliRunner

from opacus_memprof.analysis.live import ProfileFollower, directory_of_process
from opacus_memprof.analysis.profile import load_profile
from opacus_memprof.cli import app
from opacus_memprof.errors import MemprofError
from tests import warm_python

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


PROGRAM = """
import signal, sys, time
if sys.argv[1] == "torch":
    import torch
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 8))
    optimizer = torch.optim.Adam(model.parameters())
def run(*_):  # as Python 3.14 runs what sys.remote_exec names: in the main thread, between two instructions
    exec(compile(open(open("script").read()).read(), "script", "exec"), vars(sys.modules["__main__"]))
names = set(vars())
signal.signal(signal.SIGUSR1, run)
print("ready", flush=True)
while True:
    time.sleep(0.01)
    if sys.argv[1] == "torch":
        model(torch.ones(16, 64)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert {name for name in vars() if name[0] != "_"} <= {*names, "names"}
"""


@contextlib.contextmanager
def program(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=warm_python.ENVIRONMENT) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            yield process
        finally:
            process.kill()


def remote_exec(pid: int, script: str) -> None:
    """Stands in for sys.remote_exec below Python 3.14."""
    Path("script").write_text(script)
    os.kill(pid, signal.SIGUSR1)


def attach(*arguments: object) -> str:
    result = CliRunner().invoke(app, ["attach", *map(str, arguments)])
    if result.exception is not None:
        raise result.exception
    return result.output


def test_a_running_program_is_recorded_from_now_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    if not hasattr(sys, "remote_exec"):
        monkeypatch.setattr(sys, "remote_exec", remote_exec, raising=False)
    Path("train.py").write_text(PROGRAM)
    with program("train.py", "torch") as running:
        for directory in ("first", "again"):  # the program goes on, and can be recorded again
            assert "finished" in attach(running.pid, "-o", directory, "--seconds", "1")
            profile = load_profile(tmp_path / directory)
            peak = profile.devices["cpu"].peak
            assert sum(peak.categories.values()) == peak.requested_bytes
            parameters = 4 * (64 * 256 + 256 + 256 * 8 + 8)
            assert peak.categories["model_parameters"] == peak.categories["gradients"] == parameters
            assert peak.categories["optimizer_states"] == 2 * parameters + 4 * 4  # and a count of each parameter
            assert any(step.complete for step in profile.devices["cpu"].steps)
        Path("occupied").mkdir()
        Path("occupied/file").touch()
        with pytest.raises(MemprofError, match=r"cannot be recorded \(.*/occupied holds files that are not a profile"):
            attach(running.pid, "-o", "occupied")
        monkeypatch.setattr(sys, "remote_exec", Mock(side_effect=PermissionError("not allowed")), raising=False)
        with pytest.raises(MemprofError, match=rf"process {running.pid} cannot be reached \(not allowed\)"):
            attach(running.pid)
        monkeypatch.delattr(sys, "remote_exec")
        with pytest.raises(MemprofError, match=r"attach needs Python 3\.14, and this is 3\.\d+: start the program by"):
            attach(running.pid)
        assert running.poll() is None


def test_a_directory_without_a_profile(tmp_path: Path) -> None:
    with pytest.raises(MemprofError, match="nowhere is not there: give the directory of a profile"):
        ProfileFollower(tmp_path / "nowhere")
    with pytest.raises(MemprofError, match=r"holds no profile: there is no events\.bin in it"):
        ProfileFollower(tmp_path)


def test_what_cannot_be_attached_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(PROGRAM)
    with pytest.raises(MemprofError, match="there is no process 999999999"):
        attach(999999999)
    with program("train.py", "plain") as running:
        with pytest.raises(MemprofError, match=f"process {running.pid} has not loaded torch"):
            attach(running.pid)
        with monkeypatch.context() as others:
            others.setattr(Path, "read_text", Mock(side_effect=PermissionError))
            with pytest.raises(
                MemprofError, match=f"process {running.pid} cannot be read from here: attach as its user"
            ):
                attach(running.pid)
    with (
        program("-m", "opacus_memprof", "run", "train.py", "torch") as running,
        pytest.raises(MemprofError, match=f"process {running.pid} is being profiled already"),
    ):
        attach(running.pid)
