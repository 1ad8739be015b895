# SPDX-License-Identifier: Apache-2.0
"""LoRA training as a whole, configurations side by side, and `opacus-memprof debug` over them."""

import gc
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import opacus_memprof
from opacus_memprof import MemprofError
from opacus_memprof.cli import app
from opacus_memprof.cli.options import hide_token
from opacus_memprof.toolkit import lora
from tests.warm_python import ENVIRONMENT, interpreter

pytest.importorskip("peft")  # before anything is recorded: its default arguments are tensors
MB = 2**20
ROWS, COLUMNS = 64, 64  # of the adapted q_proj and v_proj of the tiny model's two layers
TINY = 256 * 64 * 2 + 2 * (4 * 64 * 64 + 3 * 64 * 128 + 2 * 64) + 64  # embedding, head, layers, norm
pytestmark = [
    pytest.mark.skipif(torch.cuda.device_count() > 0, reason="the figures are those of the CPU"),
    pytest.mark.usefixtures("collected_garbage"),
]


def adapters(rank: int) -> int:
    return 2 * 2 * rank * (ROWS + COLUMNS)


def test_lora_training_is_debugged(tmp_path: Path) -> None:
    tokens = [{"input_ids": torch.randint(256, (2, 16))} for _ in range(3)]
    torch.manual_seed(0)
    model, results = opacus_memprof.debug_lora_training(
        config={"r": 4, "alpha": 8, "project": "its own"},
        dataloader=tokens,
        precision="fp32",
        pkg="matplotlib",
        version="3.8.0",
        knowledge_type="code",
        log_dir=tmp_path,
    )
    creation, training = results["creation_analysis"], results["training_analysis"]
    assert (creation["total"], creation["trainable"]) == (TINY + adapters(4), adapters(4))
    buffers = sum(buffer.nbytes for buffer in model.buffers())
    assert creation["summary"]["total_memory_mb"] == (4 * (TINY + adapters(4)) + buffers) / MB
    assert training["summary"]["gradients_mb"] == 4 * adapters(4) / MB
    assert results["memory_issues"] == []
    assert len(results["losses"]) == 3
    assert [stage["name"] for stage in results["stages"]] == ["model_creation", "preparation", "training"]
    categories = results["peak"]["cpu"]["categories"]
    assert categories["model_parameters"] == 4 * (TINY + adapters(4))
    assert categories["optimizer_states"] >= 2 * 4 * adapters(4)  # two moments; steps are counted in tensors too
    assert results["labels"] == {"pkg": "matplotlib", "version": "3.8.0", "knowledge_type": "code"}
    assert Path(results["report_file"]).exists()
    assert results["losses"] == plain_losses(tokens)


def plain_losses(tokens: list[dict[str, torch.Tensor]]) -> list[float]:
    """The same training without anybody looking."""
    torch.manual_seed(0)
    model = lora.create_model(lora.Settings(r=4, alpha=8))
    return lora.train(lora.prepare_training(model, tokens, lora.Settings()), "fp32")


@pytest.mark.parametrize(("precision", "itemsize"), [("fp32", 4), ("bf16", 2)])
def test_private_lora_training_has_per_sample_gradients(precision: str, itemsize: int, tmp_path: Path) -> None:
    """Of autocast's type: they are products of activations and output gradients."""
    gc.collect()  # an earlier private model is part of cycles
    config = {"r": 2, "noise_multiplier": 1.0, "batch_size": 3, "steps": 2, "sequence_length": 8}
    _, results = opacus_memprof.debug_lora_training(config, log_dir=tmp_path, precision=precision)
    profile = json.loads((tmp_path / "profile" / "profile.json").read_text())
    clipping = profile["devices"]["cpu"]["phases"]["clip"]["categories"]
    assert clipping["per_sample_gradients"] == 3 * itemsize * adapters(2)
    assert len(results["losses"]) == 2
    assert results["memory_issues"] == []


def clipped(mode: str) -> tuple[list[float], torch.Tensor]:
    """The losses of two private steps without noise, and the adapters that they leave."""
    torch.manual_seed(0)
    chosen = lora.Settings(noise_multiplier=0.0, max_grad_norm=0.1, grad_sample_mode=mode, steps=2, batch_size=3)
    model = lora.create_model(chosen)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    losses = lora.train(lora.prepare_training(model, lora.synthetic_batches(chosen, 256), chosen), "fp32")
    return losses, torch.cat([parameter.detach().flatten() for parameter in trained])


