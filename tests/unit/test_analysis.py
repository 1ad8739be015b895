# SPDX-License-Identifier: Apache-2.0
import fcntl
import json
import os
from pathlib import Path
from typing import Any

import pytest
from event_files import CATEGORIES, EventFile, unix_ns
from made_profiles import a_live_peak, a_profile

from opacus_memprof.analysis.profile import build_profile, load_profile, read_timelines, write_profile
from opacus_memprof.errors import MemprofError
from opacus_memprof.profiles.live_memory import LivePeak
from opacus_memprof.profiles.profile import ReservedPeak

PUBLIC = [name for name in CATEGORIES if not name.startswith("activation_hooks") and name != "forward_undecided"]


def a_step() -> EventFile:
    """A step of a small network: the peak is 1750 bytes at event 5, when the captured activations are tagged."""
    file = EventFile()
    file.add("alloc", 0x1000, 1000, "model_parameters", phase="setup", module="fc")
    file.add("alloc", 0x2000, 300, "forward_undecided", phase="forward", module="fc", op="linear")
    file.retag(0x2000, "forward_undecided", "activation_hooks_shared", phase="forward", module="fc")
    file.add("alloc", 0x3000, 50, "forward_undecided", phase="forward", module="act")
    file.add("free", 0x3000, 50, "forward_undecided", phase="forward", module="act")
    file.add("alloc", 0x4000, 450, "backward_temporaries", phase="backward", module="fc", op="mm")
    file.retag(0x2000, "activation_hooks_shared", "activation_hooks_opacus_only", phase="backward", module="fc")
    file.add("free", 0x2000, 300, "activation_hooks_opacus_only", phase="backward", module="fc")
    file.add("free", 0x4000, 450, "backward_temporaries", phase="backward", module="fc", op="mm")
    file.add("step", size=1, step=1)
    return file


def built(file: EventFile, directory: Path, **given: Any) -> dict[str, Any]:
    return build_profile(file.write(directory), **{"status": "finished", "exit_code": 0, **given})


def live_peak(
    requested: int, allocated: int | None = None, reserved: int | None = None, shared: int = 0, **categories: int
) -> dict[str, LivePeak]:
    """As recording.live.read_peaks() has it; of activation_hooks `shared` bytes are autograd's as well."""
    zeros = dict.fromkeys([*PUBLIC, "activation_hooks", "forward_undecided"], 0)
    peak = a_live_peak(
        requested_bytes=requested,
        counted_bytes=None if allocated is None else requested,
        allocated_bytes=allocated,
        reserved_bytes=reserved,
        unix_ns=123,
        step=7,
        phase="clip",
        categories=zeros | categories,
        activation_hooks={
            "shared_with_autograd": shared,
            "opacus_only": categories.get("activation_hooks", 0) - shared,
        },
    )
    return {"cuda:0": peak}


def test_a_proof_is_a_phase_of_its_own(tmp_path: Path) -> None:
    """It takes 900 bytes in a forward of its own, the forward after it 100 and the backward 200."""
    file = EventFile()
    file.add("alloc", 0x1000, 1000, "model_parameters", phase="setup")
    file.add("phase", phase="forward")
    file.add("alloc", 0x2000, 600, "forward_undecided", phase="forward", op="flash_clip_proof")
    file.add("alloc", 0x3000, 300, "backward_temporaries", phase="backward")  # by a thread of autograd
    file.add("oom", size=9999, category="backward_temporaries", phase="backward")
    file.add("free", 0x3000, 300, "backward_temporaries", phase="backward")
    file.add("free", 0x2000, 600, "forward_undecided", phase="forward", op="flash_clip_proof")
    file.add("phase", phase="forward")
    file.add("alloc", 0x4000, 100, "forward_undecided", phase="forward")
    file.add("alloc", 0x5000, 100, "backward_temporaries", phase="backward")
    file.add("step", size=1, step=1)
    device = built(file, tmp_path)["devices"]["cuda:0"]
    assert (device["peak"]["phase"], device["peak"]["requested_bytes"]) == ("proof", 1900)
    assert device["steps"][0]["phase"] == device["out_of_memory"][0]["phase"] == "proof"
    peaks = {phase: row["peak_bytes"] for phase, row in device["phases"].items()}
    assert (peaks["proof"], peaks["forward"], peaks["backward"]) == (1900, 1100, 1200)
    assert sum(device["phases"]["backward"]["categories"].values()) == 1200
    assert device["timeline"]["phase"][2:8] == [*["proof"] * 5, "forward"]


