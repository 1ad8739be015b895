# SPDX-License-Identifier: Apache-2.0
"""The toolkit on the CPU with real tensors, whose sizes are the figures it must give."""

import json
import re
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import opacus_memprof
from opacus_memprof import MemprofError
from opacus_memprof.recording import native
from opacus_memprof.toolkit import output, readings
from opacus_memprof.toolkit.anomalies import MONITOR
from tests.warm_python import ENVIRONMENT, interpreter

MB = 2**20
pytestmark = pytest.mark.skipif(torch.cuda.device_count() > 0, reason="the figures are those of the CPU")


def block(mib: float) -> torch.Tensor:
    return torch.zeros(int(mib * MB), dtype=torch.uint8)


def allocated(snapshot: dict[str, Any]) -> float:
    [reading] = snapshot["devices"]
    return float(reading["allocated_mb"])


# --- snapshots ---


@pytest.mark.usefixtures("recorder")
def test_a_snapshot_counts_live_tensors_and_their_peak() -> None:
    before = opacus_memprof.memory_snapshot("before")
    kept, dropped = block(2), block(3)
    del dropped
    after = opacus_memprof.memory_snapshot("after")
    [reading] = after["devices"]
    assert (reading["device"], reading["source"]) == ("cpu", readings.RECORDER)
    assert allocated(after) - allocated(before) == 2
    assert reading["max_allocated_mb"] - allocated(before) == 5
    assert sum(reading["categories_mb"].values()) == reading["allocated_mb"]
    [change] = opacus_memprof.compare_snapshots(before, after)["gpu_changes"]
    assert change["memory_change_mb"] == 2
    assert change["categories_change_mb"] == {"unattributed": 2}
    assert kept.numel() == 2 * MB


def test_without_the_allocator_it_is_the_process_that_is_counted() -> None:
    before = opacus_memprof.memory_snapshot("before")
    tensors_in_use = block(64)
    [change] = opacus_memprof.compare_snapshots(before, opacus_memprof.memory_snapshot("after"))["gpu_changes"]
    assert before["devices"][0]["source"] == readings.RESIDENT
    assert 60 <= change["memory_change_mb"] <= 80
    assert "not installed" in opacus_memprof.generate_report()
    assert tensors_in_use[0] == 0


def test_the_machine_is_described_as_the_system_does() -> None:
    system = opacus_memprof.memory_snapshot()["system"]
    meminfo = Path("/proc/meminfo").read_text()
    assert system["total_mb"] == int(re.search(r"MemTotal:\s+(\d+)", meminfo)[1]) / 1024  # type: ignore[index]
    assert 0 < system["available_mb"] < system["total_mb"]


def test_snapshots_that_cannot_be_compared() -> None:
    plain = opacus_memprof.memory_snapshot("plain")
    opacus_memprof.install("cpu")
    recorded = opacus_memprof.memory_snapshot("recorded")
    opacus_memprof.uninstall()
    with pytest.raises(MemprofError, match="counted differently"):
        opacus_memprof.compare_snapshots(plain, recorded)
    other = {**plain, "devices": [{**plain["devices"][0], "device": "cuda:0"}]}
    with pytest.raises(MemprofError, match="different devices"):
        opacus_memprof.compare_snapshots(plain, other)
    for wrong in ({}, None, {"devices": [3]}):
        with pytest.raises(MemprofError, match="two snapshots"):
            opacus_memprof.compare_snapshots(plain, wrong)  # type: ignore[arg-type]


