# SPDX-License-Identifier: Apache-2.0
"""`opacus-memprof report` and the files that it writes."""

import csv
import json
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from event_files import EventFile
from made_profiles import a_live_peak
from matplotlib.figure import Figure
from matplotlib.image import imread
from random_profile import Oracle, write_random_profile
from typer.testing import CliRunner

from opacus_memprof.analysis.profile import build_profile, load_profile, write_profile
from opacus_memprof.analysis.profile_view import view_profile
from opacus_memprof.cli import app
from opacus_memprof.cli.look import _SUFFIXES
from opacus_memprof.errors import MemprofError
from opacus_memprof.reports import picture
from opacus_memprof.reports.export import FORMATS
from opacus_memprof.reports.figures import THEMES
from opacus_memprof.reports.picture import write_pictures
from opacus_memprof.reports.tables import write_csv, write_latex

OWN = {"events.bin", "meta.json", "profile.json"}


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    (tmp_path / "profile").mkdir()
    return write_random_profile(tmp_path / "profile", 300)


def report(*arguments: object) -> Any:
    return CliRunner().invoke(app, ["report", *map(str, arguments)])


def contents(directory: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in directory.iterdir()}


def test_each_option_writes_a_file_into_the_directory(directory: Path) -> None:
    before = contents(directory)
    result = report(directory, *_SUFFIXES)
    assert result.exit_code == 0, result.output
    after = contents(directory)
    names = {f"memprof{format.suffixes[0]}" for format in FORMATS.values()}
    assert after.keys() - before.keys() == names - {"memprof.png"} | {
        *("memprof-cuda0.png", "memprof-cuda0-dark.png", "memprof-cuda1.png", "memprof-cuda1-dark.png")
    }
    assert {name: after[name] for name in before} == before
    for name in after.keys() - before.keys():
        assert f"wrote {directory / name}" in result.output.splitlines()
    assert json.loads(after["memprof.json"]) == load_profile(directory)
    assert report(directory, *_SUFFIXES).exit_code == 0  # again, over its own files


def test_a_file_after_an_option_is_that_option_s(directory: Path, tmp_path: Path) -> None:
    out = tmp_path / "new" / "folder"
    assert report("--csv", directory, "--latex", out / "t.tex", f"--json={out / 'p.json'}").exit_code == 0
    assert {file.name for file in out.iterdir()} == {"t.tex", "p.json"}
    assert contents(directory).keys() == OWN | {"memprof.csv"}
    assert report("--memory_viz", out / "a.pkl", directory).exit_code == 0
    assert (out / "a.pkl").exists()


def test_the_command_line_knows_the_suffixes() -> None:
    assert {f"--{name.replace('_', '-')}": format.suffixes for name, format in FORMATS.items()} == _SUFFIXES


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--png=a.gif"], "a.gif is not a name for png: end it with .png"),
        (["--json=profile/profile.json"], "is a file of the profile itself"),
        (["--html=profile/oom_report.html"], "is a file of the profile itself"),
        (["--csv=taken.csv"], "is a directory"),
        (["--html=file/a.html"], "cannot write file/a.html"),
        (["--vanilla=profile"], "--vanilla is for the page"),
    ],
)
def test_what_is_refused(directory: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], sentence: str) -> None:
    monkeypatch.chdir(directory.parent)
    Path("taken.csv").mkdir()
    Path("file").write_text("mine")
    result = report("profile", *arguments)
    assert isinstance(result.exception, MemprofError)
    assert sentence in str(result.exception)
    assert "\n" not in str(result.exception)
    assert contents(directory).keys() == OWN
    assert Path("file").read_text() == "mine"


@pytest.mark.parametrize(
    ("option", "module", "command"),
    [
        ("--perfetto", "perfetto", "pip install perfetto"),
        ("--parquet", "pyarrow", "pip install pyarrow"),
        ("--png", "matplotlib", "pip install matplotlib"),
    ],
)
def test_a_missing_package_is_named_before_anything_is_written(
    directory: Path, monkeypatch: pytest.MonkeyPatch, option: str, module: str, command: str
) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == module]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, module, None)
    result = report(directory, "--csv", option)
    assert isinstance(result.exception, MemprofError)
    assert str(result.exception).endswith(command)
    assert contents(directory).keys() == OWN


