# SPDX-License-Identifier: Apache-2.0
"""What changed between two profiles, worked out by hand."""

import io
from pathlib import Path
from typing import Any

import pytest
from event_files import EventFile
from rich.console import Console
from typer.testing import CliRunner

from opacus_memprof.analysis.diff import GrowthLimit, diff_profiles, exceeded_limits
from opacus_memprof.analysis.profile import build_profile, write_profile
from opacus_memprof.cli import app
from opacus_memprof.errors import MemprofError
from opacus_memprof.profiles.difference import Diff
from opacus_memprof.profiles.profile import Profile, ReservedPeak
from opacus_memprof.reports.diff import diff_markdown, print_diff

KIB = 1024


def old_file(device: int = 1) -> EventFile:
    """Peak 100 KiB in clip: 60 of parameters of fc, 40 of noise of head; 90 in backward, of which 30 are gradients."""
    file = EventFile()
    file.add("alloc", 0x1000, 60 * KIB, "model_parameters", device=device, module="fc", phase="setup")
    file.add("alloc", 0x2000, 30 * KIB, "gradients", device=device, module="fc", phase="backward")
    file.add("free", 0x2000, 30 * KIB, "gradients", device=device, module="fc", phase="clip")
    return file.add("alloc", 0x3000, 40 * KIB, "noise", device=device, module="head", phase="clip")


def new_file() -> EventFile:
    """Peak 125 KiB in noise: 60 of parameters, 25 of noise of head, 40 of per-sample gradients of fc."""
    file = EventFile()
    file.add("alloc", 0x1000, 60 * KIB, "model_parameters", module="fc", phase="setup")
    file.add("alloc", 0x3000, 25 * KIB, "noise", module="head", phase="clip")
    return file.add("alloc", 0x4000, 40 * KIB, "per_sample_gradients", module="fc", phase="noise")


def profile_in(directory: Path, file: EventFile, **fields: Any) -> Profile:
    directory.mkdir(exist_ok=True)
    profile = build_profile(file.write(directory), **{"status": "finished", "exit_code": 0, **fields})
    write_profile(profile, directory)
    return profile


def test_the_largest_reserved_memory(tmp_path: Path) -> None:
    profiles = [profile_in(tmp_path / name, file) for name, file in (("old", old_file()), ("new", new_file()))]
    assert "reserved" not in printed(diff_profiles(*profiles))
    for profile, size in zip(profiles, (200, 150), strict=True):
        profile.devices["cuda:0"].reserved_peak = ReservedPeak(bytes=size * KIB, step=2, phase="noise")
    sentence = "largest reserved 200.00 KiB → 150.00 KiB (-50.00 KiB, -25.0 %), in noise of step 2"
    assert sentence in printed(diff_profiles(*profiles))
    assert sentence in diff_markdown(diff_profiles(*profiles)).replace("\\", "")


def printed(diff: Diff) -> str:
    stream = io.StringIO()
    print_diff(diff, Console(file=stream, width=200))
    return stream.getvalue()


@pytest.fixture
def diff(tmp_path: Path) -> dict[str, Any]:
    return diff_profiles(profile_in(tmp_path / "old", old_file()), profile_in(tmp_path / "new", new_file()))


def test_by_category_module_and_phase(diff: dict[str, Any]) -> None:
    device = diff["devices"]["cuda:0"]
    assert device["total"] == 25 * KIB
    assert device["categories"] == {"noise": -15 * KIB, "per_sample_gradients": 40 * KIB}
    assert device["modules"] == {"head": {"noise": -15 * KIB}, "fc": {"per_sample_gradients": 40 * KIB}}
    assert (device["before"]["requested_bytes"], device["before"]["phase"]) == (100 * KIB, "clip")
    assert (device["after"]["requested_bytes"], device["after"]["phase"]) == (125 * KIB, "noise")
    assert {name: (phase["before_bytes"], phase["after_bytes"]) for name, phase in device["phases"].items()} == {
        "setup": (60 * KIB, 60 * KIB),
        "backward": (90 * KIB, None),
        "clip": (100 * KIB, 85 * KIB),
        "noise": (None, 125 * KIB),
    }
    assert device["phases"]["backward"]["categories"] == {"model_parameters": -60 * KIB, "gradients": -30 * KIB}
    assert device["phases"]["clip"]["total"] == -15 * KIB
    assert diff["notes"] == []


def test_in_print(diff: dict[str, Any]) -> None:
    console = Console(file=io.StringIO(), width=80, color_system=None)
    print_diff(diff, console, ["it grew"])
    assert isinstance(console.file, io.StringIO)
    lines = [" ".join(line.split()) for line in console.file.getvalue().splitlines()]
    headline = "cuda:0: peak 100.00 KiB → 125.00 KiB (+25.00 KiB, +25.0 %), in clip of step 0 → noise of step 0"
    assert " ".join(lines[:2]) == headline
    for line in (
        "per_sample_gradients 0 B 40.00 KiB +40.00 KiB",
        "noise 40.00 KiB 25.00 KiB -15.00 KiB",
        "fc +40.00 KiB +per_sample_gradients",
        "clip 100.00 KiB 85.00 KiB -15.00 KiB -noise",
        "backward 90.00 KiB none -90.00 KiB -model_parameters",
        "it grew",
    ):
        assert line in lines, line
    assert not any(line.startswith("setup") for line in lines)


