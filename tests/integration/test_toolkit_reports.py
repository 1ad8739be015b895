# SPDX-License-Identifier: Apache-2.0
"""The toolkit's words and reports: they are printed whatever Opacus does to logging, and forget nothing."""

import logging
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import opacus_memprof
from opacus_memprof.toolkit import output
from opacus_memprof.toolkit.output import LOGGER
from tests.warm_python import ENVIRONMENT, interpreter

MB = 2**20


@pytest.fixture(autouse=True)
def empty_journal() -> Iterator[None]:
    output.clear_journal()
    yield
    output.clear_journal()


def block(mib: int) -> torch.Tensor:
    return torch.zeros(mib * MB, dtype=torch.uint8)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 8)
        self.layers = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])
        self.head = nn.Linear(8, 3_300_000, bias=False)  # just above 100 MB


def test_it_is_printed_after_opacus_was_imported(tmp_path: Path) -> None:
    """Importing Opacus calls logging.basicConfig."""
    program = """
import logging, sys, opacus, torch, opacus_memprof
assert logging.getLogger().handlers
opacus_memprof.memory_snapshot("before training")
opacus_memprof.analyze_model(torch.nn.Linear(30, 10), "a layer")
sys.argv = ["opacus-memprof", "debug", "--level", "full", "--log-dir", sys.argv[1]]
from opacus_memprof.cli import main
main()
"""
    command = [*interpreter(), "-c", program, str(tmp_path)]
    ran = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr
    lines = ran.stdout.splitlines()
    assert lines[0] == "[INFO] memory snapshot: before training"
    assert "[INFO]   total parameters: 310" in lines
    for line in ("memory snapshot: training: end", "model analysis: training"):
        assert f"[INFO] {line}" in lines
    assert "opacus_memprof.toolkit" not in ran.stderr


def test_a_report_has_what_analyze_model_found() -> None:
    model = Net()
    with torch.no_grad():
        model.embed.weight[0, 0] = float("nan")
        model.layers[0].weight[1, 1] = float("inf")
    opacus_memprof.analyze_model(model, "first")
    report = opacus_memprof.generate_report()
    assert "no anomalies" not in report
    assert "parameter contains NaN: embed.weight" in report
    assert "parameter contains Inf: layers.0.weight" in report
    assert "large parameter: head.weight" in report


def test_a_report_has_the_table_of_parameters_and_of_layers() -> None:
    model = Net()
    model.embed.weight.requires_grad_(False)
    opacus_memprof.analyze_model(model, "网络")
    lines = [line.split() for line in opacus_memprof.generate_report().splitlines()]
    assert ["embed", "400", "0", "0.00"] in lines
    assert ["layers.1", "72", "72", "0.00"] in lines
    assert ["head", "26,400,000", "26,400,000", "100.71"] in lines
    for name, parameter in model.named_parameters():
        trainable = "yes" if parameter.requires_grad else "no"
        [row] = [line for line in lines if line[:1] == [name]]
        assert row[1:4] == [f"{parameter.numel():,}", trainable, f"{parameter.nbytes / MB:.2f}"]
        assert row[-2:] == ["float32,", "cpu"]


def test_of_one_name_the_latest_table_stands_and_all_findings() -> None:
    broken, sound = nn.Linear(3, 2), nn.Linear(5, 2)
    with torch.no_grad():
        broken.bias[0] = float("nan")
    for model in (broken, broken, sound):
        opacus_memprof.analyze_model(model, "net")
    report = opacus_memprof.generate_report()
    assert "model net: 12 parameters" in report
    assert "8 parameters" not in report
    assert report.count("parameter contains NaN: bias") == 1


def test_a_report_has_what_check_memory_status_found(tmp_path: Path) -> None:
    opacus_memprof.check_memory_status(threshold_mb=0.0)
    assert "memory use exceeds the threshold" in opacus_memprof.generate_report()
    with opacus_memprof.create_memory_debugger(tmp_path) as debugger:  # what was found before it is not its own
        assert "no anomalies" in debugger.generate_memory_report()


@pytest.fixture
def recorder() -> Iterator[None]:
    opacus_memprof.install("cpu")
    yield
    opacus_memprof.uninstall()


