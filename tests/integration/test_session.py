# SPDX-License-Identifier: Apache-2.0
"""The Python API, on the CPU with real torch and real Opacus."""

import contextlib
import gc
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import opacus
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import opacus_memprof
from opacus_memprof.profiles.categories import REPORTED
from opacus_memprof.recording import allocators, faults, native, observations
from opacus_memprof.session.result import Result

MIB = 2**20
BATCH = 8
WEIGHTS = (16 * 32 + 32 + 32 * 4 + 4) * 4  # bytes of the model below


@pytest.fixture(autouse=True)
def restored_torch() -> Iterator[None]:
    """No test leaves a session or an allocator behind, nor starts with what an earlier one's cycles keep alive."""
    gc.collect()
    assert native.live_blocks() == []
    yield
    left = opacus_memprof.session.current()
    if left is not None:
        left.close()
    installed = native.cpu_installed()
    opacus_memprof.uninstall()
    assert left is None
    assert not installed


def block(mib: float) -> torch.Tensor:
    return torch.empty(int(mib * MIB), dtype=torch.uint8)


def private(engine: opacus.PrivacyEngine, **options: Any) -> tuple[Any, ...]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    data = TensorDataset(torch.randn(3 * BATCH, 16), torch.randint(4, (3 * BATCH,)))
    return engine.make_private(
        module=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=1e-2),
        criterion=nn.CrossEntropyLoss(),
        data_loader=DataLoader(data, batch_size=BATCH),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        poisson_sampling=False,
        **options,
    )


def train(prepared: tuple[Any, ...], session: opacus_memprof.Session | None = None) -> list[float]:
    model, optimizer, *criteria, loader = prepared
    criterion = criteria[0] if criteria else nn.CrossEntropyLoss()
    losses = []
    for features, labels in loader:
        optimizer.zero_grad()
        loss = criterion(model(features), labels)
        loss.backward()
        if session is not None:
            session.snapshot("after backward")
        optimizer.step()
        if session is not None:
            session.snapshot("after step")
        losses.append(loss.item())
    return losses


