# SPDX-License-Identifier: Apache-2.0
"""The Python examples of the requirement documents run as they stand there, and so does ours of the toolkit.

The documents import from modules of the project that they were written in; here these names are this package. What an
example leaves to its reader (a model, a data loader, a function) is given to it.
"""

import gc
import json
import re
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import opacus_memprof
from opacus_memprof.experiments import process
from opacus_memprof.experiments.configuration import Configuration
from opacus_memprof.toolkit import output

pytest.importorskip("peft")  # before anything is recorded: its default arguments are tensors
ROOT = Path(__file__).resolve().parents[2]
MB = 2**20
MODULES = [
    "memoryCheck",
    "utils",
    "utils.loraTrain",
    *(f"utils.loraTrain.{name}" for name in ("quickMemoryDebug", "trainWithMemoryDebug", "memoryDebugger")),
]
TEXT = (ROOT / "tests" / "data" / "document_examples.md").read_text(encoding="utf-8")
DEVICE = "cuda" if torch.cuda.device_count() else "cpu"
# What the toolkit says in each language.
SAYS = {
    "en": {
        "tensor": "tensor input: ",
        "start": "initialization",
        "snapshot": "memory snapshot",
        "analysis": "model analysis",
        "model": "model my_model: 4,290 parameters",
    },
    "zh": {
        "tensor": "张量 input: ",
        "start": "初始化",
        "snapshot": "获取内存快照",
        "analysis": "快速分析模型",
        "model": "模型 my_model: 共 4,290 个参数",
    },
}


def examples(document: str) -> dict[str, str]:
    """Heading → code."""
    section = re.split(r"^## ", TEXT, flags=re.MULTILINE)[{"001": 1, "002": 2, "003": 3}[document]]
    found = re.findall(r"^### ([^\n]*)\n\n```python\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)
    return dict(found)


class Run:
    """Runs examples one after the other, with what those before have defined."""

    def __init__(self, document: str, names: dict[str, Any]) -> None:
        self._left = examples(document)
        self.names = {"torch": torch, **names}

    def __call__(self, heading: str, **names: Any) -> dict[str, Any]:
        self.names |= names
        exec(compile(self._left.pop(heading), heading, "exec"), self.names)
        return self.names

    def assert_all_have_run(self) -> None:
        assert self._left == {}


@pytest.fixture(autouse=True)
def aliased_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in MODULES:
        monkeypatch.setitem(sys.modules, name, opacus_memprof)
    monkeypatch.chdir(tmp_path)
    output.clear_journal()


@pytest.fixture(params=SAYS)
def says(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    monkeypatch.setenv("OPACUS_MEMPROF_LANGUAGE", request.param)
    return SAYS[request.param]


def create_model() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 2)).to(DEVICE)


def create_dataloader() -> Any:
    return [torch.randn(4, 64, device=DEVICE) for _ in range(3)]


def train_model(model: nn.Module, dataloader: Any) -> nn.Module:
    optimizer = torch.optim.Adam(model.parameters())
    for batch in dataloader:
        optimizer.zero_grad()
        model(batch).sum().backward()
        optimizer.step()
    return model


def test_the_documents_have_examples() -> None:
    assert {name: len(examples(name)) for name in ("001", "002", "003")} == {"001": 2, "002": 8, "003": 12}


