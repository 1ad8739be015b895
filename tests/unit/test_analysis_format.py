# SPDX-License-Identifier: Apache-2.0
"""docs/format.md says what is so: its reader reads, and its tables name what the files hold."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from event_files import CATEGORIES, KINDS, PHASES, EventFile, unix_ns

from opacus_memprof.analysis.profile import build_profile
from opacus_memprof.profiles.layer_shapes import TrainingShapes
from opacus_memprof.recording import native

ROOT = Path(__file__).parents[2]
DOCUMENT = (ROOT / "docs" / "format.md").read_text(encoding="utf-8")


def a_file() -> EventFile:
    file = EventFile()
    file.add("seed", 0x1000, 100, "model_parameters", phase="setup", module="fc")
    file.add("alloc", 2**47 + 512, 2**47 + 7, "gradients", phase="backward", step=2**31, module="head", op="mm")
    file.add("alloc", 0x1000, 50, "inputs", device=2)
    file.add("free", 0x1000, 100, "model_parameters", phase="clip")
    return file.add("oom", size=2**40).add("snapshot", size=1, op="now")


def section(title: str) -> str:
    return DOCUMENT.partition(f"\n{title}\n")[2].partition("\n## ")[0]


def keys(table: str) -> set[str]:
    """The keys in the first column of a table, which begins after the line `table`."""
    rows = DOCUMENT.partition(f"\n{table}\n\n| key | |\n|---|---|\n")[2].partition("\n\n")[0].splitlines()
    assert rows
    return {key for row in rows for key in re.findall(r"`(\w+)`", row.split("|")[1])}


def documented_reader() -> dict[str, Any]:
    (code,) = re.findall(r"```python\n(.*?)```", DOCUMENT, re.DOTALL)
    reader: dict[str, Any] = {}
    exec(code, reader)
    return reader


def test_the_reader_of_the_document_reads(tmp_path: Path) -> None:
    reader = documented_reader()
    events, names = reader["read_events"](a_file().write(tmp_path))
    assert [names["categories"][id] for id in events["category"][:3]] == ["model_parameters", "gradients", "inputs"]
    assert events["kind"].tolist() == [KINDS[kind] for kind in ("seed", "alloc", "alloc", "free", "oom", "snapshot")]
    assert events["size"].tolist() == [100, 2**47 + 7, 50, 100, 2**40, 1]
    assert events["address"][1] == 2**47 + 512
    assert events["step"].tolist() == [0, 2**31, 0, 0, 0, 0]
    assert [names["phases"][id] for id in events["phase"]] == ["setup", "backward", "idle", "clip", "idle", "idle"]
    assert [names["modules"][id] for id in events["module"]] == ["fc", "head", "", "", "", ""]
    assert [names["ops"][id] for id in events["op"]] == ["", "mm", "", "", "", "now"]
    assert [names["devices"][id] for id in events["device"][:3]] == ["cuda:0", "cuda:0", "cuda:1"]
    assert reader["peak_bytes"](events, device=1) == 2**47 + 107
    assert reader["peak_bytes"](events, device=2) == 50
    assert [unix_ns(event) for event in range(6)] == [1_700_000_000_000_000_000 + 4 * int(t) for t in events["time"]]


@pytest.mark.parametrize("reserved", [0, 3])
def test_the_documented_reader_reads_a_killed_process_s_events(tmp_path: Path, reserved: int) -> None:
    """The count of a file that nobody closed is behind, and space is reserved after the last record."""
    file = a_file()
    file.closed = False
    content = bytearray(file.write(tmp_path).joinpath("events.bin").read_bytes())
    content[16:24] = (2).to_bytes(8, "little")
    (tmp_path / "events.bin").write_bytes(content + bytes(32 * reserved))
    events, _ = documented_reader()["read_events"](tmp_path)
    assert events["size"].tolist() == [100, 2**47 + 7, 50, 100, 2**40, 1]
    assert build_profile(tmp_path, status="killed", exit_code=None)["events"]["recorded"] == 6


def test_kinds_and_names_are_the_document_s(tmp_path: Path) -> None:
    rows = dict(re.findall(r"^\| (\d) \| `(\w+)` \|", section("## events.bin"), re.MULTILINE))
    assert {name: int(id) for id, name in rows.items()} == {"none": 0, **KINDS, "settled": 9}
    names = native.names()
    assert names["categories"][:23] == CATEGORIES
    assert names["phases"] == PHASES


def test_the_tables_name_every_key(tmp_path: Path) -> None:
    profile = build_profile(a_file().write(tmp_path), status="finished", exit_code=0, shapes=TrainingShapes())
    device = profile["devices"]["cuda:0"]
    assert keys("## profile.json") == profile.keys()
    assert keys("Of a device:") == device.keys()
    assert keys("Of a peak:") == device["peak"].keys()
    for key in ("phases", "steps", "snapshots", "out_of_memory", "timeline"):
        (row,) = [line for line in section("## profile.json").splitlines() if line.startswith(f"| `{key}` |")]
        value = device[key]
        example = next(iter(value.values())) if key == "phases" else value[0] if isinstance(value, list) else value
        assert set(example) <= set(re.findall(r"`(\w+)`", row)), key


def test_meta_is_the_document_s(tmp_path: Path) -> None:
    info = {"versions": {}, "device": "cpu", "command": [], "launch": None}
    native.start_events(str(tmp_path), 100, json.dumps(info))
    native.stop_events()
    meta = json.loads((tmp_path / "meta.json").read_text())
    assert keys("## meta.json") == meta.keys()
    (row,) = [line for line in section("## meta.json").splitlines() if line.startswith("| `names` |")]
    assert set(meta["names"]) == set(re.findall(r'"(\w+)"', row))
    assert (tmp_path / "events.bin").read_bytes()[:8] == b"OMEMPROF"