def test_the_peak_is_told_in_names(tmp_path: Path) -> None:
    profile = built(a_step(), tmp_path)
    peak = profile["devices"]["cuda:0"]["peak"]
    assert peak["requested_bytes"] == 1750
    assert peak["event"] == 5
    assert peak["unix_ns"] == unix_ns(5)
    assert (peak["step"], peak["logical_step"], peak["phase"], peak["source"]) == (0, 0, "backward", "events")
    in_use = {"model_parameters": 1000, "activation_hooks": 300, "backward_temporaries": 450}
    assert peak["categories"] == {name: in_use.get(name, 0) for name in [*PUBLIC, "activation_hooks"]}
    assert peak["remainder_bytes"] == 0
    assert peak["activation_hooks"] == {"shared_with_autograd": 0, "opacus_only": 300}
    assert peak["modules"] == {"fc": in_use}
    assert list(peak["ops"]) == ["", "mm", "linear"]  # the largest first
    assert peak["lines"] == {}
    assert peak["born_in"] == {
        "setup": {"model_parameters": 1000},
        "forward": {"activation_hooks": 300},
        "backward": {"backward_temporaries": 450},
    }
    assert peak["largest_blocks"] == [
        {"bytes": 1000, "category": "model_parameters", "module": "fc", "op": "", "step": 0, "phase": "setup"},
        {"bytes": 450, "category": "backward_temporaries", "module": "fc", "op": "mm", "step": 0, "phase": "backward"},
        {"bytes": 300, "category": "activation_hooks", "module": "fc", "op": "linear", "step": 0, "phase": "forward"},
    ]
    assert peak["allocated_bytes"] is peak["reserved_bytes"] is peak["rounding"] is peak["cached"] is None


def test_the_whole_says_what_it_is_of(tmp_path: Path) -> None:
    profile = built(a_step(), tmp_path, status="failed", exit_code=3, warnings=["mind this"])
    assert profile["format"] == 1
    assert (profile["status"], profile["exit_code"]) == ("failed", 3)
    assert profile["versions"] == {"torch": "2.15.0"}
    assert profile["command"] == ["train.py"]
    assert profile["pid"] == 4321
    assert profile["events"] == {
        "recorded": 10,
        "dropped": 0,
        "capacity": 2**20,
        "closed": True,
        "contradictions": {
            "unknown_frees": 0,
            "unknown_retags": 0,
            "double_allocations": 0,
            "category_mismatches": 0,
            "unreadable": 0,
        },
        "gaps": [],
    }
    assert profile["findings"] == []
    assert profile["warnings"] == ["mind this"]


def test_phases_steps_and_timeline(tmp_path: Path) -> None:
    device = built(a_step(), tmp_path)["devices"]["cuda:0"]
    assert {name: phase["peak_bytes"] for name, phase in device["phases"].items()} == {
        "idle": 1000,
        "setup": 1000,
        "forward": 1350,
        "backward": 1750,
    }
    forward = device["phases"]["forward"]
    assert forward["event"] == 3
    assert forward["categories"] == {"model_parameters": 1000, "activation_hooks": 300, "forward_temporaries": 50}
    first, second = device["steps"]
    assert (first["step"], first["peak_bytes"], first["end_bytes"], first["complete"]) == (0, 1750, 1000, True)
    assert (second["step"], second["logical_step"], second["peak_bytes"], second["complete"]) == (1, 1, 1000, False)
    assert device["steps_left_out"] == 0
    timeline = device["timeline"]
    assert timeline["event"] == list(range(10))
    assert timeline["time_ns"] == [unix_ns(event) - unix_ns(0) + 40 for event in range(10)]
    assert timeline["bytes"] == [1000, 1300, 1300, 1350, 1300, 1750, 1750, 1450, 1000, 1000]
    assert [sum(row) for row in zip(*timeline["categories"].values(), strict=True)] == timeline["bytes"]
    assert timeline["phase"][5] == "backward"
    assert timeline["step"] == [0] * 9 + [1]
    assert device["end_bytes"] == 1000