def snapshots_of(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / "snapshots.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("mode", ["hooks", "ghost"])
def test_every_snapshot_reconciles_and_nothing_changes(tmp_path: Path, mode: str) -> None:
    unprofiled = train(private(opacus.PrivacyEngine(), grad_sample_mode=mode))
    with opacus_memprof.profile(tmp_path / "out", device="cpu") as session:
        engine = opacus.PrivacyEngine()
        session.attach(engine)
        assert train(private(engine, grad_sample_mode=mode), session) == unprofiled
    snapshots = snapshots_of(tmp_path / "out")
    assert [entry["name"] for entry in snapshots] == ["after backward", "after step"] * 3 + ["end"]
    assert [entry["step"] for entry in snapshots] == [snapshots[0]["step"] + i for i in (0, 1, 1, 2, 2, 3, 3)]
    for entry in snapshots:
        counts = entry["devices"]["cpu"]
        assert sum(counts["categories"].values()) == counts["requested_bytes"] == counts["allocated_bytes"]
        assert counts["remainder"] == counts["rounding"] == counts["cached"] == 0
        assert counts["outside_pytorch"] is None
        assert counts["categories"]["model_parameters"] == WEIGHTS
    after_backward, after_step = (snapshots[index]["devices"]["cpu"]["categories"] for index in (2, 3))
    assert after_backward["per_sample_gradients"] == (BATCH * WEIGHTS if mode == "hooks" else 0)
    assert after_backward["gradients"] == WEIGHTS
    assert after_backward["optimizer_states"] == after_step["optimizer_states"] == 2 * WEIGHTS + 4 * 4
    assert after_step["summed_gradients"] == WEIGHTS
    # The same figures are in profile.json, from the event file.
    profile = json.loads((tmp_path / "out" / "profile.json").read_text())
    replayed = {entry["index"]: entry for entry in profile["devices"]["cpu"]["snapshots"]}
    for entry in snapshots:
        assert replayed[entry["index"]]["requested_bytes"] == entry["devices"]["cpu"]["requested_bytes"]
    assert profile["warnings"] == []


def test_what_another_profiler_saw_does_not_count(tmp_path: Path) -> None:
    """c10 keeps counting blocks that torch.profiler saw the birth of and not the end; those are not ours."""
    with torch.profiler.profile(profile_memory=True):
        theirs = block(1)
    del theirs
    with opacus_memprof.profile(tmp_path / "out", device="cpu") as session:
        with torch.profiler.profile(profile_memory=True):
            both = block(2)
        counts = session.snapshot("both")["devices"]["cpu"]
        assert counts["allocated_bytes"] == counts["requested_bytes"] == 2 * MIB
        assert counts["remainder"] == 0
        del both
        with torch.profiler.profile(profile_memory=True):
            mine = block(4)
            del mine
        assert session.snapshot("none")["devices"]["cpu"]["remainder"] == 0


@pytest.mark.parametrize("attached", ["class", "prepared", "drop-in"])
def test_ways_to_attach(tmp_path: Path, attached: str) -> None:
    with opacus_memprof.profile(tmp_path / "out", device="cpu") as session:
        engine = opacus_memprof.PrivacyEngine() if attached == "drop-in" else opacus.PrivacyEngine()
        if attached == "class":
            session.attach(opacus.PrivacyEngine)
        prepared = private(engine, grad_sample_mode="ghost")
        if attached == "prepared":
            session.attach(*prepared)
        train(prepared)
        counts = session.breakdown()["cpu"]
    assert counts["model_parameters"] == WEIGHTS
    assert counts["summed_gradients"] == WEIGHTS
    assert counts["optimizer_states"] == 2 * WEIGHTS + 4 * 4


def test_a_plain_model(tmp_path: Path) -> None:
    with opacus_memprof.profile(tmp_path / "out", device="cpu") as session:
        model = nn.Linear(100, 10, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        session.attach(model, optimizer)
        model(torch.ones(1, 100)).sum().backward()
        optimizer.step()
        counts = session.breakdown()["cpu"]
    assert counts["model_parameters"] == counts["gradients"] == counts["optimizer_states"] == 4000


def test_what_cannot_be_attached_is_refused(tmp_path: Path) -> None:
    with (
        opacus_memprof.profile(tmp_path / "out", device="cpu") as session,
        pytest.raises(opacus_memprof.MemprofError, match="cannot attach a str"),
    ):
        session.attach("model")


def test_the_peak_is_one_instant(tmp_path: Path) -> None:
    with opacus_memprof.profile(tmp_path / "out", device="cpu") as session:
        with opacus_memprof.tag("teacher"):
            first = block(4)
        second = block(2)
        del first
        third = block(3)
        live = session.breakdown()["cpu"]
        peak = session.peak()["cpu"]
        del second, third
    assert live == {"unattributed": 5 * MIB}
    assert peak["requested_bytes"] == 6 * MIB
    assert {name: count for name, count in peak["categories"].items() if count} == {
        "teacher": 4 * MIB,
        "unattributed": 2 * MIB,
    }
    written = json.loads((tmp_path / "out" / "profile.json").read_text())["devices"]["cpu"]["peak"]
    assert {**written, "unix_ns": 0} == {**peak, "unix_ns": 0}  # the clock's line is known better at the end


def test_the_peak_without_room_for_events(tmp_path: Path) -> None:
    with opacus_memprof.profile(tmp_path / "out", device="cpu", max_events=2) as session:
        for _ in range(3):
            block(1)
        with opacus_memprof.tag("teacher"):
            late = block(8)
        del late
        peak = session.peak()["cpu"]
    assert peak["requested_bytes"] == peak["categories"]["teacher"] == 8 * MIB


def test_live_figures_are_the_same_during_and_after(tmp_path: Path) -> None:
    """In the categories of reports."""
    with opacus_memprof.profile(tmp_path / "out", device="cpu") as session:
        session.attach(opacus.PrivacyEngine)
        model, _, loader = private(opacus.PrivacyEngine())
        features, _ = next(iter(loader))
        loss = model(features).sum()
        live, snapshot, peak = session.breakdown()["cpu"], session.snapshot("now").devices["cpu"], session.peak()["cpu"]
        assert session.peak()["cpu"] is peak  # nothing has happened: the events were not read again
        in_use = block(1)
        at_end = session.breakdown()
        assert session.peak()["cpu"].requested_bytes == sum(at_end["cpu"].values()) > MIB
    assert live.keys() <= set(REPORTED) | {"forward_undecided"}
    assert {name: size for name, size in snapshot.categories.items() if size} == live
    assert sum(dict(snapshot.activation_hooks).values()) == live["activation_hooks"] > 0
    assert session.breakdown() == at_end
    assert session.peak()["cpu"] is session.result.devices["cpu"].peak
    with pytest.raises(opacus_memprof.MemprofError, match="between its start and its end"):
        session.snapshot("late")
    assert [entry["name"] for entry in snapshots_of(tmp_path / "out")] == ["now", "end"]
    del in_use, loss


def test_without_a_profile_there_is_no_peak(tmp_path: Path) -> None:
    session = opacus_memprof.profile(tmp_path / "out", device="cpu")
    with pytest.raises(opacus_memprof.MemprofError, match="not started, or has left no profile"):
        session.peak()
    session.start()
    session.discard()
    with pytest.raises(opacus_memprof.MemprofError, match="not started, or has left no profile"):
        session.peak()
    with opacus_memprof.profile(tmp_path / "out", device="cpu"):
        pass  # the directory is free again


def test_tags(tmp_path: Path) -> None:
    @opacus_memprof.tag("inputs")
    def load() -> torch.Tensor:
        return block(1)

    assert load.__name__ == "load"
    with opacus_memprof.profile(tmp_path / "out", device="cpu") as session:
        kept = [load()]
        with opacus_memprof.tag("teacher"):
            kept.append(block(2))
            with opacus_memprof.tag("inputs"):
                kept.append(block(4))
            kept.append(block(8))
        kept.append(block(16))
        live = session.breakdown()["cpu"]
    assert live == {"inputs": 5 * MIB, "teacher": 10 * MIB, "unattributed": 16 * MIB}


def test_install_and_uninstall_at_any_time() -> None:
    before = block(1)
    for _ in range(2):
        opacus_memprof.install("cpu")
    during = block(2)
    counted = native.snapshot("during")["devices"]["cpu"]["requested_bytes"]
    for _ in range(2):
        opacus_memprof.uninstall()
    after = block(4)
    assert native.snapshot("after")["devices"]["cpu"]["requested_bytes"] == counted >= 2 * MIB
    del before, during, after
    assert native.snapshot("freed")["devices"]["cpu"]["requested_bytes"] == counted - 2 * MIB


def test_a_session_leaves_an_allocator_that_was_there(tmp_path: Path) -> None:
    opacus_memprof.install("cpu")
    with opacus_memprof.profile(tmp_path / "out", device="cpu"):
        pass
    assert native.cpu_installed()
    opacus_memprof.uninstall()


def test_one_session_at_a_time(tmp_path: Path) -> None:
    with opacus_memprof.profile(tmp_path / "out", device="cpu") as session:
        assert opacus_memprof.session.current() is session
        with pytest.raises(opacus_memprof.MemprofError, match="one session at a time"):
            opacus_memprof.profile(tmp_path / "other", device="cpu").start()
    assert opacus_memprof.session.current() is None
    assert not (tmp_path / "other").exists()


def test_a_later_session_starts_anew(tmp_path: Path) -> None:
    for _ in range(2):
        with opacus_memprof.profile(tmp_path / "out", device="cpu") as session:
            large = block(8)
            del large
            session.snapshot("mine")
            with pytest.warns(RuntimeWarning, match="trouble"):
                faults.record("trouble of this session")
            observations.record("ghost_accumulated", 0, 2)
        assert [finding.kind for finding in session.result.findings] == ["discarded_backward_passes"]
        assert session.result.warnings == ["trouble of this session"]
    assert [entry["name"] for entry in snapshots_of(tmp_path / "out")] == ["mine", "end"]
    with opacus_memprof.profile(tmp_path / "out", device="cpu") as session:
        small = block(1)
        assert session.peak()["cpu"]["requested_bytes"] == MIB
        del small
    profile = json.loads((tmp_path / "out" / "profile.json").read_text())
    assert profile["devices"]["cpu"]["peak"]["requested_bytes"] == MIB
    assert profile["findings"] == profile["warnings"] == []


@pytest.mark.parametrize(
    ("error", "status", "code", "line"),
    [
        (ValueError("bad\nvery bad"), "failed", 1, "ValueError: bad"),
        (SystemExit(3), "failed", 3, None),
        (SystemExit(259), "failed", 3, None),  # a shell sees a byte
        (SystemExit("text"), "failed", 1, "SystemExit: text"),
        (SystemExit(), "finished", 0, None),
        (KeyboardInterrupt(), "killed", 130, "KeyboardInterrupt"),
        (torch.OutOfMemoryError("CUDA out of memory."), "out_of_memory", 1, "OutOfMemoryError: CUDA out of memory."),
    ],
)
def test_how_a_block_ends(tmp_path: Path, error: BaseException, status: str, code: int, line: str | None) -> None:
    with pytest.raises(type(error)), opacus_memprof.profile(tmp_path / "out", device="cpu"):
        raise error
    profile = json.loads((tmp_path / "out" / "profile.json").read_text())
    assert (profile["status"], profile["exit_code"], profile["error"]) == (status, code, line)


def test_memory_that_ran_out_anywhere_in_the_chain(tmp_path: Path) -> None:
    with contextlib.suppress(KeyError), opacus_memprof.profile(tmp_path / "out", device="cpu"):
        try:
            try:
                block(2**40)
            except RuntimeError as error:
                raise ValueError("no batch") from error
        finally:
            {}["missing"]
    assert json.loads((tmp_path / "out" / "profile.json").read_text())["status"] == "out_of_memory"


def test_an_allocator_that_somebody_swaps(tmp_path: Path) -> None:
    with opacus_memprof.profile(tmp_path / "out", device="cpu"):
        opacus_memprof.uninstall()
    (warning,) = json.loads((tmp_path / "out" / "profile.json").read_text())["warnings"]
    assert "replaced" in warning


def test_an_unwritable_profile_does_not_end_the_training(tmp_path: Path) -> None:
    session = opacus_memprof.profile(tmp_path / "out", device="cpu")
    session.start()
    shutil.rmtree(tmp_path / "out")
    with pytest.warns(RuntimeWarning, match="profile"):
        session.__exit__(None, None, None)


def test_a_child_that_leaves_the_block_leaves_the_profile(tmp_path: Path) -> None:
    with opacus_memprof.profile(tmp_path / "out", device="cpu") as session:
        if os.fork() == 0:
            with contextlib.suppress(opacus_memprof.MemprofError):
                session.snapshot("of the child")
                os._exit(1)
            session.__exit__(None, None, None)
            os._exit(opacus_memprof.session.current() is not None)
        assert os.wait()[1] == 0
        assert not (tmp_path / "out" / "profile.json").exists()
        kept = block(1)
        assert session.breakdown() == {"cpu": {"unattributed": MIB}}
        del kept


def test_a_start_that_is_refused_changes_nothing(tmp_path: Path) -> None:
    with pytest.raises(opacus_memprof.MemprofError, match="cannot write a profile"):
        opacus_memprof.profile("/proc/memprof", device="cpu").start()
    with pytest.raises(opacus_memprof.MemprofError, match='no device "tpu"'):
        opacus_memprof.profile(tmp_path / "out", device="tpu").start()
    for max_events in (0, 2**59, 2**64):
        with pytest.raises(opacus_memprof.MemprofError, match=f"max_events must be .*, not {max_events}"):
            opacus_memprof.profile(tmp_path / "out", device="cpu", max_events=max_events).start()
    with pytest.raises(opacus_memprof.MemprofError, match="stream_interval"):
        opacus_memprof.profile(tmp_path / "out", device="cpu", stream=[], stream_interval=0).start()
    assert not native.cpu_installed()
    assert opacus_memprof.session.current() is None
    assert not (tmp_path / "out").exists()


def test_a_start_that_is_refused_leaves_an_earlier_profile(tmp_path: Path) -> None:
    with opacus_memprof.profile(tmp_path / "out", device="cpu"):
        pass
    refused = opacus_memprof.profile(tmp_path / "out", device="cpu")
    with (
        patch.object(allocators, "install", side_effect=opacus_memprof.MemprofError("another allocator")),
        pytest.raises(opacus_memprof.MemprofError, match="another allocator"),
    ):
        refused.start()
    assert (tmp_path / "out" / "profile.json").exists()
    with opacus_memprof.profile(tmp_path / "out", device="cpu"):
        pass  # the directory is free again


@pytest.mark.parametrize(
    ("error", "dropped", "is_told"), [("no space", 3, True), ("", 3, False), ("no space", 0, False)]
)
def test_events_that_a_full_disk_has_cost_are_told(error: str, dropped: int, is_told: bool, tmp_path: Path) -> None:
    result = Result(tmp_path, [])
    with patch.object(native, "events_status", return_value={"error": error, "dropped": dropped}):
        result.read_figures()
    assert result.warnings == ["the event files could not grow (no space): events are missing"] * is_told
