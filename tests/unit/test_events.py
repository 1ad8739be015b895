# SPDX-License-Identifier: Apache-2.0
"""Every event of a profile as a row: what the records say, with the categories that their blocks turned out to have."""

from pathlib import Path

import numpy as np
import pytest
from event_files import START, EventFile, unix_ns
from test_analysis_format import documented_reader

from opacus_memprof.analysis import profile
from opacus_memprof.analysis.events import KINDS, Events
from opacus_memprof.analysis.findings import Run
from opacus_memprof.analysis.profile import build_profile
from opacus_memprof.errors import MemprofError
from opacus_memprof.profiles.profile import EventGap
from tests.event_rows import rows_of


def a_run() -> EventFile:
    """Two devices, a temporary, an activation, a gradient that was born as a temporary, a retag, an oom."""
    file = EventFile()
    file.add("seed", 0x1000, 100, "unattributed", module="fc")
    file.retag(0x1000, "unattributed", "model_parameters", module="fc", phase="setup")
    file.add("alloc", 0x2000, 20, "forward_undecided", phase="forward", module="fc", op="mm")  # a temporary
    file.add("alloc", 0x3000, 30, "forward_undecided", phase="forward", module="fc")  # an activation
    file.add("free", 0x2000, 20, "forward_undecided", phase="forward")
    file.add("alloc", 0x9000, 7, "inputs", device=2)
    file.add("phase", phase="backward")
    file.add("alloc", 0x2000, 40, "backward_temporaries", phase="backward", module="fc")  # a gradient
    file.retag(0x2000, "backward_temporaries", "gradients", module="fc", phase="backward")
    file.add("free", 0x3000, 30, "forward_undecided", phase="backward")
    file.add("oom", 0, 2**40, "noise", phase="noise")
    file.add("snapshot", size=3, op="now")
    file.add("step", size=1, step=1)
    return file.add("free", 0x2000, 40, "gradients", step=1)


def live_by_category(rows: np.ndarray, device: int) -> np.ndarray:
    """After every row of a device, by category id: the sum that the rows are documented to give."""
    here = rows[(rows["device"] == device) & (rows["block"] >= 0)]
    changes = np.zeros((len(here), 256), np.int64)
    for at, row in enumerate(here):
        kind = KINDS[row["kind"]]
        if kind in ("alloc", "seed", "retag"):
            changes[at, row["category"]] += int(row["bytes"])
        if kind in ("free", "retag"):
            changes[at, row["before"]] -= int(row["bytes"])
    return changes.cumsum(axis=0)


def test_categories_are_settled_from_birth_on(tmp_path: Path) -> None:
    rows, names = rows_of(a_run().write(tmp_path))
    blocks = [
        (KINDS[row["kind"]], names.category(row["before"]), names.category(row["category"]), row["block"])
        for row in rows
        if row["block"] >= 0
    ]
    assert blocks == [
        ("seed", "model_parameters", "model_parameters", 0),
        ("retag", "model_parameters", "model_parameters", 0),
        ("alloc", "forward_temporaries", "forward_temporaries", 1),
        ("alloc", "activations", "activations", 2),
        ("free", "forward_temporaries", "forward_temporaries", 1),
        ("alloc", "inputs", "inputs", 3),
        ("alloc", "gradients", "gradients", 4),
        ("retag", "gradients", "gradients", 4),
        ("free", "activations", "activations", 2),
        ("free", "gradients", "gradients", 4),
    ]


def test_a_row_has_what_its_record_has(tmp_path: Path) -> None:
    rows, names = rows_of(a_run().write(tmp_path))
    raw, raw_names = documented_reader()["read_events"](tmp_path)
    for field, column in (("kind", "kind"), ("address", "address"), ("step", "step")):
        assert rows[field].tolist() == raw[column].tolist(), field
    for field, column in (("tag", "category"), ("phase", "phase"), ("device", "device"), ("thread", "thread")):
        assert rows[field].tolist() == raw[column].tolist(), field
    assert rows["event"].tolist() == list(range(len(raw["kind"])))
    assert (START + rows["time_ns"]).tolist() == [unix_ns(event) for event in range(len(rows))]
    born = np.isin(raw["kind"], [KINDS.index("alloc"), KINDS.index("seed")])
    assert rows["module"][born].tolist() == raw["module"][born].tolist()
    retags = raw["kind"] == KINDS.index("retag")
    assert rows["op"][~retags].tolist() == raw["op"][~retags].tolist()
    assert rows["bytes"][retags].tolist() == [100, 40]  # the block's, which a retag's record need not have
    assert [names.op(id) for id in rows["op"][rows["kind"] == KINDS.index("snapshot")]] == ["now"]
    assert raw_names["modules"][rows["module"][2]] == "fc"