def test_a_timeline_of_more_rows(tmp_path: Path) -> None:
    """Of 6000 events a profile shows the highest of each three; as many rows as events show them all."""
    file, expected = EventFile(), []
    for index in range(3000):
        size = index * 7919 % 1000 + 1
        file.add("alloc", 0x1000, size, "noise").add("free", 0x1000, size, "noise")
        expected += [size, 0]
    profile = built(file, tmp_path)
    assert profile["devices"]["cuda:0"]["timeline"]["bytes"] == [
        max(expected[index : index + 3]) for index in range(0, 6000, 3)
    ]
    every = read_timelines(tmp_path, 6000)
    assert every.keys() == {"cuda:0"}
    assert every["cuda:0"]["bytes"] == every["cuda:0"]["categories"]["noise"] == expected
    with pytest.raises(MemprofError, match="there is no readable profile"):
        read_timelines(tmp_path / "nowhere", 6000)


def test_snapshots_carry_what_the_allocator_counted(tmp_path: Path) -> None:
    file = a_step().add("snapshot", size=4, op="after step", step=1)
    counts = {"requested_bytes": 1064, "categories": {"pending_free": 64, "model_parameters": 1000}}
    counted = {"allocated_bytes": 1536, "reserved_bytes": 4096, "rounding": 472, "cached": 2560}
    devices = {"cuda:0": {**counts, **counted, "outside_pytorch": None, "remainder": 0}}
    line = {"index": 4, "name": "after step", "unix_ns": 77, "step": 1, "logical_step": 1, "devices": devices}
    torn = b'\n{"index": 5}\n{"index": 6, "dev\xff'  # damaged, and killed while it wrote
    (tmp_path / "snapshots.jsonl").write_bytes(json.dumps(line).encode() + torn)
    (snapshot,) = built(file, tmp_path)["devices"]["cuda:0"]["snapshots"]
    assert (snapshot["index"], snapshot["name"], snapshot["step"]) == (4, "after step", 1)
    # The side stream still holds 64 bytes that the program has freed.
    assert snapshot["requested_bytes"] == 1064
    assert snapshot["categories"] == {"model_parameters": 1000, "pending_free": 64}
    assert counted.items() <= snapshot.items()
    assert snapshot["outside_pytorch"] is None
    assert snapshot["remainder"] == 0


def test_a_snapshot_after_the_file_was_full_is_the_counters(tmp_path: Path) -> None:
    counts = {"requested_bytes": 30, "remainder": 0, "rounding": 2}
    categories = {"noise": 0, "activation_hooks_shared": 10, "activation_hooks_opacus_only": 15, "forward_undecided": 5}
    place = {"index": 9, "name": "late", "unix_ns": 77, "step": 8, "logical_step": 2}
    devices = {"cuda:0": {**counts, "categories": categories}}
    (tmp_path / "snapshots.jsonl").write_text(json.dumps({**place, "devices": devices}) + "\n")
    (snapshot,) = built(a_step(), tmp_path)["devices"]["cuda:0"]["snapshots"]
    in_use = {"activation_hooks": 25, "forward_undecided": 5}
    assert snapshot == {**place, **counts, "categories": in_use, "event": None, "phase": None}