@pytest.mark.usefixtures("recorder")
def test_reports_have_differences_between_checkpoints(tmp_path: Path) -> None:
    with opacus_memprof.create_memory_debugger(tmp_path) as debugger:
        debugger.create_memory_checkpoint("start")
        kept = block(5)
        debugger.create_memory_checkpoint("after")
        debugger.compare_checkpoints("start", "after")
        for report in (debugger.generate_memory_report(), opacus_memprof.generate_report()):
            [at] = [number for number, line in enumerate(report.splitlines()) if "start -> after" in line]
            assert "memory change +5.0MB" in report.splitlines()[at + 1]
    assert kept.nbytes == 5 * MB


def test_a_report_says_where_who_counts_has_changed() -> None:
    opacus_memprof.memory_snapshot("before")
    opacus_memprof.install("cpu")
    opacus_memprof.memory_snapshot("recorded")
    lines = opacus_memprof.generate_report().splitlines()
    opacus_memprof.uninstall()
    assert [line.endswith("from here on") for line in lines if line.startswith("  CPU: ")] == [False, True, False]


@pytest.mark.usefixtures("recorder")
def test_growth_between_two_checkpoints_is_reported(tmp_path: Path) -> None:
    debugger: Any = opacus_memprof.create_memory_debugger(tmp_path)
    debugger.create_memory_checkpoint("start")
    kept = block(30)
    debugger.create_memory_checkpoint("after")
    in_use = debugger.memory_history[-1]["devices"][0]["allocated_mb"]
    assert debugger._check_memory_anomalies(threshold_mb=in_use + 1) == []
    growth, use = debugger._check_memory_anomalies(threshold_mb=20.0)
    assert (growth["kind"], growth["bytes"]) == ("sudden_growth", kept.nbytes)
    assert (use["kind"], use["bytes"]) == ("over_threshold", pytest.approx((in_use - 20) * 2**20))
    for report in (debugger.generate_memory_report(), opacus_memprof.generate_report()):
        assert 'memory grew by 30.0MB from "start" to "after"' in report
    debugger.stop()


@pytest.mark.parametrize(
    ("root", "own", "says"),
    [(logging.ERROR, logging.INFO, ""), (logging.DEBUG, logging.INFO, "INFO"), (logging.ERROR, logging.DEBUG, "INFO")],
)
def test_the_toolkit_s_level_overrides_the_root_logger_s(
    root: int, own: int, says: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(logging.getLogger(), "level", root)
    monkeypatch.setattr(LOGGER, "level", own)
    LOGGER.manager._clear_cache()  # type: ignore[attr-defined]
    opacus_memprof.memory_snapshot("a name")
    said = capsys.readouterr().out
    assert ("memory snapshot: a name" in said) == bool(says)
    layer = nn.Linear(1, 1)
    nn.init.constant_(layer.weight, float("nan"))
    opacus_memprof.analyze_model(layer, "spoilt")
    assert "[ERROR] parameter contains NaN: weight" in capsys.readouterr().out


def test_the_log_of_a_debugger_stands_beside_its_history(tmp_path: Path) -> None:
    with opacus_memprof.create_memory_debugger(tmp_path) as debugger:
        debugger.create_memory_checkpoint("开始")
        opacus_memprof.analyze_model(nn.Linear(30, 10), "a layer")
    opacus_memprof.memory_snapshot("after it was stopped")
    assert {path.suffix for path in tmp_path.iterdir()} == {".jsonl", ".log"}
    [log] = tmp_path.glob("memory_debug_*.log")
    lines = log.read_text(encoding="utf-8").splitlines()
    assert lines[0].endswith(" - opacus_memprof.toolkit - INFO - checkpoint: 开始")
    assert any(line.endswith("total parameters: 310") for line in lines)
    assert not any("after it was stopped" in line for line in lines)


def test_a_monitor_and_the_program_write_one_history(tmp_path: Path) -> None:
    debugger: Any = opacus_memprof.create_memory_debugger(tmp_path)
    start = threading.Barrier(8)

    def note(number: int) -> None:
        start.wait()
        for _ in range(50):
            debugger._add({"name": str(number), "devices": []})

    threads = [threading.Thread(target=note, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    [history] = tmp_path.glob("*.jsonl")
    assert len(history.read_text().splitlines()) == len(debugger.memory_history) == 400
    debugger.stop()
