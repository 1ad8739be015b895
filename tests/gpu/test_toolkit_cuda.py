# SPDX-License-Identifier: Apache-2.0
"""The toolkit's figures on a GPU, with and without the recording allocator, are those of torch.cuda.memory_stats."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import opacus_memprof
from opacus_memprof.pytest_plugin.clean_session import empty_caches

MB = 2**20


def first_gpu(snapshot: dict[str, Any]) -> dict[str, Any]:
    (device,) = [entry for entry in snapshot["devices"] if entry["device"] == "cuda:0"]
    return device


def assert_is_torchs(device: dict[str, Any], allocated: str) -> None:
    stats = torch.cuda.memory_stats(0)
    assert device["allocated_mb"] * MB == pytest.approx(stats[allocated], abs=1)
    assert device["reserved_mb"] * MB == pytest.approx(stats["reserved_bytes.all.current"], abs=1)
    assert device["max_reserved_mb"] * MB == pytest.approx(stats["reserved_bytes.all.peak"], abs=1)
    assert device["total_mb"] * MB == pytest.approx(torch.cuda.get_device_properties(0).total_memory, abs=1)


def test_without_the_allocator() -> None:
    kept = torch.zeros(1_000_003, device="cuda")
    snapshot = first_gpu(opacus_memprof.memory_snapshot("plain"))
    assert "memory_stats" in snapshot["source"]
    assert snapshot["categories_mb"] == {}
    assert_is_torchs(snapshot, "allocated_bytes.all.current")
    del kept


def test_with_the_allocator(recording: None) -> None:
    with opacus_memprof.tag("mine"):
        kept = torch.zeros(1_000_003, device="cuda")
    snapshot = first_gpu(opacus_memprof.memory_snapshot("recorded"))
    assert snapshot["categories_mb"]["mine"] * MB == pytest.approx(4_000_012, abs=1)
    assert sum(snapshot["categories_mb"].values()) * MB == pytest.approx(
        torch.cuda.memory_stats(0)["requested_bytes.all.current"], abs=1
    )
    assert_is_torchs(snapshot, "allocated_bytes.all.current")
    del kept


def test_checkpoints_see_what_was_allocated_between(tmp_path: Path) -> None:
    with opacus_memprof.create_memory_debugger(log_dir=str(tmp_path)) as debugger:
        debugger.create_memory_checkpoint("before")
        kept = torch.zeros(16 * MB // 4, device="cuda")
        debugger.create_memory_checkpoint("after")
        changes = debugger.compare_checkpoints("before", "after")["gpu_changes"]
    (change,) = [entry for entry in changes if entry["device"] == "cuda:0"]
    assert change["memory_change_mb"] == pytest.approx(16)
    del kept


def test_events_in_time(tmp_path: Path) -> None:
    profiler = opacus_memprof.GPUMemoryProfiler(log_dir=str(tmp_path), enable_file_logging=True)
    kept = torch.zeros(8 * MB // 4, device="cuda")
    profiler.record("first")
    allocated = torch.cuda.memory_allocated() / MB
    del kept
    profiler.record("second")
    written = json.loads(Path(profiler.save_to_json()).read_text())
    profiler.cleanup()
    assert written["first"][0]["allocated"] == pytest.approx(allocated)
    assert written["second"][0]["allocated"] == pytest.approx(allocated - 8)
    assert written["second"][0]["max_allocated"] == pytest.approx(torch.cuda.max_memory_allocated() / MB)


def test_training_of_lora(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    empty_caches()  # what earlier tests have left cached, and their peaks, would be found to be fragments
    torch.cuda.reset_peak_memory_stats()
    config = {"model": "tiny", "r": 4, "alpha": 8, "noise_multiplier": 1.0, "steps": 2}
    _, results = opacus_memprof.debug_lora_training(config, precision="bf16", log_dir=str(tmp_path))
    profile = json.loads((tmp_path / "profile" / "profile.json").read_text())
    device = profile["devices"]["cuda:0"]
    peak = device["peak"]
    assert [text for text in profile["warnings"] if "virtual GPU" not in text] == []
    assert sum(peak["categories"].values()) == peak["requested_bytes"] == peak["counted_bytes"]
    assert device["phases"]["clip"]["categories"]["per_sample_gradients"] > 0
    assert results["memory_issues"] == []


def test_a_function_is_monitored() -> None:
    kept, change = opacus_memprof.monitor_function(torch.zeros, 4 * MB // 4, device="cuda")
    (gpu,) = [entry for entry in change["gpu_changes"] if entry["device"] == "cuda:0"]
    assert gpu["memory_change_mb"] == pytest.approx(4)
    del kept