def test_snapshots_before_a_device_s_first_block_have_no_bytes(tmp_path: Path) -> None:
    places = [{"name": name, "unix_ns": 70 + at, "step": 0, "logical_step": 0} for at, name in enumerate("ab")]
    cpu = {"requested_bytes": 5, "categories": {"noise": 5}}
    lines = [{"index": 0, **places[0], "devices": {}}, {"index": 1, **places[1], "devices": {"cpu": cpu}}]
    (tmp_path / "snapshots.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    file = EventFile().add("snapshot", size=0, op="a").add("alloc", 0x1000, 5, "noise", device=0)
    file.add("snapshot", size=1, op="b").add("alloc", 0x2000, 8, "noise").add("snapshot", size=2, op="c")
    devices = built(file, tmp_path)["devices"]
    snapshots = {
        name: [
            (snapshot["index"], snapshot["name"], snapshot["requested_bytes"], snapshot["event"])
            for snapshot in device["snapshots"]
        ]
        for name, device in devices.items()
    }
    assert snapshots == {
        "cpu": [(0, "a", 0, None), (1, "b", 5, 2), (2, "c", 5, 4)],
        "cuda:0": [(0, "a", 0, None), (1, "b", 0, None), (2, "c", 8, 4)],
    }
    assert all(snapshot["remainder"] is None for snapshot in devices["cuda:0"]["snapshots"][:2])  # nobody has counted


def test_an_allocation_that_failed(tmp_path: Path) -> None:
    file = a_step().add("oom", size=1 << 40, category="gradients", phase="backward", step=1, module="fc", op="mm")
    (failure,) = built(file, tmp_path)["devices"]["cuda:0"]["out_of_memory"]
    assert failure["requested_bytes"] == 1 << 40
    assert failure["live_bytes"] == 1000
    assert (failure["category"], failure["module"], failure["op"]) == ("gradients", "fc", "mm")
    assert failure["categories"] == {"model_parameters": 1000}


def test_an_allocation_of_forward_that_failed_is_one_of_activations(tmp_path: Path) -> None:
    """As in oom_report.json; forward_undecided is a name of live views."""
    file = a_step().add("oom", size=1 << 40, category="forward_undecided", phase="forward", step=1)
    (failure,) = built(file, tmp_path)["devices"]["cuda:0"]["out_of_memory"]
    assert failure["category"] == "activations"


def test_the_counters_add_what_the_allocator_had(tmp_path: Path) -> None:
    peaks = live_peak(1750, allocated=2048, reserved=8192)
    peaks["cuda:0"].reserved_peak = ReservedPeak(bytes=9000, step=3, phase="clip")
    profile = built(a_step(), tmp_path, peaks=peaks)
    assert profile["devices"]["cuda:0"]["reserved_peak"] == {"bytes": 9000, "step": 3, "phase": "clip"}
    peak = profile["devices"]["cuda:0"]["peak"]
    assert peak["counted_bytes"] == 1750
    assert peak["allocated_bytes"] == 2048
    assert peak["rounding"] == 298
    assert peak["reserved_bytes"] == 8192
    assert peak["cached"] == 6144
    assert profile["warnings"] == []


def test_counters_that_differ_are_told(tmp_path: Path) -> None:
    profile = built(a_step(), tmp_path, peaks=live_peak(1800, allocated=2048, reserved=8192))
    (warning,) = profile["warnings"]
    assert "1750" in warning
    assert "1800" in warning
    peak = profile["devices"]["cuda:0"]["peak"]
    assert peak["requested_bytes"] == 1750
    assert peak["allocated_bytes"] is peak["counted_bytes"] is None  # counted at another instant


def test_a_peak_after_the_file_was_full_is_the_counters(tmp_path: Path) -> None:
    file = a_step()
    file.dropped = 40
    peaks = live_peak(5000, 6144, 8192, forward_undecided=3500, activation_hooks=1000, shared=1000, noise=500)
    profile = built(file, tmp_path, peaks=peaks)
    peak = profile["devices"]["cuda:0"]["peak"]
    assert (peak["source"], peak["requested_bytes"], peak["step"], peak["phase"]) == ("counters", 5000, 7, "clip")
    assert peak["unix_ns"] == 123
    in_use = {name: size for name, size in peak["categories"].items() if size}
    assert in_use == {"forward_undecided": 3500, "activation_hooks": 1000, "noise": 500}
    assert peak["activation_hooks"] == {"shared_with_autograd": 1000, "opacus_only": 0}
    assert peak["remainder_bytes"] == 0
    assert peak["rounding"] == 1144
    assert any("40 events were lost on their way to the disk" in warning for warning in profile["warnings"])
    assert any("5000" in warning and "1750" in warning for warning in profile["warnings"])


def test_a_late_device_has_the_counters_peak(tmp_path: Path) -> None:
    file = EventFile(dropped=40).add("alloc", 0x1000, 10, "noise", device=0)
    place = {"index": 3, "name": "end", "unix_ns": 77, "step": 8, "logical_step": 2}
    counts = {"requested_bytes": 30, "categories": {"noise": 30, "inputs": 0}}
    (tmp_path / "snapshots.jsonl").write_text(json.dumps({**place, "devices": {"cuda:0": counts}}) + "\n")
    peaks = live_peak(5000, 6144, 8192, noise=4000, inputs=1000)
    profile = built(file, tmp_path, peaks=peaks | {"cuda:1": live_peak(0)["cuda:0"]})
    assert list(profile["devices"]) == ["cpu", "cuda:0"]  # the third had no block
    device = profile["devices"]["cuda:0"]
    assert device.keys() == profile["devices"]["cpu"].keys()
    assert device["timeline"].keys() == profile["devices"]["cpu"]["timeline"].keys()
    peak = device["peak"]
    assert peak.keys() == profile["devices"]["cpu"]["peak"].keys()
    assert (peak["source"], peak["requested_bytes"], peak["rounding"]) == ("counters", 5000, 1144)
    assert {name: size for name, size in peak["categories"].items() if size} == {"noise": 4000, "inputs": 1000}
    assert peak["categories"].keys() == profile["devices"]["cpu"]["peak"]["categories"].keys()
    assert [(snapshot["index"], snapshot["requested_bytes"]) for snapshot in device["snapshots"]] == [(3, 30)]
    assert any(
        sentence.startswith("cuda:0: the peak of 5000 bytes is not in the event files")
        for sentence in profile["warnings"]
    )


def test_a_peak_before_the_file_was_full_stays(tmp_path: Path) -> None:
    file = a_step()
    file.dropped = 40
    peak = built(file, tmp_path, peaks=live_peak(1750))["devices"]["cuda:0"]["peak"]
    assert (peak["source"], peak["requested_bytes"]) == ("events", 1750)


def test_forward_is_undecided_where_the_file_was_cut(tmp_path: Path) -> None:
    file = EventFile(dropped=1).add("alloc", 0x1000, 10, "forward_undecided", phase="forward")
    peak = built(file, tmp_path)["devices"]["cuda:0"]["peak"]
    assert peak["categories"]["forward_undecided"] == 10


def test_categories_of_the_program_have_their_names(tmp_path: Path) -> None:
    file = EventFile().add("alloc", 0x1000, 10, "teacher").add("alloc", 0x2000, 5, "student")
    categories = built(file, tmp_path)["devices"]["cuda:0"]["peak"]["categories"]
    assert categories["teacher"] == 10
    assert categories["student"] == 5
    assert sum(categories.values()) == 15


def test_devices_are_apart(tmp_path: Path) -> None:
    file = EventFile().add("alloc", 0x1000, 10, device=0).add("alloc", 0x1000, 20, device=2)
    devices = built(file, tmp_path)["devices"]
    assert {name: device["peak"]["requested_bytes"] for name, device in devices.items()} == {"cpu": 10, "cuda:1": 20}


def test_no_events_are_no_devices(tmp_path: Path) -> None:
    assert built(EventFile(), tmp_path)["devices"] == {}


def test_a_file_that_contradicts_itself_is_told(tmp_path: Path) -> None:
    file = EventFile().add("free", 0x1000).add("alloc", 0x1000, 8, "noise").add("free", 0x1000, category="inputs")
    (warning,) = built(file, tmp_path)["warnings"]
    assert "1 unknown frees, 1 category mismatches" in warning


def test_a_truncated_file_is_told_and_read(tmp_path: Path) -> None:
    a_step().write(tmp_path)
    events = tmp_path / "events.bin"
    events.write_bytes(events.read_bytes()[: 4096 + 5 * 32 + 7])
    profile = build_profile(tmp_path, status="killed", exit_code=None)
    assert profile["events"]["recorded"] == 5
    assert any("the last 5 events cannot be read" in warning for warning in profile["warnings"])


def test_names_are_numbers_without_meta(tmp_path: Path) -> None:
    file = EventFile().add("alloc", 0x1000, 8, "teacher", module="fc")
    profile = build_profile(file.write(tmp_path, meta=False), status="killed", exit_code=None)
    peak = profile["devices"]["cuda:0"]["peak"]
    assert peak["modules"] == {"module 1": {"category 23": 8}}
    assert peak["categories"]["category 23"] == 8
    assert any("no meta.json" in warning for warning in profile["warnings"])


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("events.bin", b"", "is truncated"),
        ("events.bin", b"x" * 10_000, "is not an event file"),
        ("events.bin", EventFile().content()[:8] + b"\x09" + EventFile().content()[9:], "format version 9"),
        ("meta.json", b"{half", "cannot be read"),
        ("meta.json", b"[]", "is not a JSON object"),
        ("meta.json", b'{"format": 1, "names": null}', "because names should be an object and is null"),
        ("meta.json", b'{"format": 1, "names": {"modules": null}}', "names.modules should be a list and is null"),
        ("profile.json", b'{"format": 2}', "has format 2"),
    ],
)
def test_foreign_files_are_refused_in_a_sentence(tmp_path: Path, name: str, content: bytes, sentence: str) -> None:
    a_step().write(tmp_path)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(MemprofError, match=sentence) as refused:
        load_profile(tmp_path)
    assert "\n" not in str(refused.value)


