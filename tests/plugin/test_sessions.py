# SPDX-License-Identifier: Apache-2.0
"""What a test's figures are: its own, the same each time, in whatever order and however the tests before it ended."""

import json
from pathlib import Path

import numpy as np
import pytest
from opacus import GradSampleModule
from torch import nn

from opacus_memprof import session
from opacus_memprof.errors import MemprofError
from opacus_memprof.pytest_plugin import clean_session
from opacus_memprof.recording import native
from tests.plugin.conftest import LOAD, Run
from tests.unit.event_files import EventFile

MIB = 2**20


def peaks(folder: Path) -> dict[str, int]:
    tests = json.loads((folder / "summary.json").read_text())["tests"]
    devices = {name.rpartition("::")[2]: found["devices"] for name, found in tests.items()}
    return {name: found["cpu"]["peak_bytes"] for name, found in devices.items() if found}


def test_a_hundred_runs_of_one_step_give_the_same_bytes(run: Run, pytester: pytest.Pytester) -> None:
    result = run(
        """
@pytest.mark.parametrize("time", range(100))
def test_step(memprof, time):
    train(width=8)
    memprof.check_baseline("step", rel=0)
""",
        "--memprof-update-baselines",
        "-k",
        "test_step and 57",
    )
    result.assert_outcomes(passed=1, deselected=99)
    result = run((pytester.path / "test_it.py").read_text(), "--memprof-report=out")
    result.assert_outcomes(passed=100)
    assert len(set(peaks(pytester.path / "out").values())) == 1
    assert session.current() is None
    assert not native.cpu_installed()


def test_figures_are_a_tests_own_in_any_order(run: Run, pytester: pytest.Pytester) -> None:
    """Wide fixtures and leaks of others count nowhere, but a shared model counts wherever it is attached."""
    source = """
leaked = []

@pytest.fixture(scope="module")
def model():
    return nn.Linear(1024, 512, bias=False)  # 2 MiB

@pytest.fixture
def batch():
    return block(1)

def test_leaves_8(memprof):
    leaked.append(block(8))

def test_frees_what_was_left(memprof):
    kept = block(3)
    leaked.clear()
    more = block(2)
    assert memprof.peak() == 5 * MIB
    assert memprof.breakdown() == {"cpu": {"unattributed": 5 * MIB}}

def test_attaches(memprof, model, batch):
    memprof.attach(model)
    assert memprof.breakdown() == {"cpu": {"model_parameters": 2 * MIB, "unattributed": MIB}}

def test_attaches_again(memprof, model):
    memprof.attach(model)
    assert memprof.peak("model_parameters") == 2 * MIB

def test_does_not_attach(memprof, model):
    block(4)
    taken = memprof.snapshot("now")["devices"]["cpu"]
    assert taken["remainder"] == 0

def test_fails(memprof):
    in_use = block(32)
    raise ValueError

def test_runs_out(memprof):
    in_use = block(6)
    block(2**40)

def test_runs_out_and_goes_on(memprof):
    with pytest.raises(RuntimeError):
        block(2**40)
    block(1)

def test_last(memprof):
    block(1)

def test_skips(memprof):
    pytest.skip("no")

@pytest.mark.xfail
def test_xfails(memprof):
    memprof.assert_within("1 B", category="unattributed")
    block(1)
    memprof.assert_within("1 B")
"""
    result = run(source, "--memprof-report=out")
    result.assert_outcomes(passed=7, failed=2, skipped=1, xfailed=1)
    result.stdout.fnmatch_lines(
        [
            "*Captured opacus-memprof call*",
            "cpu ran out of memory: * of unattributed in idle of step 0, with 6.00 MiB of the test live",
        ]
    )
    expected = {
        "test_leaves_8": 8 * MIB,
        "test_frees_what_was_left": 5 * MIB,
        "test_attaches": 3 * MIB,
        "test_attaches_again": 2 * MIB,
        "test_does_not_attach": 4 * MIB,
        "test_fails": 32 * MIB,
        "test_runs_out": 6 * MIB,
        "test_runs_out_and_goes_on": MIB,
        "test_last": MIB,
    }
    found = peaks(pytester.path / "out")
    assert {name: found[name] for name in expected} == expected
    statuses = {
        path.parent.name.split("_test_")[-1].rpartition("-")[0].removeprefix("it.py_"): json.loads(path.read_text())
        for path in (pytester.path / "out").glob("*/profile.json")
    }
    assert len(statuses) == 11
    by_status = sorted(profile["status"] for profile in statuses.values())
    assert by_status == ["failed"] * 2 + ["finished"] * 8 + ["out_of_memory"]
    assert statuses["fails"]["error"] == "ValueError"


def test_a_test_over_a_limit_has_failed(run: Run, pytester: pytest.Pytester) -> None:
    source = """
kept = []

@pytest.mark.limit_gpu_memory("1 MiB")
def test_takes():
    block(2)

@pytest.mark.limit_gpu_leaks("1 MiB")
def test_keeps():
    kept.append(block(3))
"""
    run(source, "--memprof-report=out").assert_outcomes(passed=1, failed=1, errors=1)
    profiles = [json.loads(path.read_text()) for path in sorted((pytester.path / "out").glob("*/profile.json"))]
    assert [(profile["status"], profile["exit_code"]) for profile in profiles] == [("failed", 1)] * 2
    assert [profile["error"][:25] for profile in profiles] == ["limit_gpu_leaks: 3.00 MiB", "limit_gpu_memory: 2.00 Mi"]


