# SPDX-License-Identifier: Apache-2.0
"""GPUMemoryProfiler: what it records, logs, prints and exports."""

import json
import re
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import opacus_memprof
from opacus_memprof import GPUMemoryProfiler, MemprofError
from opacus_memprof.recording import native
from opacus_memprof.toolkit import readings

MB = 2**20
KEYS = ["time", "allocated", "reserved", "max_allocated", "max_reserved", "timestamp"]
on_cpu = pytest.mark.skipif(torch.cuda.device_count() > 0, reason="the figures are those of the CPU")
pytestmark = pytest.mark.usefixtures("recorder")


def block(mib: int) -> torch.Tensor:
    return torch.zeros(mib * MB, dtype=torch.uint8)


@on_cpu
def test_records_are_exact_and_exported_in_their_shape(tmp_path: Path) -> None:
    profiler = GPUMemoryProfiler(log_dir=str(tmp_path / "logs" / "run"), enable_file_logging=True)
    profiler.record("训练开始")
    in_use = block(4)
    gone = block(2)
    del gone
    profiler.record("前向传播", "loss=0.1234")
    profiler.record("前向传播", extra=0)
    path = profiler.save_to_json()
    assert path == profiler.save_to_json()
    profiler.cleanup()
    data = json.loads(Path(path).read_text(encoding="utf-8"))
    assert list(data) == ["训练开始", "前向传播"]
    assert "训练开始" in Path(path).read_text(encoding="utf-8")  # letters, not escapes
    [start], [first, second] = data["训练开始"], data["前向传播"]
    for record in (start, first, second):
        assert list(record) == KEYS
        assert all(isinstance(record[key], float) for key in KEYS[:-1])
        assert abs((datetime.now() - datetime.fromisoformat(record["timestamp"])).total_seconds()) < 60
    assert 0 == start["time"] <= first["time"] <= second["time"]
    assert first["allocated"] - start["allocated"] == in_use.nbytes / MB == 4
    assert first["max_allocated"] - start["allocated"] == 6
    assert first["reserved"] == first["allocated"]


@on_cpu
def test_the_log_is_on_the_console_and_in_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    profiler = GPUMemoryProfiler(tmp_path)
    assert profiler.log_file is not None
    assert re.fullmatch(r"memory_profiler_\d{8}_\d{6}\.log", profiler.log_file.name)
    profiler.record("模型创建\n第二行", "loss=1")
    lines = profiler.log_file.read_text(encoding="utf-8").splitlines()
    assert capsys.readouterr().out.splitlines() == lines
    name = profiler.log_file.stem.replace("memory_profiler", "MemoryProfiler")
    assert all(re.match(rf"\d{{4}}-\d\d-\d\d \d\d:\d\d:\d\d - {name} - INFO - ", line) for line in lines)
    assert "CUDA available: False" in lines[4]
    assert "sizes in MB of 2^20 bytes" in lines[6]
    assert readings.RECORDER in lines[-2]
    assert re.search(
        r"event: 模型创建 第二行 \| allocated: +\d+\.\dMB \| reserved: +\d+\.\dMB \| max allocated: +\d+\.\dMB "
        r"\| max reserved: +\d+\.\dMB \| elapsed: \d+\.\d\ds \| loss=1$",
        lines[-1],
    )


def test_a_log_may_be_removed_while_it_is_written(tmp_path: Path) -> None:
    profiler = GPUMemoryProfiler(tmp_path)
    assert profiler.log_file is not None
    profiler.log_file.unlink()
    profiler.record("event")
    assert "event: event" in profiler.log_file.read_text()


def test_only_what_is_asked_for_is_written(tmp_path: Path) -> None:
    profiler = GPUMemoryProfiler(tmp_path / "logs", enable_file_logging=False)
    profiler.record("event")
    profiler.generate_summary_report()
    profiler.print_report()
    assert not (tmp_path / "logs").exists()
    other = GPUMemoryProfiler(tmp_path / "logs", enable_file_logging=False)
    assert profiler.save_to_json() != other.save_to_json()
    assert profiler.save_to_json(tmp_path / "x" / "y.json") == str(tmp_path / "x" / "y.json")


def test_details_of_tensors_and_models(tmp_path: Path) -> None:
    profiler = GPUMemoryProfiler(tmp_path)
    tensors = {"input": torch.zeros(1024, 512, dtype=torch.float16), "weight": torch.zeros(2, requires_grad=True)}
    profiler.record_detailed("step", {**tensors, "loss": 0.5}, {"total_params": 1000000, "name": "网络"})
    profiler.record_detailed("step", model_info=nn.Linear(10, 20))
    assert profiler.log_file is not None
    log = profiler.log_file.read_text(encoding="utf-8")
    assert "tensor input: (1024, 512), torch.float16, cpu, 1.00MB\n" in log
    assert "tensor weight: (2,), torch.float32, cpu, 0.00MB, requires grad" in log
    assert "tensor loss: float, not a tensor" in log
    assert "model total_params: 1,000,000" in log
    assert "model name: 网络" in log
    assert "model trainable_params: 220" in log
    assert len(profiler.records["step"]) == 2


@on_cpu
def test_the_timeline_is_in_order_and_aligned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    in_use = native.cpu_reported_bytes() / MB
    profiler = GPUMemoryProfiler(tmp_path)
    grown = block(3)
    for event in ("初始化", "forward", "初始化"):
        profiler.record(event)
    capsys.readouterr()
    profiler.print_report()
    size = in_use + grown.nbytes / MB
    columns = f"| Allocated: {size:6.1f}MB | Reserved: {size:6.1f}MB"
    assert capsys.readouterr().out.splitlines() == [
        "==== GPU Memory Timeline =====",
        f"initialization       | Allocated: {in_use:6.1f}MB | Reserved: {in_use:6.1f}MB",
        f"初始化               {columns}",
        f"forward              {columns}",
        f"初始化               {columns}",
    ]


