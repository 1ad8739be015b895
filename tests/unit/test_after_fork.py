# SPDX-License-Identifier: Apache-2.0
"""What a forked child may do, a DataLoader's worker above all: whatever another thread did at the fork."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.warm_python import ENVIRONMENT, interpreter

FORKS = """
import os, signal, threading

import torch

from opacus_memprof.recording import native

{prepare}

for _ in range({forks}):
    if os.fork() == 0:
        signal.alarm(10)  # ends a child that waits for ever
        {child}
        os._exit(0)
    _, status = os.wait()
    if status != 0:
        print(status)
        os._exit(1)
os._exit(0)
"""


def end_of_children(prepare: str, child: str, forks: int) -> str:
    """Empty if each of the children, forked while threads of the parent run, came to its end."""
    program = FORKS.format(prepare=prepare, child=child, forks=forks)
    return subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, timeout=120).stdout


def test_a_child_allocates_on_the_cpu() -> None:
    prepare = """
kept = torch.empty(1000)
native.cpu_install()
born_under_us = torch.empty(1000)

def allocate():
    while True:
        torch.empty(10)

for _ in range(3):
    threading.Thread(target=allocate, daemon=True).start()
"""
    assert end_of_children(prepare, "kept = born_under_us = torch.empty(10)", forks=40) == ""


SESSIONS = """
import multiprocessing, os, sys
import opacus_memprof


def train(directory):
    import torch
    with opacus_memprof.profile(directory, device="cpu") as session:
        kept = torch.empty(2**20, dtype=torch.uint8)
        live = session.breakdown()
    del kept
    return live


def run(directory):
    try:
        live = train(directory)
        print(live == {"cpu": {"unattributed": 2**20}}, opacus_memprof.session.current() is None, flush=True)
    except opacus_memprof.MemprofError as error:
        print(error, opacus_memprof.session.current() is None, flush=True)


if __name__ == "__main__":
    run_in = multiprocessing.get_context(sys.argv[1])
    if sys.argv[2] == "used":
        train(sys.argv[3] + "/parent")
    if sys.argv[2] == "recording":
        import torch
        with opacus_memprof.profile(sys.argv[3] + "/parent", device="cpu") as session:
            child = run_in.Process(target=run, args=(sys.argv[3] + "/child",))
            child.start()
            child.join()
            kept = torch.empty(2**10, dtype=torch.uint8)
            print(session.breakdown() == {"cpu": {"unattributed": 2**10}})
        sys.exit(child.exitcode)
    child = run_in.Process(target=run, args=(sys.argv[3] + "/child",))
    child.start()
    child.join()
    sys.exit(child.exitcode)
"""


@pytest.mark.parametrize(
    ("method", "parent", "expected"),
    [
        ("fork", "imported", ["True True"]),
        pytest.param("spawn", "used", ["True True"], marks=pytest.mark.nightly),
        ("fork", "used", ["refused"]),
        ("fork", "recording", ["refused", "True"]),
        ("spawn", "recording", ["True True", "True"]),
    ],
)
def test_a_child_records_or_is_refused(method: str, parent: str, expected: list[str], tmp_path: Path) -> None:
    """Never does it record nothing without a word."""
    (tmp_path / "program.py").write_text(SESSIONS)
    program = [*interpreter(), str(tmp_path / "program.py"), method, parent, str(tmp_path)]
    ended = subprocess.run(program, capture_output=True, text=True, timeout=240, env=ENVIRONMENT)
    assert ended.returncode == 0, ended.stderr
    lines = ended.stdout.splitlines()
    assert len(lines) == len(expected), ended
    for line, wanted in zip(lines, expected, strict=True):
        if wanted == "refused":
            assert "was forked after opacus_memprof had been used, and cannot record: start it by spawn" in line
            assert line.endswith("True")
        else:
            assert line == wanted
    assert (tmp_path / "child" / "profile.json").exists() == ("refused" not in expected)
