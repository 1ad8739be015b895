# SPDX-License-Identifier: Apache-2.0
"""Profiles are read without torch: by every command that looks at them, also profiles that an earlier version wrote."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

DATA = Path(__file__).parents[1] / "data"

# Runs the command line where torch, Opacus and matplotlib cannot be imported, and reports what the process took.
WITHOUT_TORCH = """
import sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "opacus", "matplotlib"):
            raise ImportError(f"{name} is not installed")

sys.meta_path.insert(0, Refuse())
from opacus_memprof.cli import main

try:
    main()
finally:
    status = open("/proc/self/status").read()  # getrusage would count what the parent took before
    print("peak", status.partition("VmHWM:")[2].split()[0], file=sys.stderr)
"""
MOST_KIB = 120 * 1024


def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    ran = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, *map(str, arguments)],
        capture_output=True,
        text=True,
        env=os.environ | {"COLUMNS": "100"},
    )
    assert "Traceback" not in ran.stderr, ran.stderr
    return ran


def peak_kib(ran: subprocess.CompletedProcess[str]) -> int:
    return int(ran.stderr.rpartition("peak ")[2])


@pytest.fixture(params=["hooks", "ghost", "oom"])
def directory(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A profile that version 0.1.0 wrote in format 1."""
    return Path(shutil.copytree(DATA / f"format_1_{request.param}", tmp_path / "profile"))


def test_a_profile_of_an_earlier_version_is_reported_without_torch(directory: Path) -> None:
    ran = run("report", directory, "--full")
    assert ran.returncode == 0, ran.stderr
    written = json.loads((directory / "profile.json").read_text())
    peak = written["devices"]["cpu"]["peak"]
    assert f"{peak['requested_bytes'] / 1024:.2f} KiB" in ran.stdout
    assert peak_kib(ran) < MOST_KIB


def test_without_its_summary_it_is_replayed_to_the_same_figures(directory: Path) -> None:
    written = json.loads((directory / "profile.json").read_text())
    (directory / "profile.json").unlink()
    ran = run("report", directory, "--json")
    assert ran.returncode == 0, ran.stderr
    replayed = json.loads((directory / "memprof.json").read_text())
    for key in ("requested_bytes", "categories", "phase", "step", "modules"):
        assert replayed["devices"]["cpu"]["peak"][key] == written["devices"]["cpu"]["peak"][key]
    assert replayed["status"] == "killed"


@pytest.mark.parametrize(
    "arguments",
    [
        ("report", "A", "--html", "--csv", "--latex", "--memory-viz"),
        ("diff", "A", "B"),
        ("diff", "A", "B", "--markdown"),
        ("top", "A", "--once", "--json"),
    ],
)
def test_every_way_to_look_at_a_profile_needs_no_torch(arguments: tuple[str, ...], tmp_path: Path) -> None:
    places = {"A": tmp_path / "A", "B": tmp_path / "B"}
    for name, mode in (("A", "hooks"), ("B", "ghost")):
        shutil.copytree(DATA / f"format_1_{mode}", places[name])
    ran = run(*(places.get(word, word) for word in arguments))
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert peak_kib(ran) < MOST_KIB


def test_a_picture_says_what_it_lacks(tmp_path: Path) -> None:
    shutil.copytree(DATA / "format_1_hooks", tmp_path / "A")
    ran = run("report", tmp_path / "A", "--png")
    assert ran.returncode == 2
    assert "pictures need matplotlib" in ran.stderr
    assert "pip install matplotlib" in ran.stderr


def test_recording_without_torch_says_what_to_install(tmp_path: Path) -> None:
    script = "import sys; sys.modules['torch'] = None\nimport opacus_memprof\nopacus_memprof.profile('x').__enter__()"
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=tmp_path)
    assert ran.returncode == 1
    assert ran.stderr.splitlines()[-1].startswith("ImportError: opacus-memprof records what torch allocates")
