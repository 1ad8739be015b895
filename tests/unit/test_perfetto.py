# SPDX-License-Identifier: Apache-2.0
"""The Perfetto trace, parsed back with Perfetto's own classes and compared with numpy over events.bin."""

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import event_files
import numpy as np
import pytest
from event_files import TICK_NS
from perfetto.protos.perfetto.trace import perfetto_trace_pb2 as proto
from random_profile import PHASES, Oracle, write_random_profile

from opacus_memprof.analysis.profile import load_profile
from opacus_memprof.analysis.profile_view import view_profile
from opacus_memprof.reports import perfetto
from opacus_memprof.reports.perfetto import write_perfetto


class Parsed:
    def __init__(self, directory: Path) -> None:
        self.profile = load_profile(directory)
        path = directory / "trace.pftrace"
        write_perfetto(view_profile(self.profile, directory), path)
        self.trace = proto.Trace.FromString(path.read_bytes())
        tracks = [packet.track_descriptor for packet in self.trace.packet if packet.HasField("track_descriptor")]
        self.tracks = {track.uuid: track for track in tracks}
        assert len(self.tracks) == len(tracks)
        self.by_track: dict[tuple[str, str], list[Any]] = defaultdict(list)
        for packet in self.trace.packet:
            if packet.HasField("track_event"):
                track = self.tracks[packet.track_event.track_uuid]
                self.by_track[self.tracks[track.parent_uuid].name, track.name].append(packet)

    def counter(self, device: str, name: str) -> list[tuple[int, int]]:
        packets = self.by_track[f"{device} requested bytes", name]
        assert all(packet.track_event.type == proto.TrackEvent.TYPE_COUNTER for packet in packets)
        return [(packet.timestamp, packet.track_event.counter_value) for packet in packets]

    def slices(self, name: str) -> list[tuple[str, int, int]]:
        packets = self.by_track["", name]
        begins, ends = packets[::2], packets[1::2]
        assert all(packet.track_event.type == proto.TrackEvent.TYPE_SLICE_BEGIN for packet in begins)
        assert all(packet.track_event.type == proto.TrackEvent.TYPE_SLICE_END for packet in ends)
        return [(b.track_event.name, b.timestamp, e.timestamp) for b, e in zip(begins, ends, strict=True)]


def value_at(counter: list[tuple[int, int]], time: int) -> int:
    """A counter holds its value until the next."""
    return next((value for when, value in reversed(counter) if when <= time), 0)


@pytest.fixture(scope="module")
def parsed(tmp_path_factory: pytest.TempPathFactory) -> Parsed:
    return Parsed(write_random_profile(tmp_path_factory.mktemp("profile"), 1500))


@pytest.mark.parametrize(("device", "id"), [("cuda:0", 1), ("cuda:1", 2)])
def test_counters_are_exact_at_every_event(parsed: Parsed, tmp_path: Path, device: str, id: int) -> None:
    oracle = Oracle(write_random_profile(tmp_path, 1500), id)
    names = {name for group, name in parsed.by_track if group == f"{device} requested bytes"} - {"total"}
    assert {"teacher", "activation_hooks", "model_parameters"} <= names
    counters = {name: parsed.counter(device, name) for name in ("total", *names)}
    checked = 0
    for event, time in enumerate((oracle.events["time"] * TICK_NS).tolist()):
        if not oracle.blocks[: event + 1].any() or not (oracle.blocks[event] or oracle.events["kind"][event] == 4):
            continue
        assert value_at(counters["total"], time) == oracle.total[event]
        live = {name: value_at(counters[name], time) for name in names}
        assert {name: size for name, size in live.items() if size} == oracle.settled_at(event)
        checked += 1
    assert checked > 300