@on_cpu
def test_the_timeline_does_not_begin_with_what_another_has_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    opacus_memprof.uninstall()
    profiler = GPUMemoryProfiler(tmp_path)
    opacus_memprof.install("cpu")
    profiler.record("forward")
    capsys.readouterr()
    profiler.print_report()
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()[1:]] == ["forward"]


@on_cpu
def test_a_threshold_warns_and_is_a_finding(tmp_path: Path) -> None:
    live = native.cpu_reported_bytes() / MB
    profiler = GPUMemoryProfiler(tmp_path, threshold_mb=live + 5)
    for size in (4, 6, 8, 1):
        in_use = block(size)
        profiler.record("step")
        del in_use
    assert profiler.log_file is not None
    warnings = [line for line in profiler.log_file.read_text().splitlines() if " - WARNING - " in line]
    assert [line.partition("threshold: ")[2] for line in warnings] == [
        f"{live + 6:.1f}MB > {live + 5:.1f}MB",
        f"{live + 8:.1f}MB > {live + 5:.1f}MB",
    ]
    [finding] = profiler.findings()
    assert (finding["kind"], finding["bytes"]) == ("over_threshold", 3 * MB)
    assert f"{live + 8:.1f}MB" in profiler.generate_summary_report()
    with pytest.raises(MemprofError, match="threshold"):
        GPUMemoryProfiler(tmp_path, threshold_mb=-1)


@on_cpu
def test_the_summary_names_the_peak_and_a_leak(tmp_path: Path) -> None:
    profiler, kept = GPUMemoryProfiler(tmp_path), []
    for step in range(20):
        profiler.record("forward")
        if step == 10:
            block(100)
            profiler.record("评估")
        kept.append(block(1))
    text = profiler.generate_summary_report()
    peak = profiler.records["评估"][0]["max_allocated"]
    assert f"peak: {peak:.1f}MB allocated, {peak:.1f}MB reserved, reached by the event 评估" in text
    assert f"at the peak, unattributed: {peak:.2f}MB" in text
    assert [finding["kind"] for finding in profiler.findings()] == ["leak"]
    assert "+1.00MB each" in text
    [file] = tmp_path.glob("memory_summary_*.txt")
    assert file.read_text(encoding="utf-8") == text


def test_a_clean_run_has_no_findings(tmp_path: Path) -> None:
    torch.manual_seed(0)
    profiler = GPUMemoryProfiler(tmp_path)
    model = nn.Linear(128, 128)
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(30):
        features = torch.randn(int(torch.randint(100, 200, ())), 128)
        loss = model(features).square().mean()
        profiler.record("forward", f"loss={loss.item():.4f}")
        loss.backward()
        profiler.record("backward")
        optimizer.step()
        optimizer.zero_grad()
        profiler.record("step")
    assert profiler.findings() == []
    assert "no anomalies" in profiler.generate_summary_report()


def test_an_empty_profiler_reports_so(tmp_path: Path) -> None:
    profiler = GPUMemoryProfiler(tmp_path)
    assert "nothing was recorded" in profiler.generate_summary_report()
    assert json.loads(Path(profiler.save_to_json()).read_text()) == {}


def test_after_cleanup_it_is_over(tmp_path: Path) -> None:
    profiler = GPUMemoryProfiler(tmp_path)
    profiler.cleanup()
    profiler.cleanup()
    for call in (
        lambda: profiler.record("x"),
        lambda: profiler.record_detailed("x"),
        profiler.print_report,
        profiler.generate_summary_report,
        profiler.save_to_json,
        profiler.findings,
    ):
        with pytest.raises(MemprofError, match="cleaned up"):
            call()


def test_several_devices_stand_beside_the_shape(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def two(name: str | None = None) -> list[dict[str, Any]]:
        gpus = [("cuda:0", 1), ("cuda:1", 3)]
        return [
            readings.make_reading(device, readings.MEMORY_STATS, size * MB, 2 * size * MB, size * MB, 0, 40 * MB)
            for device, size in gpus
        ]

    profiler = GPUMemoryProfiler(tmp_path)
    monkeypatch.setattr(readings, "read_devices", two)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    profiler._device = "cuda:1"
    profiler.record("event")
    [record] = json.loads(Path(profiler.save_to_json()).read_text())["event"]
    assert list(record) == [*KEYS, "devices"]
    assert (record["allocated"], record["reserved"]) == (3.0, 6.0)
    assert record["devices"]["cuda:0"] == {
        "allocated": 1.0,
        "reserved": 2.0,
        "max_allocated": 1.0,
        "max_reserved": 0.0,
    }
    assert profiler.log_file is not None
    assert "GPU 1: 3.0MB / 40.0MB (7.5%)" in profiler.log_file.read_text()


def test_a_gpu_is_named_as_soon_as_cuda_is_initialised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def gpu(total: int | None) -> None:
        found = readings.make_reading("cuda:0", readings.MEMORY_STATS, 0, 0, 0, 0, total)
        monkeypatch.setattr(readings, "read_devices", lambda name=None: [found])

    gpu(None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"the name of {device}")
    profiler = GPUMemoryProfiler(tmp_path)
    profiler.record("before")
    gpu(40 * 2**30)
    for event in ("first", "second"):
        profiler.record(event)
    assert profiler.log_file is not None
    log = profiler.log_file.read_text()
    assert log.count("GPU 0: the name of cuda:0 (40.0GB)\n") == 1
    assert log.index("event: before") < log.index("GPU 0: the name") < log.index("event: first")
