# SPDX-License-Identifier: Apache-2.0
"""A profile of a virtual GPU says so wherever it is shown."""

import csv
import json
import pickle
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from msgspec import UNSET
from msgspec.structs import replace
from rich.console import Console

from opacus_memprof.analysis.diff import diff_profiles, dp_tax
from opacus_memprof.analysis.job import Job
from opacus_memprof.analysis.job_view import view_job
from opacus_memprof.analysis.live import ProfileFollower
from opacus_memprof.analysis.oom import build_report
from opacus_memprof.analysis.profile import build_profile, load_profile
from opacus_memprof.analysis.profile_view import view_profile
from opacus_memprof.language import in_language, tr_sentence
from opacus_memprof.profiles.json_object import to_json
from opacus_memprof.profiles.layer_shapes import TrainingShapes
from opacus_memprof.profiles.profile import EstimatedWorkspaces, Profile, UnknownUse, VirtualGpus, virtual_mark
from opacus_memprof.reports.diff import diff_markdown, print_tax
from opacus_memprof.reports.export import FORMATS
from opacus_memprof.reports.oom import exception_note
from opacus_memprof.reports.text import live_view, print_job, print_profile
from tests.unit.event_files import EventFile

H200: dict[str, Any] = {"gpu": "h200", "name": "NVIDIA H200", "memory_bytes": 3 * 2**29, "devices": 1}
NAME = "virtual NVIDIA H200 (1.50 GiB)"


def events(directory: Path, virtual: dict[str, Any] | None) -> Path:
    """A run that was killed: no profile.json, and what meta.json had from the start."""
    directory.mkdir()
    EventFile().add("alloc", 0x1000, 4096, "model_parameters", module="fc").write(directory)
    if virtual is not None:
        meta = json.loads((directory / "meta.json").read_text())
        (directory / "meta.json").write_text(json.dumps(meta | {"virtual": virtual}))
    return directory


@pytest.fixture
def killed(tmp_path: Path) -> Path:
    return events(tmp_path / "virtual", H200)


@pytest.fixture
def real(tmp_path: Path) -> Profile:
    return load_profile(events(tmp_path / "real", None))


def printed(show: Any, *arguments: Any) -> str:
    console = Console(file=StringIO(), width=200)
    show(*arguments, console)
    return console.file.getvalue()  # type: ignore[attr-defined, no-any-return]


def test_a_killed_run_and_its_summary(killed: Path, real: Profile) -> None:
    profile = load_profile(killed)
    assert profile["status"] == "killed"
    assert profile["virtual"] == H200
    assert f"on a {NAME}: " in printed(print_profile, view_profile(profile))
    assert "virtual" not in real
    assert virtual_mark(real.virtual) is None
    assert "virtual" not in printed(print_profile, view_profile(real))


def test_estimated_workspaces_are_said_and_measured_ones_are_not(killed: Path) -> None:
    said = "(estimated workspaces of convolutions: 3, at most 5.00 MiB)"
    for convolutions in (0, 3):
        virtual = VirtualGpus(**H200, estimated_workspaces=EstimatedWorkspaces(convolutions, 5 * 2**20))
        profile = build_profile(killed, status="finished", exit_code=0, virtual=virtual)
        text = " ".join(printed(print_profile, view_profile(profile)).split())
        assert (said in text) == (convolutions > 0)
        assert json.loads(to_json(profile))["virtual"]["estimated_workspaces"]["convolutions"] == convolutions


def test_what_is_not_counted_is_said_in_the_first_sentence() -> None:
    answers = {"cufftXtMakePlanMany": 2, "cusolverDnXgeqrf_bufferSize": 1, "cusolverDnCreate": 1, "cufftSetStream": 1}
    proofs = "without the proofs of flash_clip, which may make the peak of first steps higher"
    whole = VirtualGpus(
        **H200, default_answers=answers, estimated_workspaces=EstimatedWorkspaces(1, 2**20), proofs_left_out=True
    )
    assert (
        "counted as on a real one (estimated workspaces of convolutions: 1, at most 1.00 MiB; "
        f"without workspaces of cuFFT, cuSOLVER; {proofs}), and" in str(virtual_mark(whole))
    )
    assert "cuSOLVER" not in str(virtual_mark(replace(whole, default_answers={"cusolverDnCreate": 1})))
    clean = VirtualGpus(**H200, default_answers={}, proofs_left_out=False)
    assert "counted as on a real one, and" in str(virtual_mark(clean))
    with in_language("zh"):
        said = tr_sentence(str(virtual_mark(whole)))
    assert "1 个卷积工作区是估计的，最大 1.00 MiB；不含 cuFFT, cuSOLVER 的工作区；不含 flash_clip 的证明" in said


def test_what_the_end_knows_replaces_what_the_start_knew(killed: Path) -> None:
    whole = VirtualGpus(**H200, default_answers={"cudaFoo": 3})
    assert build_profile(killed, status="finished", exit_code=0, virtual=whole).virtual == whole


def test_a_running_one(killed: Path) -> None:
    seen = ProfileFollower(killed).read()
    assert seen["virtual"] == H200
    assert f"on a {NAME}: " in printed(lambda console: console.print(live_view(seen)))


