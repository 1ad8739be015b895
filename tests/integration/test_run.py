# SPDX-License-Identifier: Apache-2.0
"""`opacus-memprof run` on small scripts, against what plain python does with them."""

import json
import os
import re
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = Path(__file__).parent / "scripts"
TRAIN = str(SCRIPTS / "train.py")
ENVIRONMENT = os.environ | {
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": str(ROOT),
    "PYTHONWARNINGS": "ignore",
    "COLUMNS": "200",  # so that no path is broken in two
}
RUN = ("-m", "opacus_memprof", "run", "--device", "cpu")

Completed = subprocess.CompletedProcess[str]


def python(*arguments: str | Path, cwd: Path | None = None) -> Completed:
    command = [sys.executable, *map(str, arguments)]
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


@pytest.mark.parametrize("mode", ["hooks", "ghost"])
def test_a_script_that_ends(tmp_path: Path, mode: str) -> None:
    reference = plain(TRAIN, "--mode", mode)
    completed = python(*RUN, "-o", tmp_path / "out", TRAIN, "--mode", mode)
    assert completed.returncode == 0, completed.stderr
    assert len(losses(reference.stdout)) == 3
    assert completed.stdout.startswith(reference.stdout)  # bit for bit, and then the summary
    profile = profile_of(tmp_path / "out")
    assert (profile["status"], profile["exit_code"]) == ("finished", 0)
    assert_reconciled(profile, tmp_path / "out")
    categories = profile["devices"]["cpu"]["peak"]["categories"]
    weights = (16 * 32 + 32 + 32 * 4 + 4) * 4
    assert categories["model_parameters"] == weights
    if mode == "hooks":
        assert categories["per_sample_gradients"] >= 8 * weights  # and transient copies
    assert "model_parameters" in completed.stdout[len(reference.stdout) :]
    assert str(tmp_path / "out") in completed.stderr


@pytest.mark.parametrize(
    ("end", "status", "code"),
    [("raise", "failed", 1), ("exit_3", "failed", 3), ("exit_text", "failed", 1), ("memory", "out_of_memory", 7)],
)
def test_a_script_that_fails(tmp_path: Path, end: str, status: str, code: int) -> None:
    reference = plain(TRAIN, "--end", end)
    completed = python(*RUN, "-o", tmp_path / "out", TRAIN, "--end", end)
    assert completed.returncode == reference.returncode == code
    assert completed.stdout.startswith(reference.stdout)
    assert reference.stderr in completed.stderr  # the traceback as python prints it
    profile = profile_of(tmp_path / "out")
    assert (profile["status"], profile["exit_code"]) == (status, code)
    assert_reconciled(profile, tmp_path / "out")
    reports = sorted(path.name for path in (tmp_path / "out").glob("oom_report.*"))
    assert reports == (["oom_report.html", "oom_report.json", "oom_report.txt"] if end == "memory" else [])
    assert completed.stderr.count("out of memory cpu: ") == (1 if end == "memory" else 0)


def test_a_script_that_leaves_by_os_exit(tmp_path: Path) -> None:
    completed = python(*RUN, "-o", tmp_path / "out", TRAIN, "--end", "os_exit")
    assert completed.returncode == 5
    profile = profile_of(tmp_path / "out")
    assert (profile["status"], profile["exit_code"]) == ("failed", 5)
    assert_reconciled(profile, tmp_path / "out")


Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start() -> Iterator[Start]:
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


def read_rest(process: "subprocess.Popen[str]") -> tuple[str, str]:
    """What it prints until its end on stdout (after what `start` has read) and on stderr."""
    output = process.stdout.read()  # not communicate(), which knows nothing of what readline has buffered
    return output, process.stderr.read()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_script_that_a_signal_ends(tmp_path: Path, start: Start, number: signal.Signals) -> None:
    reference = start(TRAIN, "--end", "wait")
    process = start(*RUN, "-o", tmp_path / "out", TRAIN, "--end", "wait")
    for each in (reference, process):
        each.send_signal(number)
        each.wait(timeout=60)
    # The parent sees a death by the signal, as it does without the profiler.
    assert process.returncode == reference.returncode == -number, (
        read_rest(reference),
        read_rest(process),
    )
    profile = profile_of(tmp_path / "out")
    assert (profile["status"], profile["exit_code"]) == ("killed", 128 + number)
    assert_reconciled(profile, tmp_path / "out")