class Remembering(nn.Linear):
    """Keeps twice its input in an attribute of its own."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.custom_attribute = torch.cat([x, x])
        return super().forward(x)


def test_the_experiments_document(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("pandas")
    run = Run("001", {"track_memory": lambda tensor: opacus_memprof.retag(tensor, "custom")})
    hook = run("自定义 Hook", name="remembering")["custom_forward_hook"]
    model = nn.Sequential(Remembering(64, 64), nn.Linear(64, 2))
    for module in model.modules():
        module.register_forward_hook(hook)
    with opacus_memprof.profile("profile", device="cpu") as session:
        session.attach(model)
        model(torch.randn(16, 64))
        assert session.breakdown()["cpu"]["custom"] == 2 * 16 * 64 * 4

    configuration = Configuration(mode="vanilla", model="tiny", device="cpu", seq_length=8, num_steps=1, warmup_steps=0)
    result = process.run_to_file(Path("vanilla_result.json"), configuration)
    capsys.readouterr()
    run("导出数据用于论文")
    table = capsys.readouterr().out
    assert r"\begin{tabular}" in table
    assert "total_allocated_mb" in table
    assert f"{result.peak_memory_mb:f}" in table
    run.assert_all_have_run()


@pytest.mark.cuda
def test_the_profiler_s_document(says: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    model = nn.Linear(8, 1).to(DEVICE)
    tensors = {"input_tensor": torch.zeros(1024, 512, device=DEVICE), "output_tensor": torch.zeros(3, device=DEVICE)}
    run = Run("002", tensors)
    run("基本使用")
    [log] = Path("logs/my_training").glob("memory_profiler_*.log")
    assert "loss=0.1234" in log.read_text()
    assert f"{says['tensor']}(1024, 512), torch.float32, cuda:0, 2.00MB" in log.read_text()
    assert list(json.loads(Path(run.names["json_file"]).read_text())) == ["模型创建", "前向传播", "训练步骤"]
    timeline = capsys.readouterr().out.split("==== GPU Memory Timeline =====\n")[1].splitlines()
    assert [line.split()[0] for line in timeline[:4]] == [says["start"], "模型创建", "前向传播", "训练步骤"]

    run(
        "在LoRA训练中使用",
        r=4,
        hidden_size=16,
        num_epochs=2,
        dataloader=[torch.randn(2, 8, device=DEVICE)] * 3,
        model=lambda batch: model(batch).sum(),
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
    )
    run.names["train_lora_with_profiling"]()
    [exported] = Path("logs/lora_training").glob("memory_profiler_*.json")
    records = json.loads(exported.read_text())
    assert {event: len(found) for event, found in records.items()} == {
        "训练开始": 1,
        "LoRA模型创建": 1,
        "Epoch 1 开始": 1,
        "前向传播": 6,
        "反向传播": 6,
        "参数更新": 6,
        "Epoch 2 开始": 1,
    }
    assert list(records["训练开始"][0]) == [
        "time", "allocated", "reserved", "max_allocated", "max_reserved", "timestamp"
    ]  # fmt: skip

    profiler = opacus_memprof.GPUMemoryProfiler("logs/further")
    run("1. 内存泄漏检测", profiler=profiler, threshold=-1)
    run("2. 峰值内存分析")
    run("3. 自定义内存清理")["custom_memory_cleanup"]()
    run("1. **CUDA不可用**")
    run("2. **内存不足**")
    run("3. **日志文件过大**", log_file=profiler.log_file, max_size=0)
    assert list(profiler.records) == ["内存泄漏警告", "峰值内存", "自定义清理"]
    run.assert_all_have_run()


def check_the_debugger_s_document(says: dict[str, str], printed: Callable[[], str]) -> None:
    run = Run("003", {"create_model": create_model, "create_your_model": create_model})
    model = create_model()
    run(
        "1. 基础使用 - 快速内存调试",
        your_model=model,
        your_training_function=train_model,
        args=(model, create_dataloader()),
    )
    assert run.names["result"] is model
    for line in (f"[INFO] {says['snapshot']}: before_training", f"[INFO] {says['analysis']}: my_model"):
        assert line in printed()
    assert "before_training" in run.names["report"]
    assert says["model"] in run.names["report"]

    batches = [{"input_ids": torch.randint(256, (2, 8))} for _ in range(2)]
    run("2. 高级使用 - 完整训练监控", config={"model": "tiny", "r": 2}, dataloader=batches)
    assert run.names["debug_results"]["labels"] == {
        "pkg": "matplotlib", "version": "3.8.0", "knowledge_type": "code"
    }  # fmt: skip
    assert run.names["debug_results"]["memory_issues"] == []

    run("1. 模型开发阶段")
    assert run.names["analysis"]["memory_mb"] == 4290 * 4 / MB

    run("2. 训练过程调试", create_dataloader=create_dataloader, train_model=train_model)
    assert [stage["name"] for stage in run.names["profiler"].stages] == ["model_creation", "data_loading", "training"]
    added: dict[str, float] = {}  # by the stages, on the one device that they used
    for stage in run.names["profiler"].stages:
        for change in stage["change"]["gpu_changes"]:
            for category, size in change["categories_change_mb"].items():
                added[category] = added.get(category, 0) + size * MB
    batches = sum(batch.nbytes for batch in run.names["dataloader"])  # a list, of which nobody knows what it holds
    assert added.get("unattributed", 0) + added.get("inputs", 0) == batches
    assert added["model_parameters"] == added["gradients"] == 4290 * 4
    assert "training: " in run.names["report"]

    run("3. 内存问题诊断", problematic_function=lambda: None)
    assert run.names["comparison"]["gpu_changes"]

    run("4. 配置优化", load_config=lambda: {"model": "tiny", "steps": 1, "batch_size": 1, "sequence_length": 8})
    assert run.names["best_config"][0] == "small_r"

    debugger = run("1. 日志配置", create_memory_debugger=opacus_memprof.create_memory_debugger)["debugger"]
    run("2. 监控配置")
    run("3. 报告配置")
    debugger.stop()
    assert Path("custom_report.txt").read_text(encoding="utf-8") == run.names["report"]

    run("1. 训练前检查", model=model)
    run(
        "2. 训练中监控",
        num_epochs=2,
        train_epoch=train_model,
        compare_snapshots=opacus_memprof.compare_snapshots,
        dataloader=create_dataloader(),
    )
    assert "epoch_1_end" in run("3. 问题排查")["debug_memory_issue"]()
    run.assert_all_have_run()


class Printed:
    """Everything that was printed so far."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys
        self._text = ""

    def __call__(self) -> str:
        self._text += self._capsys.readouterr().out
        return self._text


@pytest.mark.skipif(DEVICE == "cuda", reason="the same as the next")
def test_the_debugger_s_document(says: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    check_the_debugger_s_document(says, Printed(capsys))


@pytest.mark.cuda
def test_the_debugger_s_document_on_a_gpu(says: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    check_the_debugger_s_document(says, Printed(capsys))


def test_our_example_runs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    gc.collect()  # an earlier example's model is part of cycles
    monkeypatch.setattr(sys, "argv", ["memory_debugging.py", "--log-dir", "logs"])
    runpy.run_path(str(ROOT / "examples" / "memory_debugging.py"), run_name="__main__")
    report = Path("logs/report.txt").read_text(encoding="utf-8")
    assert report in capsys.readouterr().out
    assert "before -> after" in report
    assert f"model trained model: {257 * 1024 + 1025 * 10:,} parameters" in report
    assert "no anomalies" in report
    prefixes = {path.name.partition("_20")[0] for path in Path("logs").iterdir()}
    assert prefixes >= {"memory_profiler", "memory_summary", "memory_history", "memory_debug", "profile"}
    profile = json.loads(Path("logs/profile/profile.json").read_text())
    [modules] = [device["peak"]["modules"] for device in profile["devices"].values()]
    assert modules["0"]["model_parameters"] == 4 * 257 * 1024