@pytest.mark.parametrize("mode", ["functorch", "ew", "ghost", "flash_clip"])
def test_every_mode_clips_alike(mode: str) -> None:
    for ours, hooks in zip(clipped(mode), clipped("hooks"), strict=True):
        torch.testing.assert_close(torch.as_tensor(ours), torch.as_tensor(hooks), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("mode", ["hooks", "ew", "ghost", "flash_clip"])
def test_a_model_is_an_ordinary_one_after_private_training(mode: str, tmp_path: Path) -> None:
    config = {"noise_multiplier": 1.0, "grad_sample_mode": mode, "steps": 1, "batch_size": 2, "sequence_length": 8}
    model, _ = opacus_memprof.debug_lora_training(config, log_dir=tmp_path)
    same = lora.create_model(lora.Settings())
    same.load_state_dict(model.state_dict())
    tokens = torch.randint(256, (2, 8))
    for each in (model, same):
        each.zero_grad()
        each(tokens, labels=tokens).loss.backward()
    for trained, plain in zip(model.parameters(), same.parameters(), strict=True):
        assert not hasattr(trained, "grad_sample")
        torch.testing.assert_close(trained.grad, plain.grad)


def tiny() -> Any:
    """The tiny model without adapters."""
    model: Any = lora.create_model(lora.Settings())
    return model.unload()


def test_planted_nan_is_an_issue(tmp_path: Path) -> None:
    base = tiny()
    with torch.no_grad():
        base.lm_head.weight[0, 0] = float("nan")
    _, results = opacus_memprof.debug_lora_training({"model": base, "steps": 1}, log_dir=tmp_path)
    assert any(
        issue["kind"] == "nan_inf_parameter" and "lm_head" in issue["module"] for issue in results["memory_issues"]
    )


def test_configurations_are_compared(tmp_path: Path) -> None:
    variations = {"small_r": {"r": 8, "alpha": 16}, "large_r": {"r": 32, "alpha": 64}}
    results = opacus_memprof.debug_memory_with_different_configs(
        {"steps": 1, "sequence_length": 8, "batch_size": 1}, variations, log_dir=tmp_path
    )
    assert list(results) == ["small_r", "large_r"]
    assert [result["trainable"] for result in results.values()] == [adapters(8), adapters(32)]
    grown = (results["large_r"]["memory_mb"] - results["small_r"]["memory_mb"]) * MB
    assert grown == pytest.approx(4 * (adapters(32) - adapters(8)))
    assert min(results.items(), key=lambda item: item[1]["memory_mb"])[0] == "small_r"
    assert all(result["peak_memory_mb"] > result["memory_mb"] for result in results.values())
    assert (tmp_path / "large_r" / "training_report.txt").exists()


def test_a_configuration_is_not_charged_for_the_one_before(tmp_path: Path) -> None:
    config = {"steps": 1, "sequence_length": 8, "batch_size": 2, "noise_multiplier": 1.0}
    results = opacus_memprof.debug_memory_with_different_configs(
        config, {name: {"r": 2} for name in "abc"}, log_dir=tmp_path
    )
    assert len({result["peak_memory_mb"] for result in results.values()}) == 1


def test_a_given_model_is_compared_without_earlier_adapters(tmp_path: Path) -> None:
    given = tiny()
    config = {"model": given, "steps": 1, "sequence_length": 8, "batch_size": 1}
    results = opacus_memprof.debug_memory_with_different_configs(
        config, {"one": {"r": 2}, "two": {"r": 3}}, log_dir=tmp_path
    )
    assert [result["total"] for result in results.values()] == [TINY + adapters(2), TINY + adapters(3)]
    assert sum(parameter.numel() for parameter in given.parameters()) == TINY


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        ({"r": 0}, "r is 0"),
        ({"batch_size": True}, "batch_size is True"),
        ({"target_modules": 3}, "cannot be given LoRA adapters"),
        ({"learning_rate": "1e-3"}, "learning_rate is '1e-3'"),
        ({"dropout": float("nan")}, "dropout is nan"),
        ({"noise_multiplier": -1.0}, "noise_multiplier is -1.0"),
        ({"max_grad_norm": None}, "max_grad_norm is None"),
        ({"grad_sample_mode": "fast"}, "grad_sample_mode is 'fast' in the configuration: use hooks, functorch"),
        (3, "a int is not a configuration"),
        ({"model": "no/such/path/at/all"}, "there is no folder no/such/path/at/all"),
    ],
)
def test_a_configuration_that_cannot_be_used(
    config: object, sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(MemprofError, match=sentence):
        opacus_memprof.debug_lora_training(config, log_dir=tmp_path)


def test_other_input_that_cannot_be_used(tmp_path: Path) -> None:
    with pytest.raises(MemprofError, match='no precision "fp8"'):
        opacus_memprof.debug_lora_training({}, precision="fp8", log_dir=tmp_path)
    with pytest.raises(MemprofError, match="input_ids"):
        opacus_memprof.debug_lora_training({}, [{"text": torch.zeros(1)}], log_dir=tmp_path)
    with pytest.raises(MemprofError, match="a str is not a batch"):
        opacus_memprof.debug_lora_training({}, ["text"], log_dir=tmp_path)
    with pytest.raises(MemprofError, match="needs a DataLoader of torch, and got a list"):
        opacus_memprof.debug_lora_training({"noise_multiplier": 1.0}, [torch.zeros(1, 2)], log_dir=tmp_path)
    with pytest.raises(MemprofError, match="cannot be given LoRA adapters"):
        opacus_memprof.debug_lora_training({"model": nn.Linear(2, 2)}, log_dir=tmp_path)
    with pytest.raises(MemprofError, match="no configurations"):
        opacus_memprof.debug_memory_with_different_configs({}, {})
    with pytest.raises(MemprofError, match='the variation "x" cannot be a int'):
        opacus_memprof.debug_memory_with_different_configs({}, {"x": 3})  # type: ignore[dict-item]
    with pytest.raises(MemprofError, match="rank, which nothing uses"):
        opacus_memprof.debug_memory_with_different_configs({}, {"x": {"rank": 3}})


@pytest.mark.parametrize(
    ("level", "flag", "directory"),
    [
        ("model_only", "--level", "--log-dir"),
        ("full", "--debug_level", "--log_dir"),
        ("custom", "--debug-level", "--log_dir"),
        ("comparison", "--debug_level", "--log-dir"),
    ],
)
def test_the_command_line(
    level: str, flag: str, directory: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ["debug", flag, level, directory, str(tmp_path), "--pkg", "matplotlib", "--version", "3.8.0"]
    arguments += ["--precision", "fp16", "--knowledge_type", "code", "--token", "hf_secret"]
    monkeypatch.setattr("sys.argv", ["opacus-memprof", *arguments])
    ran = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert ran.exit_code == 0, ran.output
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["labels"] == {"pkg": "matplotlib", "version": "3.8.0", "knowledge_type": "code"}
    if level == "model_only":
        assert results["creation_analysis"]["trainable"] == adapters(8)
    elif level == "full":
        assert all(torch.isfinite(torch.tensor(results["losses"])))
    elif level == "custom":
        assert [stage["name"] for stage in results["stages"]][-2:] == ["first_step", "further_steps"]
    else:
        assert [result["trainable"] for result in results["configurations"].values()] == [
            adapters(8),
            adapters(16),
            adapters(32),
        ]
        assert "smallest: small_r" in ran.output
    for folder, _, files in os.walk(tmp_path):
        for file in files:
            assert b"hf_secret" not in Path(folder, file).read_bytes(), file
    assert "hf_secret" not in ran.output


@pytest.mark.skipif(torch.version.cuda is None, reason="needs a torch with CUDA")
def test_debugging_on_a_virtual_gpu(tmp_path: Path) -> None:
    command = [*interpreter(), "-m", "opacus_memprof", "debug", "--virtual-gpu", "t4", "--virtual-memory", "1GiB"]
    command += ["--log_dir", str(tmp_path)]
    subprocess.run([*command, "--device", "cuda"], env=ENVIRONMENT, check=True, capture_output=True, timeout=300)
    results = json.loads((tmp_path / "results.json").read_text())
    # Frozen weights are in fp32, and so are the adapters.
    weights = 4 * results["creation_analysis"]["total"]
    assert results["peak"]["cuda:0"]["categories"]["model_parameters"] == weights
    assert json.loads((tmp_path / "profile" / "profile.json").read_text())["virtual"]["gpu"] == "t4"
    refused = subprocess.run([*command, "--device", "cpu"], env=ENVIRONMENT, capture_output=True, text=True, timeout=60)
    assert (refused.returncode, refused.stderr.count("\n")) == (2, 1)
    assert "a virtual GPU is not a CPU" in refused.stderr


def test_results_that_cannot_be_written_cost_no_training(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("theirs")
    ran = CliRunner().invoke(app, ["debug", "--log-dir", str(tmp_path / "file" / "logs")])
    assert isinstance(ran.exception, MemprofError)
    assert str(ran.exception) == f"cannot write {tmp_path}/file/logs (Not a directory): choose another place"
    assert ran.output == ""


def test_a_model_that_no_hub_has_is_refused_immediately(tmp_path: Path) -> None:
    program = "import sys; sys.argv = ['opacus-memprof', 'debug', '--model', 'no/such', '--log-dir', sys.argv[1]]\n"
    program += "from opacus_memprof.cli import main; main()"
    with socket.create_server(("127.0.0.1", 0)) as server:
        closed = f"http://127.0.0.1:{server.getsockname()[1]}"
    kept = (name for name in os.environ if name != "HF_HUB_OFFLINE" and not name.lower().endswith("_proxy"))
    environment = {name: os.environ[name] for name in kept}
    environment |= {"HF_ENDPOINT": closed, "PYTHONPATH": str(Path(__file__).parents[2]), "HF_HOME": str(tmp_path)}
    ran = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "logs")], env=environment, capture_output=True, text=True
    )
    assert ran.returncode == 2
    assert ran.stderr.startswith('opacus-memprof: the model "no/such" cannot be loaded')
    assert ran.stderr.count("\n") == 1  # no words of retries


def test_the_token_leaves_the_command_line() -> None:
    arguments = ["debug", "--token", "a", "--token=b", "--level", "full", "--token"]
    hide_token(arguments)
    assert arguments == ["debug", "--token", "***", "--token=***", "--level", "full", "--token"]