def test_a_snapshot_stays_in_the_running_profile(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with opacus_memprof.profile(tmp_path / "profile", device="cpu"):
        tensors_in_use = block(1)
        snapshot = opacus_memprof.memory_snapshot("第一步")
        opacus_memprof.memory_snapshot("\udc80 of a file's name")
        opacus_memprof.memory_snapshot(7)  # type: ignore[arg-type]
    caplog.text.encode()  # every handler can write what was logged
    profile = json.loads((tmp_path / "profile" / "profile.json").read_text())
    [kept] = [snapshot for snapshot in profile["devices"]["cpu"]["snapshots"] if snapshot["name"] == "第一步"]
    assert kept["requested_bytes"] == allocated(snapshot) * MB >= tensors_in_use.nbytes
    assert kept["remainder"] == 0


@pytest.mark.usefixtures("recorder")
def test_status_cleanup_and_report(tmp_path: Path) -> None:
    assert opacus_memprof.check_memory_status(threshold_mb=100.0) == []
    tensors_in_use = [block(2)]
    tensors_in_use.append(tensors_in_use)  # type: ignore[arg-type]
    [issue] = opacus_memprof.check_memory_status(threshold_mb=1.0)
    assert issue["kind"] == "over_threshold"
    del tensors_in_use
    [change] = opacus_memprof.cleanup_memory()["gpu_changes"]
    assert change["memory_change_mb"] == -2  # the cycle
    output.clear_journal()
    opacus_memprof.memory_snapshot("阶段")
    report = opacus_memprof.generate_report(tmp_path / "deep" / "report.txt")
    assert (tmp_path / "deep" / "report.txt").read_text(encoding="utf-8") == report
    assert "阶段" in report
    assert "no anomalies" in report
    for threshold in (-1.0, float("nan"), "many"):
        with pytest.raises(MemprofError, match="threshold"):
            opacus_memprof.check_memory_status(threshold)  # type: ignore[arg-type]


# --- models and functions ---


def test_a_model_is_counted() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(10, 6)
            self.layers = nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 6)])
            self.norm = nn.BatchNorm1d(6)
            self.head = nn.Linear(6, 10, bias=False)
            self.head.weight = self.embed.weight

    model = Net()
    model.embed.weight.requires_grad_(False)
    found = opacus_memprof.analyze_model(model, "net")
    assert (found["total"], found["trainable"]) == (60 + 2 * 42 + 12, 2 * 42 + 12)
    assert found["memory_mb"] == (156 * 4 + 12 * 4 + 8) / MB  # with running mean, variance and batch count
    assert found["param_efficiency"] == 100 * 96 / 156
    assert {name: layer["total"] for name, layer in found["layers"].items()} == {
        "embed": 60,
        "layers.0": 42,
        "layers.1": 42,
        "norm": 12,
    }
    [weight] = [entry for entry in found["parameters"] if entry["name"] == "layers.1.weight"]
    assert (weight["shape"], weight["dtype"], weight["numel"], weight["trainable"]) == ([6, 6], "float32", 36, True)
    assert found["findings"] == []
    for layer in model.layers:
        layer(torch.ones(2, 6)).sum().backward()
    assert opacus_memprof.analyze_model(model)["summary"]["gradients_mb"] == 84 * 4 / MB
    with pytest.raises(MemprofError, match=r"nn\.Module"):
        opacus_memprof.analyze_model([])  # type: ignore[arg-type]


def test_a_model_that_is_only_analyzed_is_attributed(tmp_path: Path) -> None:
    with opacus_memprof.profile(tmp_path / "out", device="cpu") as session:
        model = nn.Sequential(nn.Linear(1024, 1024), nn.BatchNorm1d(1024))
        opacus_memprof.analyze_model(model)
        with torch.no_grad():
            model(torch.ones(4, 1024))
    assert session.result is not None
    held = session.result.devices["cpu"].peak.modules
    assert held["0"]["model_parameters"] == (1024 * 1024 + 1024) * 4
    assert held["1"]["model_parameters"] == 2 * 1024 * 4
    assert held["1"]["buffers"] == 2 * 1024 * 4 + 8


def test_per_sample_gradients_are_counted() -> None:
    from opacus import GradSampleModule

    model = GradSampleModule(nn.Linear(6, 5))
    model(torch.ones(3, 6)).sum().backward()
    found = opacus_memprof.analyze_model(model)
    assert found["total"] == 35
    assert [entry["name"] for entry in found["parameters"]] == ["weight", "bias"]
    assert found["summary"]["per_sample_gradients_mb"] == 3 * 35 * 4 / MB