def test_fewer_instants_keep_the_peak(parsed: Parsed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(perfetto, "TIMELINE_ROWS", 20)
    directory = write_random_profile(tmp_path, 1500)
    few, oracle = Parsed(directory), Oracle(directory, 1)
    total = few.counter("cuda:0", "total")
    assert len(total) <= 20 < len(parsed.counter("cuda:0", "total"))
    peak = int(np.argmax(oracle.total))
    assert max(value for _, value in total) == oracle.total[peak]
    assert (int(oracle.events["time"][peak]) * TICK_NS, int(oracle.total[peak])) in total


def test_slices_of_steps_and_phases(parsed: Parsed, tmp_path: Path) -> None:
    events = Oracle(write_random_profile(tmp_path, 1500), 1).events
    times = (events["time"] * TICK_NS).tolist()
    ends = [time for time, kind in zip(times, events["kind"], strict=True) if kind == 4]
    assert parsed.slices("steps") == [
        (f"step {number}", begin, end) for number, (begin, end) in enumerate(zip([0, *ends], ends, strict=False))
    ]
    entered: list[tuple[int, str]] = []
    for time, kind, phase in zip(times, events["kind"], events["phase"].tolist(), strict=True):
        if kind in (1, 2, 4, 5, 8) and (not entered or entered[-1][1] != event_files.PHASES[phase]):
            entered.append((time, event_files.PHASES[phase]))
    phases = parsed.slices("main: phases")
    assert phases == [
        (phase, begin, end)
        for (begin, phase), (end, _) in zip(entered, [*entered[1:], (TICK_NS * 10**6, "")], strict=True)
        if phase != "idle"
    ]
    assert {name for name, *_ in phases} == set(PHASES)


def test_the_longest_slices_stay(parsed: Parsed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(perfetto, "MAX_SLICES", 5)
    few = Parsed(write_random_profile(tmp_path, 1500)).slices("main: phases")
    longest = sorted((end - begin for _, begin, end in parsed.slices("main: phases")), reverse=True)[:5]
    assert sorted((end - begin for _, begin, end in few), reverse=True) == longest
    assert [begin for _, begin, _ in few] == sorted(begin for _, begin, _ in few)


def test_instants(parsed: Parsed) -> None:
    shown = [
        (packet.timestamp, packet.track_event.name, {note.name for note in packet.track_event.debug_annotations})
        for packet in parsed.by_track["", "memory events"]
    ]
    for name, device in parsed.profile["devices"].items():
        start = parsed.profile["started_unix_ns"]
        ooms = [(time, title) for time, title, _ in shown if title.startswith(f"{name}: out of memory, 1.00 TiB")]
        assert [time for time, _ in ooms] == [failure["unix_ns"] - start for failure in device["out_of_memory"]]
        peaks = [time for time, title, _ in shown if title.startswith(f"{name}: peak")]
        assert peaks == [device["peak"]["unix_ns"] - start]
        assert sum(title == f"{name}: snapshot now" for _, title, _ in shown) == len(device["snapshots"])
    assert parsed.profile["devices"]["cuda:0"]["out_of_memory"]
    findings = [(title, notes) for _, title, notes in shown if title.startswith("finding: ")]
    assert len(findings) == len(parsed.profile["findings"])
    assert all({"evidence", "remedy", "bytes"} <= notes for _, notes in findings)


def test_every_packet_is_on_a_described_track(parsed: Parsed) -> None:
    seen: set[int] = {0}
    for packet in parsed.trace.packet:
        if packet.HasField("track_descriptor"):
            assert packet.track_descriptor.parent_uuid in seen
            seen.add(packet.track_descriptor.uuid)
        else:
            assert packet.track_event.track_uuid in seen
            assert packet.trusted_packet_sequence_id
    units = {track.counter.unit for track in parsed.tracks.values() if track.HasField("counter")}
    assert units == {proto.CounterDescriptor.UNIT_SIZE_BYTES}


def test_a_snapshot_before_the_start_is_moved_to_it(tmp_path: Path) -> None:
    file = event_files.EventFile(dropped=1).add("alloc", 64, 100, "gradients")
    line = {"index": 3, "name": "late", "unix_ns": event_files.START - 5 * 10**9, "step": 1, "logical_step": 1}
    devices = {"cuda:0": {"requested_bytes": 70, "categories": {"noise": 70}}}
    (tmp_path / "snapshots.jsonl").write_text(json.dumps({**line, "devices": devices}) + "\n")
    shown = [
        packet
        for packets in Parsed(file.write(tmp_path)).by_track.values()
        for packet in packets
        if packet.track_event.name == "cuda:0: snapshot late"
    ]
    assert [packet.timestamp for packet in shown] == [0]