def test_the_rows_add_up_to_the_profile_at_every_instant(tmp_path: Path) -> None:
    rows, names = rows_of(a_run().write(tmp_path))
    device = build_profile(tmp_path, status="finished", exit_code=0)["devices"]["cuda:0"]
    live = live_by_category(rows, device=1)
    assert int(live.sum(axis=1).max()) == device["peak"]["requested_bytes"] == 170
    at_peak = live[np.argmax(live.sum(axis=1)) + 1]  # with the retag that follows at once
    named = {names.reported_category(id): int(size) for id, size in enumerate(at_peak) if size}
    assert named == {name: size for name, size in device["peak"]["categories"].items() if size}
    assert named == {"model_parameters": 100, "activations": 30, "gradients": 40}


def test_a_block_that_is_allocated_twice_is_freed_between(tmp_path: Path) -> None:
    file = EventFile().add("alloc", 0x1000, 10, "noise").add("alloc", 0x1000, 5, "inputs").add("free", 0x9, 3, "noise")
    rows, _ = rows_of(file.write(tmp_path))
    assert [(KINDS[row["kind"]], row["block"], row["bytes"], row["event"]) for row in rows] == [
        ("alloc", 0, 10, 0),
        ("free", 0, 10, 1),
        ("alloc", 1, 5, 1),
        ("free", -1, 3, 2),
    ]


def test_pieces_lose_nothing(tmp_path: Path) -> None:
    file = EventFile()
    for number in range(70_000):
        file.add("alloc", 512 * number, number, "noise")
    pieces: list[np.ndarray] = []
    Events(file.write(tmp_path)).for_each_chunk(pieces.append)
    assert len(pieces) > 1
    assert np.concatenate(pieces)["bytes"].tolist() == list(range(70_000))


def test_an_unreadable_file_is_one_sentence(tmp_path: Path) -> None:
    a_run().write(tmp_path)
    (tmp_path / "events.bin").write_bytes(b"not a profile")
    with pytest.raises(MemprofError, match="no readable events"):
        rows_of(tmp_path)


def test_what_a_consumer_raises_comes_through(tmp_path: Path) -> None:
    def fail(rows: np.ndarray) -> None:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        Events(a_run().write(tmp_path)).for_each_chunk(fail)


@pytest.mark.parametrize(
    ("first", "lost", "of", "tells"),
    [(10, 0, 100, []), (95, 0, 100, ["truncated"]), (98, 0, 103, ["truncated"]), (95, 5, 100, ["lost"])],
)
def test_where_events_are_missing_is_told(first: int, lost: int, of: int, tells: list[str]) -> None:
    """Five of a run of a hundred: in the middle, at its end, beyond what its header knows, and lost on their way."""
    gap = EventGap(first_event=first, events=5, time_ns=0, end_ns=1, step=2, end_step=3)
    said, *more = profile._gap_warnings({"count": 100, "capacity": 64, "dropped": lost}, [gap])
    assert said.startswith(f"5 of {of} events are not in the event files")
    assert f": 5 after event {first} (from step 2 to step 3). " in said
    assert [word for sentence in more for word in ("truncated", "lost") if word in sentence] == tells


@pytest.mark.parametrize(("status", "failed"), [("failed", True), ("finished", False), ("out_of_memory", False)])
def test_findings_know_whether_the_run_failed(
    status: str, failed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs: list[Run] = []
    monkeypatch.setattr(profile, "find", lambda run: runs.append(run) or [])
    build_profile(a_run().write(tmp_path), status=status, exit_code=None)
    assert [run.failed for run in runs] == [failed]
