# SPDX-License-Identifier: Apache-2.0
"""`opacus-memprof run` on scripts that a signal ends, or that hang."""

import signal
import struct
import time
from pathlib import Path

import pytest

from tests.integration.run_scripts import (
    RUN,
    SCRIPTS,
    TRAIN,
    Start,
    assert_reconciled,
    profile_of,
    python,
    read_rest,
)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_script_that_a_signal_ends(tmp_path: Path, start_script: Start, number: signal.Signals) -> None:
    process = start_script(*RUN, "-o", tmp_path / "out", TRAIN, "--end", "wait")
    process.send_signal(number)
    # The parent sees a death by the signal, as it does without the profiler.
    assert process.wait(timeout=60) == -number, read_rest(process)
    profile = profile_of(tmp_path / "out")
    assert (profile["status"], profile["exit_code"]) == ("killed", 128 + number)
    assert_reconciled(profile, tmp_path / "out")


HANGS = """
import ctypes, sys, torch
from opacus_memprof.running import recording as signals
signals.GRACE_SECONDS = 0.3
kept = torch.zeros(1000)
libc = ctypes.CDLL(None)
lock = ctypes.create_string_buffer(64)  # pthread_mutex_t
libc.pthread_mutex_lock(lock)
print("step 0 0.0", flush=True)
libc.pthread_mutex_lock(lock)  # for ever: no signal interrupts it
"""


def test_a_script_that_hangs_in_a_library_call(tmp_path: Path, start_script: Start) -> None:
    (tmp_path / "hangs.py").write_text(HANGS)
    process = start_script(*RUN, "-o", tmp_path / "out", tmp_path / "hangs.py", last=0)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=60) == -signal.SIGTERM, read_rest(process)
    profile = profile_of(tmp_path / "out")
    assert (profile["status"], profile["exit_code"]) == ("killed", 128 + signal.SIGTERM)
    assert profile["devices"]["cpu"]["end_bytes"] >= 4000


SLOW_HANDLER = """
import signal, time, torch
from opacus_memprof.running import recording as signals
signals.GRACE_SECONDS = 0.1
def write_checkpoint(*_):
    time.sleep(1.0)
    print("checkpoint written", flush=True)
    raise SystemExit(4)
signal.signal(signal.SIGTERM, write_checkpoint)
print("step 0 0.0", flush=True)
time.sleep(60)
"""


def test_a_handler_that_takes_longer_than_the_grace(tmp_path: Path, start_script: Start) -> None:
    (tmp_path / "slow.py").write_text(SLOW_HANDLER)
    process = start_script(*RUN, "-o", tmp_path / "out", tmp_path / "slow.py", last=0)
    process.send_signal(signal.SIGTERM)
    output, _ = read_rest(process)
    assert process.wait(timeout=60) == 4
    assert output.startswith("checkpoint written")


def test_a_script_with_a_handler_of_its_own(tmp_path: Path, start_script: Start) -> None:
    process = start_script(*RUN, "-o", tmp_path / "out", SCRIPTS / "handlers.py", last=0)
    process.send_signal(signal.SIGTERM)
    output, _ = read_rest(process)
    assert process.wait(timeout=60) == 4
    assert output.startswith("checkpoint written")
    assert profile_of(tmp_path / "out")["exit_code"] == 4


def test_a_script_that_is_killed(tmp_path: Path, start_script: Start) -> None:
    directory = tmp_path / "out"
    process = start_script(*RUN, "-o", directory, TRAIN, "--steps", "5", "--end", "wait", last=4)
    time.sleep(1)  # what SIGKILL may lose is a few milliseconds old, on a busy machine a little more
    process.kill()
    process.wait(timeout=60)
    assert not (directory / "profile.json").exists()
    assert events_of(directory, kind=STEP_EVENT) == 5
    report = python("-m", "opacus_memprof", "report", directory)
    assert report.returncode == 0, report.stderr
    assert "killed" in report.stdout
    assert "per_sample_gradients" in report.stdout
    # The lock died with the process: the next profile replaces this one.
    assert python(*RUN, "-o", directory, TRAIN).returncode == 0


STEP_EVENT = 4  # EventKind::step


def events_of(directory: Path, kind: int) -> int:
    """How many events of a kind a killed process has left: whole records end at the first one without a kind."""
    content = (directory / "events.bin").read_bytes()
    magic, version, width = struct.unpack_from("<8sII", content)
    assert (magic, version, width) == (b"OMEMPROF", 2, 32)
    kinds = content[4096 + 6 :: 32]
    return kinds.split(b"\0")[0].count(kind)
