# SPDX-License-Identifier: Apache-2.0
"""Who may write a profile's directory, and what is replaced in it."""

import errno
import fcntl
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import opacus_memprof
from opacus_memprof.errors import MemprofError
from opacus_memprof.profiles.directory import ProfileDirectory

META = b'{\n "clock": {\n  "unit": "ticks"\n }\n}'
SUMMARY = b'{"format":1,"versions":{"torch":"2.15.0"}}'
PROFILE = {"events.bin": b"OMEMPROF...", "meta.json": b"{}", "snapshots.jsonl": b"", "profile.json": b"{}"}


def content(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir() if path.name != ".lock"}


def write(directory: Path, files: dict[str, bytes]) -> None:
    directory.mkdir(exist_ok=True)
    for name, data in files.items():
        (directory / name).write_bytes(data)


def test_a_directory_that_was_made_for_nothing_goes_again(tmp_path: Path) -> None:
    claimed = ProfileDirectory(tmp_path / "out")
    assert (tmp_path / "out").is_dir()
    claimed.release()
    claimed.release()
    assert not (tmp_path / "out").exists()


def test_an_empty_directory_stays(tmp_path: Path) -> None:
    ProfileDirectory(tmp_path).release()
    assert list(tmp_path.iterdir()) == []


def test_an_earlier_profile_stays_until_it_is_cleared(tmp_path: Path) -> None:
    mine = {"notes.txt": b"mine"}
    write(tmp_path, PROFILE | mine)
    claimed = ProfileDirectory(tmp_path)
    assert content(tmp_path) == PROFILE | mine
    claimed.clear()
    assert content(tmp_path) == mine
    claimed.release()


def test_reports_outlive_their_profile(tmp_path: Path) -> None:
    reports = {"memprof.html": b"<", "memprof-cuda0-dark.png": b"P"}
    write(tmp_path, PROFILE | reports)
    for _ in range(2):
        claimed = ProfileDirectory(tmp_path)
        claimed.clear()
        claimed.release()
    assert content(tmp_path) == reports


def test_the_next_profiler_accepts_what_a_killed_one_leaves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At every moment between the claim of an earlier profile's directory and the first events of its own."""

    class KilledError(Exception):
        pass

    def remove(file: Path, missing_ok: bool = False) -> None:
        nonlocal left
        if left == 0:
            raise KilledError
        left -= 1
        os.unlink(file)

    earlier = dict.fromkeys(("events.1.bin", "oom_report.txt", "snapshots.jsonl", "meta.json.tmp"), b"")
    earlier |= {"events.bin": b"OMEMPROF...", "meta.json": META, "profile.json": SUMMARY}
    for without in ((), ("profile.json",), ("events.bin", "meta.json")):
        for moment in range(len(earlier) - len(without)):
            directory = tmp_path / f"{len(without)}_{moment}"
            write(directory, {name: data for name, data in earlier.items() if name not in without})
            killed = ProfileDirectory(directory)
            left = moment
            with monkeypatch.context() as patch:
                patch.setattr(Path, "unlink", remove)
                with pytest.raises(KilledError):
                    killed.clear()
            killed.release()
            following = ProfileDirectory(directory)
            following.clear()
            assert content(directory) == {}
            following.release()
    for name, whole in (("meta.json.tmp", META), ("meta.json", META), ("events.bin", b"OMEMPROF")):
        for size in (0, 3, len(whole)):
            directory = tmp_path / f"{name}_{size}"
            write(directory, {name: whole[:size]})
            ProfileDirectory(directory).release()


def test_a_session_s_files_are_known_one_by_one(tmp_path: Path) -> None:
    with opacus_memprof.profile(tmp_path / "whole", device="cpu"):
        begun = content(tmp_path / "whole")
    finished = content(tmp_path / "whole")
    for name, data in [(name, begun[name]) for name in ("events.bin", "meta.json")] + [*finished.items()]:
        if name == "snapshots.jsonl":  # never alone
            continue
        write(tmp_path / "part", {name: data})
        claimed = ProfileDirectory(tmp_path / "part")
        claimed.clear()
        claimed.release()


@pytest.mark.parametrize("files", [{"train.py": b""}, {"profile.json": b"{}"}, {"events.bin": b"other"}])
def test_other_files_are_left_alone(tmp_path: Path, files: dict[str, bytes]) -> None:
    write(tmp_path, files)
    with pytest.raises(MemprofError, match="not a profile"):
        ProfileDirectory(tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == files


def test_one_writer_at_a_time(tmp_path: Path) -> None:
    first = ProfileDirectory(tmp_path)
    with pytest.raises(MemprofError, match=rf"another profiler \(process {os.getpid()}\)"):
        ProfileDirectory(tmp_path)
    first.release()
    second = ProfileDirectory(tmp_path)
    second.release()


def test_a_forked_child_neither_keeps_nor_ends_the_claim(tmp_path: Path) -> None:
    claimed = ProfileDirectory(tmp_path)
    if os.fork() == 0:
        claimed.release()
        os._exit(0)
    os.wait()
    with pytest.raises(MemprofError, match="another profiler"):
        ProfileDirectory(tmp_path)
    claimed.release()


def test_the_claim_of_a_killed_process_ends_with_it(tmp_path: Path) -> None:
    program = (
        "import os, sys; from opacus_memprof.profiles.directory import ProfileDirectory\n"
        "kept = ProfileDirectory(sys.argv[1]); print(flush=True); os.kill(os.getpid(), 9)"
    )
    killed = subprocess.run([sys.executable, "-c", program, tmp_path], capture_output=True, timeout=60)
    assert killed.returncode == -9
    assert (tmp_path / ".lock").exists()
    ProfileDirectory(tmp_path).release()
    assert list(tmp_path.iterdir()) == []


def test_a_lock_on_a_file_that_was_removed_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Another process removes its lock file between our open and our flock.
    real = fcntl.flock
    removals = [tmp_path / ".lock"]

    def flock(descriptor: int, operation: int) -> None:
        if removals:
            removals.pop().unlink()
        real(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", flock)
    claimed = ProfileDirectory(tmp_path)
    with pytest.raises(MemprofError, match="another profiler"):
        ProfileDirectory(tmp_path)
    claimed.release()


def test_a_file_system_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", flock)
    ProfileDirectory(tmp_path / "out").release()
    assert not (tmp_path / "out").exists()


def test_room_counts_what_will_be_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def usage(path: Any) -> Any:
        return shutil._ntuple_diskusage(10**9, 10**9 - 2**20, 2**20)

    monkeypatch.setattr(shutil, "disk_usage", usage)
    with pytest.raises(MemprofError, match=r"has 1\.0 MiB left"):
        ProfileDirectory(tmp_path / "out")
    assert not (tmp_path / "out").exists()
    write(tmp_path / "out", PROFILE | {"events.bin": b"OMEMPROF" + bytes(4 * 2**20)})
    ProfileDirectory(tmp_path / "out").release()
