# SPDX-License-Identifier: Apache-2.0
"""`opacus-memprof run` refuses bad input with one sentence and exit code 2, and loses nothing to a small disk."""

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from tests.integration.run_scripts import (
    RUN,
    TRAIN,
    Completed,
    Start,
    assert_reconciled,
    losses,
    plain,
    profile_of,
    python,
    read_rest,
)


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


def test_a_directory_that_is_being_written(tmp_path: Path, start_script: Start) -> None:
    directory = tmp_path / "out"
    process = start_script(*RUN, "-o", directory, TRAIN, "--end", "wait")
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


def test_a_profile_that_cannot_be_written(tmp_path: Path, start_script: Start) -> None:
    process = start_script(*RUN, "-o", tmp_path / "out", TRAIN, "--steps", "20", "--end", "exit_3", last=0)
    (tmp_path / "out" / "profile.json").mkdir()
    output, errors = read_rest(process)
    assert process.wait(timeout=60) == 3
    assert losses(output) == losses(plain(TRAIN, "--steps", "20").stdout)[1:]
    assert "the profile could not be written" in errors
    assert "Traceback" not in errors