HANGS = """
import ctypes, sys, torch
from opacus_memprof.cli import signals
signals.GRACE_SECONDS = 0.3
kept = torch.zeros(1000)
libc = ctypes.CDLL(None)
lock = ctypes.create_string_buffer(64)  # pthread_mutex_t
libc.pthread_mutex_lock(lock)
print("step 0 0.0", flush=True)
libc.pthread_mutex_lock(lock)  # for ever: no signal interrupts it
"""


def test_a_script_that_hangs_in_a_library_call(tmp_path: Path, start: Start) -> None:
    (tmp_path / "hangs.py").write_text(HANGS)
    process = start(*RUN, "-o", tmp_path / "out", tmp_path / "hangs.py", last=0)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=60) == -signal.SIGTERM, read_rest(process)
    profile = profile_of(tmp_path / "out")
    assert (profile["status"], profile["exit_code"]) == ("killed", 128 + signal.SIGTERM)
    assert profile["devices"]["cpu"]["end_bytes"] >= 4000


SLOW_HANDLER = """
import signal, time, torch
from opacus_memprof.cli import signals
signals.GRACE_SECONDS = 0.1
def write_checkpoint(*_):
    time.sleep(1.0)
    print("checkpoint written", flush=True)
    raise SystemExit(4)
signal.signal(signal.SIGTERM, write_checkpoint)
print("step 0 0.0", flush=True)
time.sleep(60)
"""


def test_a_handler_that_takes_longer_than_the_grace(tmp_path: Path, start: Start) -> None:
    (tmp_path / "slow.py").write_text(SLOW_HANDLER)
    process = start(*RUN, "-o", tmp_path / "out", tmp_path / "slow.py", last=0)
    process.send_signal(signal.SIGTERM)
    output, _ = read_rest(process)
    assert process.wait(timeout=60) == 4
    assert output.startswith("checkpoint written")


def test_a_script_with_a_handler_of_its_own(tmp_path: Path, start: Start) -> None:
    process = start(*RUN, "-o", tmp_path / "out", SCRIPTS / "handlers.py", last=0)
    process.send_signal(signal.SIGTERM)
    output, _ = read_rest(process)
    assert process.wait(timeout=60) == 4
    assert output.startswith("checkpoint written")
    assert profile_of(tmp_path / "out")["exit_code"] == 4


def test_a_script_that_is_killed(tmp_path: Path, start: Start) -> None:
    directory = tmp_path / "out"
    process = start(*RUN, "-o", directory, TRAIN, "--steps", "5", "--end", "wait", last=4)
    time.sleep(1)  # what SIGKILL may lose is a few milliseconds old, on a busy machine a little more
    process.kill()
    process.wait(timeout=60)
    assert not (directory / "profile.json").exists()
    assert events_of(directory, kind=STEP_EVENT) == 5
    report = python("-m", "opacus_memprof", "report", directory)
    assert report.returncode == 0, report.stderr
    assert "killed" in report.stdout
    assert "per_sample_gradients" in report.stdout
    # The lock died with the process: the next profile takes the place of this one.
    assert python(*RUN, "-o", directory, TRAIN).returncode == 0


STEP_EVENT = 4  # EventKind::step


def events_of(directory: Path, kind: int) -> int:
    """How many events of a kind a killed process has left: whole records end at the first one without a kind."""
    content = (directory / "events.bin").read_bytes()
    magic, version, width = struct.unpack_from("<8sII", content)
    assert (magic, version, width) == (b"OMEMPROF", 2, 32)
    kinds = content[4096 + 6 :: 32]
    return kinds.split(b"\0")[0].count(kind)


@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_worker_processes_leave_the_profile_alone(tmp_path: Path, context: str) -> None:
    arguments = ("--workers", "2", "--context", context)
    reference = plain(TRAIN, *arguments)
    completed = python(*RUN, "-o", tmp_path / "out", TRAIN, *arguments)
    assert completed.returncode == 0, completed.stderr
    assert losses(completed.stdout) == losses(reference.stdout)
    assert completed.stderr.count("the profile is in") == 1
    assert_reconciled(profile_of(tmp_path / "out"), tmp_path / "out")


def test_the_script_sees_what_python_shows_it(tmp_path: Path) -> None:
    script = str(SCRIPTS / "context.py")
    reference = python(script, "-o", "x", "--", "-m", cwd=tmp_path)
    completed = python(*RUN, "-o", tmp_path / "out", script, "-o", "x", "--", "-m", cwd=tmp_path)
    assert "threads 2" in reference.stdout  # set by the script, before it imports torch
    assert completed.stdout.startswith(reference.stdout)


