# SPDX-License-Identifier: Apache-2.0
"""The snapshot for memory_viz: read by torch's own functions, and compared with numpy over events.bin."""

import json
import pickle
import pickletools
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from event_files import START, TICK_NS, EventFile
from random_profile import Oracle, write_random_profile
from torch.cuda import _memory_viz

from opacus_memprof.analysis.profile import build_profile, load_profile
from opacus_memprof.analysis.profile_view import view_profile
from opacus_memprof.reports import memory_viz
from opacus_memprof.reports.memory_viz import write_memory_viz

ALLOC, FREE, RETAG, OOM = 1, 2, 3, 8


def written(directory: Path) -> dict[str, Any]:
    profile = load_profile(directory)
    write_memory_viz(view_profile(profile, directory), directory / "snapshot.pickle")
    snapshot: dict[str, Any] = pickle.loads((directory / "snapshot.pickle").read_bytes())
    return snapshot


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random_profile(tmp_path_factory.mktemp("profile"), 1500)


def test_the_trace_tells_every_event(directory: Path) -> None:
    """Entry by entry: an alloc, a free in its two parts, a change of category as a free and an alloc."""
    snapshot = written(directory)
    for device in (1, 2):
        oracle = Oracle(directory, device)
        events, categories = oracle.events, oracle.names["categories"]
        entries = iter(snapshot["device_traces"][device - 1])
        checked = 0
        for event in np.flatnonzero(events["device"] == device).tolist():
            kind, address, size = (int(events[key][event]) for key in ("kind", "address", "size"))
            category = categories[events["category"][event]].replace("hooks_shared", "hooks")
            before = categories[events["op"][event]].replace("hooks_shared", "hooks") if kind == RETAG else category
            if kind == RETAG and before == category:
                continue
            wanted = {ALLOC: ["alloc"], OOM: ["oom"], FREE: ["free_requested", "free_completed"]}.get(kind)
            for action in wanted or ["free_requested", "free_completed", "alloc"]:
                entry = next(entries)
                assert entry["action"] == action
                assert (entry.get("addr"), entry["size"]) == (None if kind == OOM else address, size)
                assert entry["category"] == (category if action == "alloc" else before)
                assert entry["time_us"] == (START + TICK_NS * int(events["time"][event])) // 1000
                metadata = json.loads(entry["user_metadata"])
                assert metadata["category"] == entry["category"]
                assert metadata["module"] == oracle.names["modules"][events["module"][event]]
                checked += 1
        assert checked > 600
        assert [entry["action"] for entry in entries] == ["snapshot"]


def test_the_live_bytes_of_the_segments_are_the_end_s(directory: Path) -> None:
    snapshot = written(directory)
    for device in (1, 2):
        oracle = Oracle(directory, device)
        segments = [segment for segment in snapshot["segments"] if segment["device"] == device - 1]
        assert sum(_memory_viz.calc_active(segment) for segment in segments) == oracle.total[-1]
        by_category: dict[str, int] = {}
        for block in (block for segment in segments for block in segment["blocks"]):
            if block["state"] == "active_allocated":
                (category,) = [frame["name"] for frame in block["frames"] if frame["filename"] == "category"]
                by_category[category] = by_category.get(category, 0) + block["requested_size"]
        assert by_category == oracle.named(oracle.live[-1])


def test_torch_s_own_functions_read_it(directory: Path) -> None:
    snapshot = written(directory)
    live = int(Oracle(directory, 1).total[-1] + Oracle(directory, 2).total[-1])
    report = _memory_viz.segsum(snapshot)  # checks its own sums
    assert f"total_allocated: {_memory_viz.Bytes(live)}\n" in report
    assert "Device 1 ----" in _memory_viz.trace(snapshot)
    for page in (_memory_viz.trace_plot(snapshot), _memory_viz.segment_plot(snapshot)):
        assert "snapshot.pickle" in page
    flames = _memory_viz.memory(snapshot, format_flamegraph=str)
    sizes = {line.rpartition(" ")[0]: int(line.rpartition(" ")[2]) for line in flames.splitlines()}
    gradients = [line for line in sizes if "category:0:gradients;module:0:blocks;module:0:blocks.1;" in line]
    assert gradients
    assert all(line.endswith(("op0", "op1", "op2", "op3", "op4", "op5", "op6", "op7", "op8")) for line in gradients)
    unfreed = _memory_viz.filter_alloc_free_pairs(written(directory))["device_traces"]
    assert sum(entry["size"] for trace in unfreed for entry in trace if entry["action"] == "alloc") == live


