# SPDX-License-Identifier: Apache-2.0
"""Readers on damaged files: they answer, or raise RuntimeError or MemprofError, and never crash, wait or run on."""

import contextlib
import io
import json
import os
import random
import shutil
import struct
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from opacus_memprof.analysis.job import load_ranks
from opacus_memprof.analysis.profile import load_profile
from opacus_memprof.analysis.torch_snapshot import profile_of
from opacus_memprof.cli import app
from opacus_memprof.errors import MemprofError
from opacus_memprof.experiments.data import _read_texts
from opacus_memprof.experiments.files import read_results
from opacus_memprof.planning.runs import Journal
from opacus_memprof.profiles.core import Follower, for_event_rows, replay
from opacus_memprof.profiles.job_summary import JobSummary
from opacus_memprof.profiles.json_object import read_json_object, to_json
from opacus_memprof.profiles.plan import Plan
from opacus_memprof.profiles.privacy_check import read_privacy_check
from opacus_memprof.pytest_plugin import baseline
from opacus_memprof.reports.plan_exports import _plan_page
from tests.unit.made_plans import a_search, a_verdict
from tests.unit.sweep_results import BASE, finished
from tests.unit.test_torch_snapshot import one_step

DATA = Path(__file__).parents[1] / "data"
PROFILES = ["format_1_hooks", "format_1_ghost", "format_1_oom"]
RECORD_BYTES, HEADER_BYTES = 32, 4096
SECONDS = 1.5  # for each reader and profile


def follow(directory: str) -> None:
    follower = Follower(directory)
    follower.advance()
    follower.advance()


def rows(directory: str) -> None:
    for_event_rows(directory, lambda _: None)