@pytest.mark.usefixtures("recorder")
def test_a_function_is_monitored() -> None:
    def make(size: int, *, times: int) -> list[torch.Tensor]:
        return [block(size) for _ in range(times)]

    made, change = opacus_memprof.monitor_function(make, 2, times=3)
    assert len(made) == 3
    assert change["gpu_changes"][0]["memory_change_mb"] == 6
    assert change["duration_s"] >= 0
    with pytest.raises(ZeroDivisionError):
        opacus_memprof.monitor_function(lambda: 1 // 0)
    with pytest.raises(MemprofError, match="pass a function"):
        opacus_memprof.monitor_function(3)  # type: ignore[arg-type]


def test_a_function_that_installs_the_allocator_keeps_its_result() -> None:
    try:
        result, change = opacus_memprof.monitor_function(lambda: opacus_memprof.install("cpu") or "done")  # type: ignore[func-returns-value]
    finally:
        opacus_memprof.uninstall()
    assert result == "done"
    assert change["gpu_changes"] == []


# --- the debugger ---


@pytest.mark.usefixtures("recorder")
def test_checkpoints(tmp_path: Path) -> None:
    with opacus_memprof.create_memory_debugger(log_dir=tmp_path / "logs") as debugger:
        debugger.create_memory_checkpoint("开始")
        tensors_in_use = block(4)
        debugger.create_memory_checkpoint("之后")
        [change] = debugger.compare_checkpoints("开始", "之后")["gpu_changes"]
        report = debugger.generate_memory_report()
        with pytest.raises(MemprofError, match='there is no checkpoint "x": the checkpoints are: "开始", "之后"'):
            debugger.compare_checkpoints("开始", "x")
    assert change["memory_change_mb"] == 4 == tensors_in_use.nbytes / MB
    assert (tmp_path / "logs" / "memory_report.txt").read_text(encoding="utf-8") == report
    [history] = (tmp_path / "logs").glob("memory_history_*.jsonl")
    assert [json.loads(line)["name"] for line in history.read_text(encoding="utf-8").splitlines()] == ["开始", "之后"]
    assert "no anomalies" in report


@pytest.mark.usefixtures("recorder")
def test_monitoring_in_the_background(tmp_path: Path) -> None:
    debugger = opacus_memprof.create_memory_debugger(tmp_path)
    debugger.start_real_time_monitoring(interval=0.01)
    tensors_in_use = block(3)
    seen = _live()
    deadline = time.monotonic() + 10
    while not any(allocated(snapshot) == seen for snapshot in debugger.memory_history) and time.monotonic() < deadline:
        time.sleep(0.01)
    debugger.stop()
    readings = len(debugger.memory_history)
    time.sleep(0.05)
    assert len(debugger.memory_history) == readings > 0
    assert {snapshot["name"] for snapshot in debugger.memory_history} == {MONITOR}
    assert max(allocated(snapshot) for snapshot in debugger.memory_history) == seen >= tensors_in_use.nbytes / MB
    assert f"monitoring: {readings} readings" in debugger.generate_memory_report(tmp_path / "r.txt")
    debugger.memory_history = debugger.memory_history[-1:]
    debugger.start_real_time_monitoring(0.01)
    debugger.stop_real_time_monitoring()


def _live() -> float:
    return native.cpu_reported_bytes() / MB


def test_real_time_from_the_start_and_then_at_another_interval(tmp_path: Path) -> None:
    with opacus_memprof.create_memory_debugger(tmp_path, enable_real_time=True) as debugger:
        threads = threading.active_count()
        debugger.start_real_time_monitoring(interval=0.01)
        assert threading.active_count() == threads  # it replaces the first
        deadline = time.monotonic() + 10
        while len(debugger.memory_history) < 5 and time.monotonic() < deadline:
            time.sleep(0.01)
        debugger.stop()
        debugger.stop()
    assert len(debugger.memory_history) >= 5


@pytest.mark.parametrize("interval", [0, -1.0, float("nan"), float("inf"), "1"])
def test_an_interval_that_is_none(interval: Any, tmp_path: Path) -> None:
    with pytest.raises(MemprofError, match="positive number of seconds"):
        opacus_memprof.create_memory_debugger(tmp_path).start_real_time_monitoring(interval)


def test_monitoring_that_cannot_be_written_ends_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    debugger = opacus_memprof.create_memory_debugger(tmp_path / "file")
    debugger.start_real_time_monitoring(0.001)
    printed, deadline = "", time.monotonic() + 10
    while "monitoring ends" not in printed and time.monotonic() < deadline:
        time.sleep(0.01)
        printed += capsys.readouterr().out
    debugger.stop()
    assert "[WARNING] monitoring ends: cannot write" in printed


@pytest.mark.usefixtures("recorder")
def test_a_planted_leak_and_clean_steps(tmp_path: Path) -> None:
    model, kept = nn.Linear(64, 64), []
    debugger = opacus_memprof.create_memory_debugger(tmp_path)
    for step in range(40):
        output = model(torch.ones(256 + 16 * (step % 3), 64))
        output.sum().backward()
        model.zero_grad()
        debugger.create_memory_checkpoint("step")
    assert debugger.check_memory_anomalies() == []
    debugger.memory_history.clear()
    for _ in range(20):
        kept.append(model(torch.ones(2048, 64)))  # 0.5 MB of output and 0.5 MB of input
        debugger.create_memory_checkpoint("step")
    [leak] = debugger._check_memory_anomalies(threshold_mb=200.0)
    assert leak["kind"] == "leak"
    assert "+1.00MB each" in leak["evidence"]
    del kept


# --- what it rests on ---


def test_it_works_without_the_extension() -> None:
    program = """
import sys
sys.modules["opacus_memprof._C"] = None
import torch, opacus_memprof as o
a = o.memory_snapshot("a")
print(a["devices"][0]["source"])
with o.memory_profiled_training("logs") as profiler:
    profiler.profile_stage("stage", torch.zeros, 3)
print(profiler.session, "training" in open("logs/training_report.txt").read())
p = o.GPUMemoryProfiler("logs")
p.record("e")
"""
    import tempfile

    with tempfile.TemporaryDirectory() as directory:
        command = [*interpreter(), "-c", program]
        run = subprocess.run(command, capture_output=True, text=True, cwd=directory, env=ENVIRONMENT, timeout=120)
    assert run.returncode == 0, run.stderr
    assert readings.RESIDENT in run.stdout
    assert "None True" in run.stdout
    assert "no session is recorded" in run.stdout