def test_as_markdown(diff: dict[str, Any]) -> None:
    text = diff_markdown(diff, exceeded_limits(diff, GrowthLimit.parse("2%")))
    assert text.startswith("### GPU memory\n\n**the peak of cuda:0 grew by 25.00 KiB, more than 2%**\n")
    assert "| `per_sample_gradients` | 0 B | 40.00 KiB | +40.00 KiB |" in text.splitlines()
    tables = [part.splitlines() for part in text.split("\n\n") if part.startswith("|")]
    assert len(tables) == 3
    for table in tables:
        assert len({line.count("|") for line in table}) == 1
    assert text.count("<details>") == text.count("</details>") == 2


def test_what_shrank_most_stands_first(tmp_path: Path) -> None:
    grown = EventFile()
    for number in range(12):
        grown.add("alloc", 0x1000 * (number + 1), KIB, "noise", module=f"layers.{number}")
    text = diff_markdown(diff_profiles(profile_in(tmp_path / "a", old_file()), profile_in(tmp_path / "b", grown)))
    rows = text[text.index("| module |") :].splitlines()[2:]
    assert rows[0].startswith("| `fc` | -60.00 KiB |")
    assert rows[10] == "| `4 more` | +4.00 KiB |  |"


def test_names_are_shown_as_they_are_in_markdown(tmp_path: Path) -> None:
    odd = EventFile().add("alloc", 0x1000, 9, "teacher|_x_`y`", module="<b>|*_[a](b)`")
    text = diff_markdown(
        diff_profiles(profile_in(tmp_path / "a", old_file()), profile_in(tmp_path / "b", odd)),
    )
    assert "| `teacher\\|_x_'y'` | 0 B | 9 B | +9 B |" in text
    assert "| `<b>\\|*_[a](b)'` | +9 B | +teacher\\|\\_x\\_\\`y\\` |" in text


@pytest.mark.parametrize(
    ("limit", "grew"),
    [
        ("25%", False),
        ("24.9%", True),
        ("0%", True),
        ("25KiB", False),
        ("25599", True),
        ("25600", False),
        ("1GiB", False),
    ],
)
def test_limits(diff: dict[str, Any], limit: str, grew: bool) -> None:
    assert bool(exceeded_limits(diff, GrowthLimit.parse(limit))) is grew


def test_less_memory_is_within_every_limit(tmp_path: Path) -> None:
    less = diff_profiles(profile_in(tmp_path / "new", new_file()), profile_in(tmp_path / "old", old_file()))
    assert exceeded_limits(less, GrowthLimit.parse("0")) == []


@pytest.mark.parametrize("text", ["2 percent", "-1%", "%", "", "nan%", "1e3", "2%%"])
def test_what_is_no_limit_is_refused(text: str) -> None:
    with pytest.raises(MemprofError, match="is not a limit"):
        GrowthLimit.parse(text)


def test_different_devices_are_compared_and_said(tmp_path: Path) -> None:
    cpu, gpu = profile_in(tmp_path / "cpu", old_file(device=0)), profile_in(tmp_path / "gpu", new_file())
    diff = diff_profiles(cpu, gpu)
    assert diff["devices"]["cpu → cuda:0"]["total"] == 25 * KIB
    (note,) = diff["notes"]
    assert "first run was on cpu and the second on cuda:0" in note
    both = profile_in(tmp_path / "both", new_file().add("alloc", 0x1000, 1, "noise", device=2))
    assert diff_profiles(gpu, both)["notes"] == ["the second run alone used cuda:1"]
    with pytest.raises(MemprofError, match="the first run was on cpu and the second on cuda:0, cuda:1"):
        diff_profiles(cpu, both)


def test_a_run_that_failed_is_said(tmp_path: Path) -> None:
    failed = profile_in(tmp_path / "a", old_file(), status="out_of_memory", exit_code=1)
    (note,) = diff_profiles(profile_in(tmp_path / "b", old_file()), failed)["notes"]
    assert note.startswith("the second run's status is out of memory: ")


def test_the_command(tmp_path: Path, diff: dict[str, Any]) -> None:
    old, new = str(tmp_path / "old"), str(tmp_path / "new")
    run = CliRunner().invoke
    assert run(app, ["diff", old, new]).exit_code == 0
    assert run(app, ["diff", old, new, "--fail-above", "25%"]).exit_code == 0
    failed = run(app, ["diff", old, new, "--fail_above", "2%", "--markdown"])
    assert (failed.exit_code, failed.stdout) == (1, diff_markdown(diff, exceeded_limits(diff, GrowthLimit.parse("2%"))))
    same = run(app, ["diff", old, old, "--fail-above", "0"])
    assert (same.exit_code, same.stdout) == (0, "cuda:0: peak 100.00 KiB → 100.00 KiB (no change), in clip of step 0\n")


@pytest.mark.parametrize(
    "content", ["{", "[]", '{"format": 2}', '{"format": 1}', '{"format": 1, "devices": {"cuda:0": 3}}']
)
def test_a_foreign_or_truncated_file_is_one_sentence(tmp_path: Path, content: str) -> None:
    profile_in(tmp_path / "old", old_file())
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "profile.json").write_text(content)
    for arguments in (
        ["diff", str(tmp_path / "old"), str(tmp_path / "bad")],
        ["report", str(tmp_path / "bad"), "--csv"],
        ["tax", str(tmp_path / "old"), str(tmp_path / "bad")],
    ):
        result = CliRunner().invoke(app, arguments)
        assert isinstance(result.exception, MemprofError)
        assert "\n" not in str(result.exception)
    assert [file.name for file in (tmp_path / "bad").iterdir()] == ["profile.json"]
