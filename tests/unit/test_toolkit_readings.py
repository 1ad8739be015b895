# SPDX-License-Identifier: Apache-2.0
"""Where figures come from, on a machine with GPUs that torch makes believe."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from opacus_memprof.profiles.live_memory import DeviceCount, Snapshot
from opacus_memprof.toolkit import readings, snapshots

STATS = {
    "cuda:0": (100, 200, 150, 250),
    "cuda:1": (1, 2, 3, 4),
}
KEYS = (
    "allocated_bytes.all.current",
    "reserved_bytes.all.current",
    "allocated_bytes.all.peak",
    "reserved_bytes.all.peak",
)


@pytest.fixture(autouse=True)
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: dict(zip(KEYS, STATS[device], strict=True)))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=1000))
    monkeypatch.setattr(readings, "_recorded", lambda device: False)


def by_device(name: str | None = None) -> dict[str, dict[str, Any]]:
    return {reading["device"]: reading for reading in readings.read_devices(name)}


def test_without_the_allocator_they_are_torchs_statistics() -> None:
    found = by_device("name")
    assert list(found) == ["cuda:0", "cuda:1"]
    assert found["cuda:0"] == readings.make_reading("cuda:0", readings.MEMORY_STATS, 100, 200, 150, 250, 1000)
    assert found["cuda:1"]["max_reserved_mb"] == 4 / 2**20
    assert readings.primary_device() == "cuda:1"
    assert readings.peak_categories("cuda:1") == {}


def test_cuda_is_not_initialised_by_looking(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object) -> None:
        raise AssertionError("this would initialise CUDA")

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    for name in ("current_device", "memory_stats", "get_device_properties"):
        monkeypatch.setattr(torch.cuda, name, refuse)
    assert by_device()["cuda:1"] == readings.make_reading("cuda:1", readings.MEMORY_STATS, 0, 0, 0, 0, None)
    assert readings.primary_device() == "cuda:0"


def test_with_the_allocator_there_are_categories(monkeypatch: pytest.MonkeyPatch) -> None:
    categories = {"gradients": 60, "inputs": 40, "noise": 0}
    devices = {"cuda:0": DeviceCount(requested_bytes=100, categories=categories)}
    taken = Snapshot(index=0, name="name", unix_ns=0, step=0, logical_step=0, devices=devices)
    monkeypatch.setattr(readings, "_recorded", lambda device: device == "cuda")
    monkeypatch.setattr(readings.session, "current", lambda: None)
    monkeypatch.setattr(readings.live, "take_snapshot", lambda name: taken)
    found = by_device("name")
    assert found["cuda:0"]["categories_mb"] == {"gradients": 60 / 2**20, "inputs": 40 / 2**20}
    assert found["cuda:0"]["allocated_mb"] == 100 / 2**20
    assert {reading["source"] for reading in found.values()} == {readings.RECORDER}
    assert found["cuda:1"]["categories_mb"] == by_device()["cuda:0"]["categories_mb"] == {}


def test_a_cpu_that_is_recorded_stands_beside_the_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readings, "_recorded", lambda device: device == "cpu")
    assert list(by_device()) == ["cuda:0", "cuda:1", "cpu"]
    assert readings.primary_device() == "cpu"


def test_before_cuda_is_initialised_nothing_of_a_gpu_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    before = snapshots.take_snapshot("before")
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    changes = snapshots.difference(before, snapshots.take_snapshot("after"))["gpu_changes"]
    assert [change["utilization_change"] for change in changes] == [10.0, pytest.approx(0.1)]  # of 1000 bytes
    unknown = snapshots.difference(before, before)["gpu_changes"]
    assert [change["utilization_change"] for change in unknown] == [None, None]