def test_the_pickle_has_only_what_the_viewer_unpickles(directory: Path) -> None:
    """pytorch.org/memory_viz reads pickles with a reader of its own, of protocols 2 to 4 and these opcodes."""
    written(directory)
    used = {opcode.name for opcode, *_ in pickletools.genops((directory / "snapshot.pickle").read_bytes())}
    assert used <= {
        *("PROTO", "FRAME", "MEMOIZE", "MARK", "STOP", "EMPTY_DICT", "EMPTY_LIST", "EMPTY_TUPLE", "TUPLE1", "TUPLE2"),
        *("TUPLE3", "TUPLE", "LIST", "DICT", "SETITEM", "SETITEMS", "APPEND", "APPENDS", "BINGET", "LONG_BINGET"),
        *("BINPUT", "LONG_BINPUT", "BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "NONE", "NEWTRUE", "NEWFALSE"),
        *("SHORT_BINUNICODE", "BINUNICODE"),
    }


@pytest.mark.parametrize("most", [100, 2])
def test_of_many_events_those_around_the_peak_are_kept(
    directory: Path, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    monkeypatch.setattr(memory_viz, "MAX_EVENTS", most)
    oracle = Oracle(directory, 1)
    live: dict[int, int] = {}
    categories: dict[int, str] = {}
    highest, at_peak = 0, Counter[str]()
    entries = written(directory)["device_traces"][0]
    for entry in entries:
        if entry["action"] == "alloc":
            live[entry["addr"]] = entry["size"]
            categories[entry["addr"]] = entry["category"]
        elif entry["action"] == "free_completed":
            del live[entry["addr"]]
        if sum(live.values()) > highest:
            highest = sum(live.values())
            at_peak = {
                name: sum(live[at] for at in live if categories[at] == name) for name in set(categories.values())
            }
    peak = int(np.argmax(oracle.total))
    assert highest == oracle.total[peak]
    assert at_peak == oracle.named(oracle.live[peak])
    assert len(entries) < most * 3 + np.isin(oracle.events["kind"], (1,)).sum() / 2


def test_the_cpu_is_device_0_where_it_is_alone(tmp_path: Path) -> None:
    file = EventFile().add("seed", 0x1000, 100, "model_parameters", device=0, step=0).add("alloc", 0, 0, device=0)
    file.retag(0x1000, "model_parameters", "model_parameters", device=0, module="fc")
    profile = build_profile(file.write(tmp_path), status="finished", exit_code=0)
    write_memory_viz(view_profile(profile, tmp_path), tmp_path / "cpu.pickle")
    snapshot = pickle.loads((tmp_path / "cpu.pickle").read_bytes())
    assert [segment["device"] for segment in snapshot["segments"]] == [0]
    assert sum(_memory_viz.calc_active(segment) for segment in snapshot["segments"]) == 100
    assert len(snapshot["device_traces"]) == 1
    retagged = snapshot["device_traces"][0][-2]
    assert (retagged["action"], json.loads(retagged["user_metadata"])["module"]) == ("alloc", "fc")


def test_an_empty_profile_is_an_empty_snapshot(tmp_path: Path) -> None:
    profile = build_profile(EventFile().write(tmp_path), status="finished", exit_code=0)
    write_memory_viz(view_profile(profile, tmp_path), tmp_path / "empty.pickle")
    snapshot = pickle.loads((tmp_path / "empty.pickle").read_bytes())
    assert (snapshot["segments"], [entry for trace in snapshot["device_traces"] for entry in trace]) == ([], [])
    assert "total_allocated: 0.0B" in _memory_viz.segsum(snapshot)


def test_a_window_over_several_pieces_begins_with_what_is_live(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The events come in pieces of 65 536."""
    monkeypatch.setattr(memory_viz, "MAX_EVENTS", 1000)
    file = EventFile().add("alloc", 2**30, 10, "inputs").retag(2**30, "inputs", "noise", size=10)
    for number in range(1, 100_000):
        file.add("alloc", 2**12 * number, 5, "gradients").add("free", 2**12 * number, 5, "gradients")
    file.retag(2**30, "noise", "gradients", size=10).add("alloc", 2**31, 7, "inputs")
    profile = build_profile(file.write(tmp_path), status="finished", exit_code=0)
    write_memory_viz(view_profile(profile, tmp_path), tmp_path / "a.pickle")
    entries = pickle.loads((tmp_path / "a.pickle").read_bytes())["device_traces"][0]
    blocks = [entry for entry in entries if entry["action"] != "snapshot"]
    assert [(entry["action"], entry["addr"], entry["category"]) for entry in (blocks[0], blocks[-2], blocks[-1])] == [
        ("alloc", 2**30, "noise"),
        ("alloc", 2**30, "gradients"),
        ("alloc", 2**31, "inputs"),
    ]
    assert len(blocks) == 1 + 1000 - 2 + 499 + 3 + 1