def test_events_that_cannot_be_read_leave_the_old_file(directory: Path) -> None:
    assert report(directory, "--parquet").exit_code == 0
    before = contents(directory) | {"events.bin": b"somebody else's"}
    (directory / "events.bin").write_bytes(before["events.bin"])
    for option in ("--parquet", "--perfetto", "--memory-viz"):
        result = report(directory, option)
        assert isinstance(result.exception, MemprofError)
        assert "\n" not in str(result.exception)
    assert contents(directory) == before


def test_csv_adds_up_to_the_events(directory: Path, tmp_path: Path) -> None:
    profile = load_profile(directory)
    write_csv(view_profile(profile), tmp_path / "a.csv")
    with open(tmp_path / "a.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    for number, device in ((1, "cuda:0"), (2, "cuda:1")):
        oracle = Oracle(directory, number)
        sums: dict[tuple[str, str], int] = defaultdict(int)
        for row in (row for row in rows if row["device"] == device):
            sums[row["table"], row["name"] if row["table"] in ("phase", "step") else ""] += int(row["bytes"])
        for table in ("peak", "module", "component"):
            assert sums[table, ""] == oracle.total.max(), table
        began = oracle.blocks.argmax()
        steps = oracle.events["step"].astype(int) - (oracle.events["kind"] == 4)  # the event ends its step
        for step in range(3):
            inside = [int(oracle.total[i]) for i in range(began, len(steps)) if steps[i] == step]
            assert sums["step", str(step)] == max(inside), step
        by_category = {
            row["category"]: int(row["bytes"]) for row in rows if (row["device"], row["table"]) == (device, "peak")
        }
        assert by_category == oracle.settled_at(int(oracle.total.argmax()))


def test_latex_tables_are_whole_and_escaped(tmp_path: Path) -> None:
    file = EventFile().add("alloc", 0x1000, 2048, "teacher_&_100%", module=r"a_b.$x^2~{y}\z#<>")
    write_latex(view_profile(build_profile(file.write(tmp_path), status="finished", exit_code=0)), tmp_path / "a.tex")
    text = (tmp_path / "a.tex").read_text()
    assert r"teacher\_\&\_100\% & 2.00 KiB & 100.0\% \\" in text.splitlines()
    assert r"a\_b.\$x\textasciicircum{}2\textasciitilde{}\{y\}\textbackslash{}z\#\textless{}\textgreater{}" in text
    for environment in ("table", "tabular"):
        assert text.count(rf"\begin{{{environment}}}") == text.count(rf"\end{{{environment}}}") == 3
    for rule in ("top", "mid", "bottom"):
        assert text.count(rf"\{rule}rule") == 3
    assert text.count(r"\begin{tabular}{lrr}") == 3
    rows = [line for line in text.splitlines() if line.endswith(r"\\")]
    assert {line.replace(r"\&", "").count("&") for line in rows} == {2}


def test_bars_of_categories_have_the_names_of_the_legend(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[list[str]] = []
    monkeypatch.setattr(picture, "stacked_bars", lambda axes, names, rows: drawn.append(names))
    write_pictures(view_profile(load_profile(directory)), tmp_path / "a.png")
    assert "model parameters" in drawn[0]
    assert not any("_" in name for name in drawn[0])


def test_pictures_of_every_device_in_both_themes(directory: Path, tmp_path: Path) -> None:
    files = write_pictures(view_profile(load_profile(directory)), tmp_path / "a.png")
    assert [file.name for file in files] == ["a-cuda0.png", "a-cuda0-dark.png", "a-cuda1.png", "a-cuda1-dark.png"]
    light, dark = (imread(file)[..., :3].mean() for file in files[:2])
    assert light > 0.7 > 0.4 > dark


@pytest.mark.parametrize(
    "keys",
    [
        ("status",),
        ("pid",),
        ("ended_unix_ns",),
        ("events",),
        ("events", "recorded"),
        ("devices", "cuda:0", "end_bytes"),
        ("devices", "cuda:0", "steps_left_out"),
        ("devices", "cuda:0", "peak", "step"),
        ("devices", "cuda:0", "phases", "forward", "peak_bytes"),
        ("devices", "cuda:0", "phases", "forward", "categories"),
    ],
)
def test_a_profile_that_lacks_fields_is_refused(directory: Path, keys: tuple[str, ...]) -> None:
    profile = part = json.loads((directory / "profile.json").read_text())
    for key in keys[:-1]:
        part = part[key]
    del part[keys[-1]]
    (directory / "profile.json").write_text(json.dumps(profile))
    for command in (["report", directory, "--html", "--perfetto"], ["diff", directory, directory]):
        error = CliRunner().invoke(app, [*map(str, command)]).exception
        assert isinstance(error, MemprofError)
        assert f"is not the profiler's, because it lacks {'.'.join(keys)}: profile again" in str(error)


def test_phases_are_those_of_all_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """More rows than the picture has dots, and what is highest is never in the second phase."""
    strips: list[set[str]] = []
    monkeypatch.setattr(picture, "phase_strip", lambda axes, events, phases, *rest: strips.append(set(phases)))
    file = EventFile()
    for _ in range(800):
        file.add("alloc", 64, 1000, "gradients", phase="backward").add("free", 64, 1000, "gradients", phase="noise")
    profile = build_profile(file.write(tmp_path), status="finished", exit_code=0)
    write_pictures(view_profile(profile), tmp_path / "a.png")
    assert strips == [{"backward", "noise"}] * 2


def test_a_failure_at_the_peak_leaves_both_labels_readable(tmp_path: Path) -> None:
    file = EventFile()
    for number in range(9):
        file.add("alloc", 64 + 1024 * number, 1000, "gradients")
    file.add("oom", size=2**40, category="noise", phase="clip")
    device = build_profile(file.write(tmp_path), status="failed", exit_code=1)["devices"]["cuda:0"]
    figure = Figure(figsize=(13, 4))
    axes = figure.subplots()
    picture._draw_timeline(axes, device, picture._visible_timeline(device["timeline"], (), 1000), (), THEMES["light"])
    figure.draw_without_rendering()
    texts = [text for text in axes.texts if text.get_text().startswith(("peak: ", "out of memory: "))]
    (peak, failure), within = [text.get_window_extent() for text in texts], axes.get_window_extent()
    assert not peak.overlaps(failure)
    assert failure.y1 <= within.y1  # above are the title and the legend


def test_a_peak_after_the_event_file_was_full(tmp_path: Path) -> None:
    """It has neither an event nor modules; the second device has no event at all."""
    file = EventFile(dropped=10).add("alloc", 64, 1000, "gradients", module="fc", phase="forward")
    sizes = {"gradients": 1000, "noise": 3999, "inputs": 1, "buffers": 0}
    when = {"step": 3, "phase": "clip", "unix_ns": 1_700_000_000_000_000_500}
    live = a_live_peak(requested_bytes=5000, categories=sizes, **when)
    peaks = {"cuda:0": live, "cuda:1": live}
    write_profile(build_profile(file.write(tmp_path), status="failed", exit_code=1, peaks=peaks), tmp_path)
    result = report(tmp_path, *_SUFFIXES)
    assert result.exit_code == 0, result.exception
    with open(tmp_path / "memprof.csv", newline="") as csv_file:
        rows = [row for row in csv.DictReader(csv_file) if row["table"] == "peak"]
    assert [(row["device"], row["phase"], row["category"], row["bytes"]) for row in rows] == [
        (device, "clip", category, size)
        for device in ("cuda:0", "cuda:1")
        for category, size in (("gradients", "1000"), ("noise", "3999"), ("inputs", "1"))
    ]


def test_a_profile_without_memory(tmp_path: Path) -> None:
    write_profile(build_profile(EventFile().write(tmp_path), status="finished", exit_code=0), tmp_path)
    result = report(tmp_path, *_SUFFIXES)
    assert result.exit_code == 0, result.exception
    assert (tmp_path / "memprof.csv").read_text().splitlines() == ["device,table,name,step,phase,category,bytes"]
    assert {"memprof.png", "memprof-dark.png"} <= contents(tmp_path).keys()