def test_a_module_sees_what_python_shows_it(tmp_path: Path) -> None:
    reference = python("-m", "package", "-o", "x", "-m", cwd=SCRIPTS)
    completed = python(*RUN, "-o", tmp_path / "out", "-m", "package", "-o", "x", "-m", cwd=SCRIPTS)
    assert "name __main__ package" in reference.stdout
    assert completed.stdout.startswith(reference.stdout)


def test_a_script_without_opacus(tmp_path: Path) -> None:
    script = str(SCRIPTS / "plain.py")
    completed = python(*RUN, "-o", tmp_path / "out", script)
    assert completed.returncode == 0, completed.stderr
    assert len(losses(completed.stdout)) == 3
    assert completed.stdout.startswith(plain(script).stdout)
    profile = profile_of(tmp_path / "out")
    assert_reconciled(profile, tmp_path / "out")
    assert not profile["warnings"]
    model, critic = (64 * 32 + 32 + 32 * 8 + 8) * 4, (8 * 16 + 16 + 16 + 1) * 4
    end = profile["devices"]["cpu"]["snapshots"][-1]["categories"]
    assert end["model_parameters"] == model + critic
    assert end["optimizer_states"] == model + 2 * critic + 4 * 4  # momentum, and Adam's with a count for each parameter
    assert 0 <= end["unattributed"] - 2 * model < 64  # the copy and its gradients, for nobody trains it
    modules = profile["devices"]["cpu"]["peak"]["modules"]
    assert modules["0"]["model_parameters"] == (64 * 32 + 32) * 4
    assert modules["Sequential#2.2"]["model_parameters"] == (16 + 1) * 4


def test_unusual_training_without_opacus(tmp_path: Path) -> None:
    script = str(SCRIPTS / "plain_unusual.py")
    completed = python(*RUN, "-o", tmp_path / "out", script)
    assert completed.returncode == 0, completed.stderr
    assert completed.stdout.startswith(plain(script).stdout)
    assert ".grad attribute" not in completed.stderr
    profile = profile_of(tmp_path / "out")
    assert not profile["warnings"]
    kept = 2 * (64 * 32 + 32 + 32 * 8 + 8) * 4  # what the script still has: two models that Adam trains
    end = profile["devices"]["cpu"]["snapshots"][-1]["categories"]
    assert end["model_parameters"] == kept
    assert end["optimizer_states"] == 2 * kept + 2 * 4 * 4
    assert end.get("unattributed", 0) < 64


@pytest.mark.parametrize(
    ("mode", "order"), [("hooks", "before"), ("hooks", "after"), ("unwrapped", "before"), ("ghost", "after")]
)
def test_a_script_that_is_private_without_an_engine(tmp_path: Path, mode: str, order: str) -> None:
    script = str(SCRIPTS / "private_by_hand.py")
    completed = python(*RUN, "-o", tmp_path / "out", script, mode, order)
    assert completed.returncode == 0, completed.stderr
    assert completed.stdout.startswith(plain(script, mode, order).stdout)
    profile = profile_of(tmp_path / "out")
    assert_reconciled(profile, tmp_path / "out")
    assert not profile["warnings"]
    batch, parameters = 16, 64 * 32 + 32 + 32 * 8 + 8
    device = profile["devices"]["cpu"]
    for categories in (device["phases"]["noise"]["categories"], device["steps"][-1]["categories"]):
        assert categories["optimizer_states"] == 2 * parameters * 4 + 4 * 4
        assert categories["summed_gradients"] == parameters * 4
        assert categories.get("per_sample_gradients", 0) == (0 if mode == "ghost" else batch * parameters * 4)
        assert categories.get("norm_samples", 0) == (batch * 4 * 4 if mode == "ghost" else 0)
        assert "unattributed" not in categories


def test_what_privacy_costs_a_script(tmp_path: Path) -> None:
    """Of the same training with Opacus and without: what both have alike is not in the difference."""
    for name in ("hooks", "vanilla"):
        completed = python(*RUN, "-o", tmp_path / name, TRAIN, "--mode", name)
        assert completed.returncode == 0, completed.stderr
    completed = python("-m", "opacus_memprof", "tax", tmp_path / "hooks", tmp_path / "vanilla")
    assert completed.returncode == 0, completed.stderr
    assert "per_sample_gradients" in completed.stdout
    for category in ("model_parameters", "optimizer_states", "unattributed", "activation_hooks "):
        assert category not in completed.stdout