def damage(content: bytes, draw: random.Random) -> bytes:
    """Overwrites bytes and numbers, mostly of the header, repeats or exchanges records, and cuts the end off."""
    damaged = bytearray(content)
    for _ in range(draw.randint(1, 8)):
        place = draw.randrange(256 if draw.random() < 0.3 and len(damaged) > 256 else len(damaged))
        match draw.randrange(4):
            case 0:
                damaged[place] = draw.randrange(256)
            case 1:
                number = draw.choice([0, 1, 2**31, 2**35, 2**48 - 1, 2**63, 2**64 - 1])
                start = place // 8 * 8
                damaged[start : start + 8] = struct.pack("<Q", number)
            case 2:
                records = max((len(damaged) - HEADER_BYTES) // RECORD_BYTES, 1)
                source, target = (HEADER_BYTES + draw.randrange(records) * RECORD_BYTES for _ in range(2))
                damaged[target : target + RECORD_BYTES] = damaged[source : source + RECORD_BYTES]
            case _:
                if draw.random() < 0.2:
                    del damaged[draw.randrange(len(damaged)) :]
                    if not damaged:
                        return b""
    return bytes(damaged)


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("read", [replay, rows, follow])
def test_damaged_event_files(read: Callable[[str], object], profile: str, tmp_path: Path) -> None:
    content = (DATA / profile / "events.bin").read_bytes()
    draw = random.Random(f"{profile} {read.__name__}")
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        (tmp_path / "events.bin").write_bytes(damage(content, draw))
        with suppress(RuntimeError):
            read(str(tmp_path))


@pytest.mark.parametrize("read", [replay, rows, follow])
def test_a_piece_that_claims_more_live_blocks_than_memory_holds(read: Callable[[str], object], tmp_path: Path) -> None:
    content = bytearray((DATA / "format_1_hooks" / "events.bin").read_bytes())
    content[8:12] = struct.pack("<I", 2)  # the version that has pieces
    (tmp_path / "events.bin").write_bytes(content)
    piece, first_event, blocks = 1, 2**20, 2**35
    content[88:112] = struct.pack("<3Q", piece, first_event, blocks)
    later = tmp_path / "events.1.bin"
    later.write_bytes(content[:HEADER_BYTES])
    os.truncate(later, HEADER_BYTES + blocks * RECORD_BYTES)  # takes no disk space
    read(str(tmp_path))


@pytest.mark.parametrize("read", [replay, rows, follow])
def test_a_fifo_is_refused_and_not_waited_for(read: Callable[[str], object], tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "events.bin")
    with pytest.raises(RuntimeError, match="is not a regular file"):
        read(str(tmp_path))


JSON_SECONDS = 1.5  # for each file
OTHER_SECONDS = 0.5
WRONG: list[Any] = [None, True, -1, 2**35, 2**63, 1e308, "", "\ud800", [], {}, [[]], {"\udcff": {}}]


def parts(content: Any) -> list[tuple[Any, Any]]:
    """Returns all objects and lists of a JSON document with each of their keys."""
    found = []
    for key, inside in content.items() if isinstance(content, dict) else enumerate(content):
        found.append((content, key))
        found += parts(inside) if isinstance(inside, (dict, list)) else []
    return found


def damage_json(text: str, draw: random.Random) -> str:
    """Replaces or removes values, and sometimes cuts the text or repeats a part of it."""
    content = json.loads(text)
    for _ in range(draw.randint(1, 4)):
        inside, key = draw.choice(parts(content))
        if draw.random() < 0.3:
            del inside[key]
        else:
            inside[key] = draw.choice(WRONG)
        if not content:
            break
    damaged = json.dumps(content)
    if draw.random() < 0.2:
        start = draw.randrange(len(damaged))
        damaged = damaged[:start] + draw.choice(["", "[" * 50_000, "\x00", damaged[start:] * 2])
    return damaged


@pytest.mark.parametrize("name", ["profile.json", "meta.json", "oom_report.json", "snapshots.jsonl"])
def test_damaged_json(name: str, tmp_path: Path) -> None:
    shutil.copytree(DATA / "format_1_oom", tmp_path, dirs_exist_ok=True)
    text = (tmp_path / name).read_text().splitlines()[0] if name.endswith("l") else (tmp_path / name).read_text()
    if name == "meta.json":  # read where there is no profile.json
        (tmp_path / "profile.json").unlink()
    draw = random.Random(name)
    end, answered = time.monotonic() + JSON_SECONDS, 0
    while time.monotonic() < end:
        (tmp_path / name).write_text(damage_json(text, draw))
        with contextlib.redirect_stdout(io.StringIO()):
            ended = CliRunner().invoke(app, ["report", str(tmp_path)])
        assert isinstance(ended.exception, (MemprofError, SystemExit, type(None))), ended.exc_info
        answered += 1
    assert answered


def ranks(directory: Path) -> str:
    """Writes the profiles of two ranks of a job, and returns what ranks.json is."""
    for rank in range(2):
        shutil.copytree(DATA / "format_1_hooks", directory / f"rank_{rank}")
    return to_json(load_ranks(directory))


PRIVACY_CHECK = """{"format": 1, "versions": {"torch": "2.11"}, "rank": 0, "world_size": 1, "models": [], "earlier": [
    {"format": 1, "versions": {"torch": null}, "rank": 0, "world_size": 2, "models": []}]}"""
BASELINES = """{"format": 1, "baselines": [{"key": {"device": "cpu", "torch": "2.11", "opacus": "1.6", "mode": "none"},
    "peak_bytes": 5, "modules": {"fc": {"noise": 5}}, "step": 1, "phase": "backward"}]}"""


# The name of a file, what is in it, and what reads it.
OTHER_JSON: dict[str, tuple[Callable[[Path], str], Callable[[Path], object]]] = {
    "plan.json": (lambda _: to_json(a_search()), lambda path: _plan_page(read_json_object(path, Plan))),
    "plan.json of a verdict": (lambda _: to_json(a_verdict()), lambda path: read_json_object(path, Plan)),
    "ranks.json": (ranks, lambda path: read_json_object(path, JobSummary)),
    "privacy_check.json": (lambda _: PRIVACY_CHECK, read_privacy_check),
    "a baseline": (lambda _: BASELINES, baseline.read),
    "result.json": (lambda _: json.dumps(finished(BASE)), lambda path: read_results(path.parent)),
    "texts.jsonl": (lambda _: '{"text": "a", "label": 1}', lambda path: _read_texts(path, BASE)),
}


def refuses(read: Callable[[Path], object], file: Path) -> bool:
    """Whether it says in one line that the file cannot be read."""
    said = ""
    try:
        read(file)
    except MemprofError as error:
        said = str(error)
    assert "\n" not in said
    return bool(said)


@pytest.mark.parametrize("name", OTHER_JSON)
def test_damaged_json_beside_profiles(name: str, tmp_path: Path) -> None:
    make, read = OTHER_JSON[name]
    text = make(tmp_path)
    file = tmp_path / name.partition(" ")[0]
    file.write_text(text)
    read(file)
    draw = random.Random(name)
    end, refused = time.monotonic() + OTHER_SECONDS, 0
    while time.monotonic() < end:
        file.write_text(damage_json(text, draw))
        refused += refuses(read, file)
    assert refused


@pytest.mark.parametrize("row", ["[1]", "3", "null", "[" * 200_000, '"text"'])
def test_a_row_that_is_not_an_object_is_refused(row: str, tmp_path: Path) -> None:
    (tmp_path / "texts.jsonl").write_text(row)
    with pytest.raises(MemprofError, match=r"(lacks what is needed|cannot be read)"):
        _read_texts(tmp_path / "texts.jsonl", BASE)


def test_damaged_snapshots_of_torch(tmp_path: Path) -> None:
    file = one_step(context_all=True).write(tmp_path / "a.pickle")
    content = file.read_bytes()
    draw = random.Random("snapshot")
    end, refused = time.monotonic() + SECONDS, 0
    while time.monotonic() < end:
        file.write_bytes(damage(content, draw))
        refused += refuses(lambda path: load_profile(profile_of(path)), file)
    assert refused


@pytest.mark.parametrize("name", ["profile.json", "snapshots.jsonl", "meta.json"])
@pytest.mark.parametrize("kind", ["pipe", "device", "directory"])
def test_what_is_no_file_is_one_sentence(name: str, kind: str, tmp_path: Path) -> None:
    shutil.copytree(DATA / "format_1_hooks", tmp_path, dirs_exist_ok=True)
    for each in (name, "profile.json"):  # the others are read where there is no profile.json
        (tmp_path / each).unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(tmp_path / name)
    elif kind == "device":
        (tmp_path / name).symlink_to("/dev/zero")
    else:
        (tmp_path / name).mkdir()
    with pytest.raises(MemprofError, match=r"cannot be read \((it is not a regular file|Is a directory)\)"):
        load_profile(tmp_path)
    with pytest.raises(MemprofError, match="cannot be read"):
        list(Journal(tmp_path / name).entries())


def test_nested_json_is_one_sentence(tmp_path: Path) -> None:
    for text in ("[" * 200_000, '{"a":' * 200_000):
        (tmp_path / "profile.json").write_text(text)
        with pytest.raises(MemprofError, match="nested too deeply"):
            load_profile(tmp_path)


def test_text_that_is_not_unicode_is_escaped(tmp_path: Path) -> None:
    shutil.copytree(DATA / "format_1_hooks", tmp_path, dirs_exist_ok=True)
    content = json.loads((tmp_path / "profile.json").read_text())
    (device,) = content["devices"].values()
    device["peak"]["modules"]["layer_\ud800"] = device["peak"]["modules"].pop(next(iter(device["peak"]["modules"])))
    (tmp_path / "profile.json").write_text(json.dumps(content))
    ended = CliRunner().invoke(app, ["report", str(tmp_path), "--csv", str(tmp_path / "a.csv")])
    assert ended.exit_code == 0, ended.exc_info
    assert "layer_\\ud800" in ended.output
    assert "layer_\\ud800" in (tmp_path / "a.csv").read_text()