def test_a_test_whose_fixture_fails_has_failed(run: Run, pytester: pytest.Pytester) -> None:
    source = """
@pytest.fixture
def fails(memprof):
    in_use = block(2)
    raise ValueError("no data")

@pytest.fixture
def runs_out(memprof):
    block(2**40)

@pytest.fixture
def skips(memprof):
    pytest.skip("no GPU")

@pytest.fixture
def fails_at_its_end(memprof):
    yield
    raise ValueError("no disk")

def test_fails(fails): ...
def test_runs_out(runs_out): ...
def test_skips(skips): ...
def test_fails_at_its_end(fails_at_its_end): ...
def test_last(memprof): ...
"""
    result = run(source, "--memprof-report=out")
    result.assert_outcomes(errors=3, skipped=1, passed=2)
    result.stdout.fnmatch_lines(["*Captured opacus-memprof setup*", "cpu ran out of memory: *"])
    paths = (pytester.path / "out").glob("*/profile.json")
    profiles = {path.parent.name.split("_test_")[1].split("-")[0]: json.loads(path.read_text()) for path in paths}
    assert {
        name: (profile["status"], profile["error"]) for name, profile in profiles.items() if name != "runs_out"
    } == {
        "fails": ("failed", "ValueError: no data"),
        "skips": ("finished", None),
        "fails_at_its_end": ("failed", "ValueError: no disk"),
        "last": ("finished", None),
    }
    assert profiles["runs_out"]["status"] == "out_of_memory"
    assert profiles["fails"]["devices"]["cpu"]["peak"]["requested_bytes"] == 2 * MIB
    assert session.current() is None


def test_an_interrupted_run_leaves_nothing_running(run: Run, pytester: pytest.Pytester) -> None:
    with pytest.raises(KeyboardInterrupt):
        run("def test_it(memprof):\n    raise KeyboardInterrupt", "--memprof-report=out")
    assert session.current() is None
    assert not native.cpu_installed()
    (profile,) = (pytester.path / "out").glob("*/profile.json")
    assert json.loads(profile.read_text())["status"] == "killed"


def test_unused_it_loads_nothing(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
import sys

def test_it():
    heavy = {"torch", "opacus", "numpy", "opacus_memprof.recording.native", "opacus_memprof.pytest_plugin.lifecycle"}
    assert not heavy & set(sys.modules)
"""
    )
    result = pytester.runpytest_subprocess(*LOAD, timeout=60)
    result.assert_outcomes(passed=1)


def test_it_lists_its_markers_and_options(pytester: pytest.Pytester) -> None:
    pytester.runpytest_inprocess(*LOAD, "--markers").stdout.fnmatch_lines(["@pytest.mark.limit_gpu_memory(limit*"])
    pytester.runpytest_inprocess(*LOAD, "--help").stdout.fnmatch_lines(["*--memprof-update-baselines*"])


def test_blocks_from_before_a_test_are_told_from_its_own(tmp_path: Path) -> None:
    """It frees the first, whose address it gets again, and attaches the second."""
    file = EventFile()
    for address in (1, 2, 3):
        file.add("seed", address, 100)
    file.add("free", 1, 100).retag(2, "unattributed", "model_parameters").add("alloc", 1, 700, "noise")
    events = clean_session.TestEvents(file.write(tmp_path))
    assert (events.earlier_blocks, events.foreign_blocks) == ({(1, 2), (1, 3)}, {(1, 3)})
    assert events.profile().devices["cuda:0"].peak.requested_bytes == 800


def test_events_of_all_pieces_are_read_in_their_order(tmp_path: Path) -> None:
    """Without the live sets at their beginnings, and what is settled at their ends (docs/format.md)."""
    alloc, seed, settled = 1 << 48, 7 << 48, 9 << 48
    for piece in range(12):
        seeds = [99 | seed] * piece
        header = bytes(96) + np.array([2 * piece, len(seeds)], "<u8").tobytes()
        first_words = [*seeds, 2 * piece | alloc, 2 * piece + 1 | alloc, 99 | settled]
        records = np.array([[word, 0, 0, 0] for word in first_words], "<u8").tobytes()
        (tmp_path / f"events.{piece}.bin".replace(".0", "")).write_bytes(header.ljust(4096, b"\0") + records)
    _, read = clean_session._read_records(tmp_path)
    assert (read.view("<u8").reshape(-1, 4)[:, 0] ^ alloc).tolist() == list(range(24))


class OwnLinear(nn.Linear):
    """Has no sampler of Opacus'."""


@pytest.mark.parametrize(
    ("layer", "forced", "mode"),
    [(nn.Linear, False, "hooks"), (nn.Linear, True, "functorch"), (OwnLinear, False, "hooks")],
)
def test_functorch_is_a_mode_where_it_replaces_samplers(layer: type[nn.Linear], forced: bool, mode: str) -> None:
    assert clean_session._mode(GradSampleModule(nn.Sequential(layer(2, 2)), force_functorch=forced)) == mode


def test_a_test_with_too_many_events_has_no_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "events_status", lambda: {"dropped": 1})
    with pytest.raises(MemprofError, match="a profile holds at most 33554432 events: let the test train fewer steps"):
        clean_session.CleanSession(tmp_path, keep=False).devices_so_far()