def test_a_script_that_trains_nothing(tmp_path: Path) -> None:
    script = tmp_path / "nothing.py"
    script.write_text("import torch\nprint(torch.nn.Linear(4, 4)(torch.ones(2, 4)).shape)\n")
    completed = python(*RUN, "-o", tmp_path / "out", script)
    assert completed.returncode == 0, completed.stderr
    assert "no PrivacyEngine" in completed.stdout


def test_a_script_without_torch(tmp_path: Path) -> None:
    (tmp_path / "hello.py").write_text("print('hello')\n")
    completed = python(*RUN, "-o", tmp_path / "out", tmp_path / "hello.py")
    assert (completed.returncode, completed.stdout) == (0, "hello\n")
    assert "did not import torch" in completed.stderr
    assert not (tmp_path / "out").exists()


def test_a_run_that_is_longer_than_the_bound_keeps_its_peak_and_its_end(tmp_path: Path) -> None:
    completed = python(*RUN, "-o", tmp_path / "out", "--max-events", "50", TRAIN, "--steps", "12")
    assert completed.returncode == 0
    assert losses(completed.stdout) == losses(plain(TRAIN, "--steps", "12").stdout)
    whole = python(*RUN, "-o", tmp_path / "whole", TRAIN, "--steps", "12")
    assert whole.returncode == 0
    bounded, unbounded = profile_of(tmp_path / "out"), profile_of(tmp_path / "whole")
    assert unbounded["events"]["gaps"] == []
    gaps = bounded["events"]["gaps"]
    assert gaps
    assert bounded["events"]["dropped"] == sum(gap["events"] for gap in gaps) > 0
    assert bounded["events"]["recorded"] + bounded["events"]["dropped"] == unbounded["events"]["recorded"]
    assert "are not in the event files" in " ".join(bounded["warnings"])
    one, other = (profile["devices"]["cpu"] for profile in (bounded, unbounded))
    for key in ("requested_bytes", "source", "step", "phase", "categories", "modules", "ops", "born_in", "event"):
        assert one["peak"][key] == other["peak"][key], key
    steps = {step["step"]: step for step in other["steps"]}
    assert one["steps"][-1]["step"] == other["steps"][-1]["step"]
    for step in one["steps"]:
        for key in ("peak_bytes", "end_bytes", "categories", "phase", "event") if step["complete"] else ():
            assert step[key] == steps[step["step"]][key], key
    assert one["end_bytes"] == other["end_bytes"]


def test_a_reader_that_has_seen_enough(tmp_path: Path) -> None:
    command = f"{sys.executable} {' '.join(RUN)} -o {tmp_path / 'out'} {TRAIN} --end wait_a_little | head -n 3"
    shell = ["bash", "-c", f"{command}; echo ${{PIPESTATUS[0]}}"]
    completed = subprocess.run(shell, capture_output=True, text=True, timeout=120, env=ENVIRONMENT)
    assert completed.stdout.splitlines()[-1] == "0"
    assert completed.stderr == f"opacus-memprof: the profile is in {tmp_path / 'out'}\n"
    assert profile_of(tmp_path / "out")["exit_code"] == 0


# --- bad input: one sentence, exit code 2, nothing lost ---


def assert_refused(completed: Completed, sentence: str) -> None:
    assert completed.returncode == 2
    assert "Traceback" not in completed.stderr
    assert sentence in " ".join(completed.stderr.split())
    assert losses(completed.stdout) == []