def test_a_directory_without_a_profile_is_refused(tmp_path: Path) -> None:
    with pytest.raises(MemprofError, match="holds no profile"):
        load_profile(tmp_path)
    with pytest.raises(MemprofError, match="is not there"):
        load_profile(tmp_path / "nowhere")
    (tmp_path / "file").touch()
    with pytest.raises(MemprofError, match="is a file"):
        load_profile(tmp_path / "file")


def test_what_is_written_is_loaded(tmp_path: Path) -> None:
    profile = built(a_step(), tmp_path)
    write_profile(profile, tmp_path)
    (tmp_path / "events.bin").unlink()
    assert load_profile(tmp_path) == profile
    assert sorted(file.name for file in tmp_path.iterdir()) == ["meta.json", "profile.json"]


def test_a_write_that_fails_leaves_the_old_profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_profile(a_profile(), tmp_path)

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(MemprofError, match=r"the profile could not be written: .*No space"):
        write_profile(a_profile(pid=7), tmp_path)
    assert load_profile(tmp_path) == a_profile()
    assert [file.name for file in tmp_path.iterdir()] == ["profile.json"]


def test_a_killed_process_profile_is_built_from_its_events(tmp_path: Path) -> None:
    file = a_step()
    file.closed = False
    profile = load_profile(file.write(tmp_path))
    assert (profile["status"], profile["exit_code"]) == ("killed", None)
    assert profile["devices"]["cuda:0"]["peak"]["requested_bytes"] == 1750
    assert not (tmp_path / "profile.json").exists()


def test_a_profile_that_is_being_written_is_not_called_killed(tmp_path: Path) -> None:
    a_step().write(tmp_path)
    with open(tmp_path / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert load_profile(tmp_path)["status"] == "running"
    assert load_profile(tmp_path)["status"] == "killed"