def test_files(killed: Path, real: Profile, tmp_path: Path) -> None:
    """Every format; the profile of a real GPU has the mark in none."""

    def contents(profile: Profile, folder: Path) -> dict[str, bytes]:
        folder.mkdir()
        view = view_profile(profile, killed)
        for name in set(FORMATS) - {"png", "parquet"}:
            FORMATS[name].write(view, folder / name)
        return {path.name: path.read_bytes() for path in folder.iterdir()}

    marked = contents(load_profile(killed), tmp_path / "marked")
    plain = contents(replace(load_profile(killed), virtual=UNSET), tmp_path / "plain")
    for name, content in marked.items():
        mark = NAME.encode() if name in ("html", "latex", "perfetto") else b"h200"
        assert mark in content, name
    for name, content in plain.items():
        assert b"virtual NVIDIA" not in content, name
        assert b"h200" not in content, name
    assert json.loads(marked["json"])["virtual"] == H200
    assert pickle.loads(marked["memory_viz"])["virtual_gpu"] == H200
    rows = list(csv.DictReader(StringIO(marked["csv"].decode())))
    assert rows
    assert {row["virtual_gpu"] for row in rows} == {"h200"}
    assert "virtual_gpu" not in plain["csv"].decode()


def test_the_picture_s_title(killed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    matplotlib = pytest.importorskip("matplotlib.axes")
    titles: list[str] = []
    set_title = matplotlib.Axes.set_title
    monkeypatch.setattr(
        matplotlib.Axes, "set_title", lambda axes, text, **more: titles.append(text) or set_title(axes, text, **more)
    )
    FORMATS["png"].write(view_profile(load_profile(killed), killed), tmp_path / "a.png")
    assert f"Requested memory of cuda:0, a {NAME}, event by event" in titles


def test_parquet(killed: Path, tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    FORMATS["parquet"].write(view_profile(load_profile(killed), killed), tmp_path / "events.parquet")
    metadata = parquet.read_schema(tmp_path / "events.parquet").metadata[b"opacus_memprof"]
    assert json.loads(metadata)["virtual"] == H200


def test_comparisons(killed: Path, real: Profile) -> None:
    virtual, real = replace(load_profile(killed), status="finished"), replace(real, status="finished")
    assert diff_profiles(real, real)["notes"] == []
    (note,) = diff_profiles(real, virtual)["notes"]
    assert (
        note
        == f"the first run was on a real device and the second run was on a {NAME}: they differ by more than the code"
    )
    assert diff_profiles(virtual, virtual)["notes"] == [f"both runs were on a {NAME}"]
    smaller = replace(virtual, virtual=replace(virtual.virtual, memory_bytes=2**30))
    (other,) = diff_profiles(virtual, smaller)["notes"]
    assert other.startswith(f"the first run was on a {NAME} and the second run was on a virtual NVIDIA H200 (1.00 GiB)")
    assert NAME in diff_markdown(diff_profiles(virtual, virtual))
    assert f"note: the private run was on a {NAME} and the vanilla run" in printed(print_tax, dp_tax(virtual, real))
    assert "note" not in printed(print_tax, dp_tax(real, real))


def test_ranks(killed: Path, real: Profile) -> None:
    job = Job(None)
    job.add(0, "rank_0", load_profile(killed), frozenset())
    assert job.summary()["virtual"] == H200
    assert f"on a {NAME}: " in printed(print_job, view_job(job.summary(), ""))
    assert not [note for note in job.summary()["warnings"] if "different devices" in note]
    job.add(1, "rank_1", real, frozenset())
    (note,) = [note for note in job.summary()["warnings"] if "different devices" in note]
    assert note == f"the ranks ran on different devices: rank 0 on a {NAME}; rank 1 on a real device"
    of_real = Job(None)
    of_real.add(0, "rank_0", real, frozenset())
    assert "virtual" not in of_real.summary()


def test_the_note_of_an_exception() -> None:
    place = {"step": 1, "logical_step": 1, "unix_ns": 3, "device": "cuda:0"}
    request = {"category": "gradients", "module": "", "op": "", "phase": "backward", "requested": 7}
    failure = {"number": 0, "holdings": [], "upstream": {}, **place, **request}
    assert f"on a {NAME}: " in exception_note(
        build_report([failure], TrainingShapes(), virtual=VirtualGpus(**H200)), "path"
    )
    assert "virtual" not in exception_note(build_report([failure], TrainingShapes()), "path")


def test_what_was_read_but_not_computed_is_in_the_report(killed: Path) -> None:
    profile = load_profile(killed)
    reads = [UnknownUse("aten::item", "", 1), UnknownUse("aten::copy_", "/home/me/train.py:12", 30)]
    virtual = VirtualGpus(**H200, unknown_reads=reads)
    text = printed(print_profile, view_profile(replace(profile, virtual=virtual)))
    lines = [" ".join(line.split()) for line in text.splitlines()]
    begin = lines.index("read, but not computed reads operation")
    assert lines[begin + 1 : begin + 3] == ["train.py:12 30 aten::copy_", "(no known line) 1 aten::item"]
    assert "read, but not computed" not in printed(print_profile, view_profile(profile))