def test_no_such_script(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    refused = python(*RUN, "-o", tmp_path / "out", tmp_path / "train.py")
    assert_refused(refused, "train.py does not exist")
    assert list((tmp_path / "out").iterdir()) == []
    assert_refused(python(*RUN, "-m", "no_such_module", cwd=tmp_path), "there is no module no_such_module")


def test_an_unknown_device(tmp_path: Path) -> None:
    refused = python("-m", "opacus_memprof", "run", "--device", "tpu", "-o", tmp_path / "out", TRAIN)
    assert_refused(refused, "tpu")
    assert not (tmp_path / "out").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_a_device_that_is_not_there(tmp_path: Path) -> None:
    refused = python("-m", "opacus_memprof", "run", "--device", "cuda", "-o", tmp_path / "out", TRAIN)
    assert_refused(refused, "no CUDA device")
    assert len(refused.stderr.splitlines()) == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("place", ["file", "file/below", "/proc/memprof"])
def test_a_directory_that_cannot_be_written(tmp_path: Path, place: str) -> None:
    (tmp_path / "file").write_text("mine")
    assert_refused(python(*RUN, "-o", tmp_path / place, TRAIN), "cannot write a profile to")
    assert (tmp_path / "file").read_text() == "mine"


def test_a_directory_of_other_files(tmp_path: Path) -> None:
    (tmp_path / "meta.json").write_text("mine")
    assert_refused(python(*RUN, "-o", tmp_path, TRAIN), "files that are not a profile")
    assert [path.name for path in tmp_path.iterdir()] == ["meta.json"]
    assert (tmp_path / "meta.json").read_text() == "mine"


def test_a_directory_that_is_being_written(tmp_path: Path, start: Start) -> None:
    directory = tmp_path / "out"
    process = start(*RUN, "-o", directory, TRAIN, "--end", "wait")
    assert_refused(python(*RUN, "-o", directory, TRAIN), f"another profiler (process {process.pid})")
    process.terminate()
    process.wait(timeout=60)
    assert profile_of(directory)["status"] == "killed"
    assert_reconciled(profile_of(directory), directory)


def test_two_profilers_in_one_process(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(f"import opacus_memprof, torch\nwith opacus_memprof.profile({str(tmp_path / 'in')!r}): pass\n")
    completed = python(*RUN, "-o", tmp_path / "out", script)
    assert completed.returncode == 1
    assert "one session at a time" in completed.stderr
    assert not (tmp_path / "in").exists()
    assert profile_of(tmp_path / "out")["status"] == "failed"


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    mounted = []

    def mount(size: str) -> Path:
        disk = tmp_path / "disk"
        disk.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(disk)]
        if subprocess.run(command, capture_output=True).returncode:
            pytest.skip("mounting a small tmpfs takes root")
        mounted.append(disk)
        return disk

    yield mount
    for disk in mounted:
        subprocess.run(["umount", "-l", str(disk)], check=True)


def test_a_disk_without_room_is_said_before(small_disk: Callable[[str], Path]) -> None:
    disk = small_disk("1m")
    assert_refused(python(*RUN, "-o", disk / "out", TRAIN), "MiB left")
    assert list(disk.iterdir()) == []


def test_a_small_disk_bounds_the_event_files(tmp_path: Path, small_disk: Callable[[str], Path]) -> None:
    disk = small_disk("8m")
    script = tmp_path / "script.py"
    loop = "for i in range(300_000):\n    torch.empty(1_000_000 if i == 150_000 else 10)\n"
    script.write_text(f"import torch\n{loop}print('done')\n")
    completed = python(*RUN, "-o", disk / "out", script)
    assert completed.returncode == 0
    assert completed.stdout.startswith("done\n")
    profile = profile_of(disk / "out")
    assert 100_000 < profile["events"]["recorded"] < 2**18
    assert profile["events"]["dropped"] > 300_000
    peak = profile["devices"]["cpu"]["peak"]
    assert (peak["source"], peak["requested_bytes"]) == ("events", 4_000_000)
    assert not any("lost" in warning for warning in profile["warnings"])


def test_a_profile_that_cannot_be_written(tmp_path: Path, start: Start) -> None:
    process = start(*RUN, "-o", tmp_path / "out", TRAIN, "--steps", "20", "--end", "exit_3", last=0)
    (tmp_path / "out" / "profile.json").mkdir()
    output, errors = read_rest(process)
    assert process.wait(timeout=60) == 3
    assert losses(output) == losses(plain(TRAIN, "--steps", "20").stdout)[1:]
    assert "the profile could not be written" in errors
    assert "Traceback" not in errors


ATTACHING = """
import torch
from torch import nn
from opacus_memprof import session

model, other = nn.Sequential(nn.Linear(8, 4)), nn.Linear(3, 3)
session.current().attach(other)
from opacus import PrivacyEngine
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(6, 8)), batch_size=3)
model, optimizer, data = PrivacyEngine().make_private(
    module=model, optimizer=optimizer, data_loader=data, noise_multiplier=1.0, max_grad_norm=1.0, poisson_sampling=False
)
for (x,) in data:
    optimizer.zero_grad()
    model(x).sum().backward()
    optimizer.step()
"""


def test_a_script_that_attaches_before_it_imports_opacus(tmp_path: Path) -> None:
    """`run` follows PrivacyEngine as soon as Opacus is imported, which is then in the middle of `attach`."""
    (tmp_path / "script.py").write_text(ATTACHING)
    completed = python(*RUN, "-o", tmp_path / "out", tmp_path / "script.py")
    assert completed.returncode == 0, completed.stderr
    profile = profile_of(tmp_path / "out")
    assert not profile["warnings"]
    assert profile["devices"]["cpu"]["peak"]["modules"]["0"]["per_sample_gradients"] > 0
