# SPDX-License-Identifier: Apache-2.0
"""Stages of a training run: what they measure, attach and report."""

import gc
from pathlib import Path

import pytest
import torch
from torch import nn

import opacus_memprof
from opacus_memprof.toolkit.training import TrainingProfiler

pytest.importorskip("peft")  # before anything is recorded: its default arguments are tensors
MB = 2**20
pytestmark = [
    pytest.mark.skipif(torch.cuda.device_count() > 0, reason="the figures are those of the CPU"),
    pytest.mark.usefixtures("collected_garbage"),
]


def block(mib: int) -> torch.Tensor:
    return torch.zeros(mib * MB, dtype=torch.uint8)


def test_stages_are_measured_and_reported(tmp_path: Path) -> None:
    with opacus_memprof.memory_profiled_training(tmp_path) as profiler:
        result = profiler.profile_stage("创建", block, 5)
        profiler.profile_stage("peak", lambda: block(9) is None)
        report = profiler.generate_training_report()
    created, peak = profiler.stages
    [change] = created["change"]["gpu_changes"]
    assert (created["name"], created["failed"], change["memory_change_mb"]) == ("创建", False, 5)
    assert change["categories_change_mb"] == {"unattributed": 5}
    assert peak["change"]["gpu_changes"][0]["memory_change_mb"] == 0
    assert peak["change"]["gpu_changes"][0]["peak_change_mb"] == 9
    assert "创建: " in report
    assert "+5.00MB" in report
    assert profiler.memory_issues() == []
    written = (tmp_path / "training_report.txt").read_text(encoding="utf-8")
    assert written.startswith(report.splitlines()[0])
    assert "Σ categories = requested bytes: exact" in written
    assert profiler.profile is not None
    assert profiler.profile["devices"]["cpu"]["peak"]["requested_bytes"] >= 14 * MB
    assert result.numel() == 5 * MB


def test_a_running_session_is_used_and_left_running(tmp_path: Path) -> None:
    with opacus_memprof.profile(tmp_path / "own", device="cpu") as session:
        with TrainingProfiler(tmp_path / "logs") as profiler:
            assert profiler.session is session
            profiler.profile_stage("stage", block, 1)
        assert opacus_memprof.session.current() is session
    assert profiler.profile is None
    assert not (tmp_path / "logs" / "profile").exists()


def test_a_stage_that_fails_is_noted_and_its_exception_passes(tmp_path: Path) -> None:
    def fail() -> None:
        raise ValueError("no data")

    with (
        pytest.raises(ValueError, match="no data"),
        opacus_memprof.memory_profiled_training(tmp_path) as profiler,
    ):
        profiler.profile_stage("loading", fail)
    assert [(stage["name"], stage["failed"]) for stage in profiler.stages] == [("loading", True)]
    assert "loading: 0.00s, failed" in (tmp_path / "training_report.txt").read_text()
    assert profiler.profile is not None
    assert (profiler.profile["status"], profiler.profile["error"]) == ("failed", "ValueError: no data")


def test_without_a_place_for_a_session_it_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    with opacus_memprof.memory_profiled_training(tmp_path / "file") as profiler:
        assert profiler.profile_stage("stage", lambda: 7) == 7
    assert profiler.session is None
    printed = capsys.readouterr().out
    assert "[WARNING] no session is recorded" in printed
    assert "cannot write" in printed


# --- what is attached by itself ---


def create_model() -> nn.Module:
    return nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 256))


def train_model(model: nn.Module, *, batches: list[torch.Tensor]) -> nn.Module:
    """Makes an optimizer of its own, as code that knows of no profiler does."""
    optimizer = torch.optim.Adam(model.parameters())
    for batch in batches:
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
    return model


def categories_at_peak(profiler: TrainingProfiler) -> dict[str, int]:
    assert profiler.profile is not None
    peak = profiler.profile["devices"]["cpu"]["peak"]
    assert sum(peak["categories"].values()) == peak["requested_bytes"]
    return dict(peak["categories"])


def test_what_a_stage_returns_and_is_handed_is_attached(tmp_path: Path) -> None:
    batches = [torch.randn(32, 256) for _ in range(4)]
    gc.collect()
    with opacus_memprof.memory_profiled_training(tmp_path) as profiler:
        model = profiler.profile_stage("model_creation", create_model)
        trained = profiler.profile_stage("training", train_model, model, batches=batches)
    assert trained is model
    size = sum(parameter.nbytes for parameter in model.parameters())
    created = profiler.stages[0]["change"]["gpu_changes"][0]["categories_change_mb"]
    assert created == {"model_parameters": size / MB}
    categories = categories_at_peak(profiler)
    assert categories["model_parameters"] == size
    assert categories["gradients"] == size
    assert categories["optimizer_states"] == 2 * size + 4 * 4  # and the number of steps, of each parameter
    assert categories["unattributed"] < 0.001 * sum(categories.values())  # earlier tests may have left some numbers
    again = opacus_memprof.memory_profiled_training(tmp_path)  # the same model in the next session
    with again:
        again.profile_stage("training", train_model, model, batches=batches)
    assert categories_at_peak(again)["model_parameters"] == size


def test_models_and_optimizers_that_a_stage_returns_are_attached_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opacus_memprof.memory_profiled_training(tmp_path) as profiler:
        assert profiler.session is not None
        attached: list[object] = []
        attach = profiler.session.attach
        monkeypatch.setattr(
            profiler.session, "attach", lambda trainable: attached.append(trainable) or attach(trainable)
        )
        model, loss = create_model(), nn.MSELoss()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        profiler.profile_stage("preparation", lambda: (optimizer, {"model": model}, loss))
        profiler.profile_stage("part", lambda: {"optimizer": optimizer, "part": [model[0], model]})
        assert attached == [optimizer]  # the dict is one level too deep
        profiler.profile_stage("training", train_model, model, batches=[torch.randn(3, 256)])
    assert attached[:2] == [optimizer, model]


def test_private_training_in_a_stage_is_attributed(tmp_path: Path) -> None:
    from opacus import PrivacyEngine
    from torch.utils.data import DataLoader, TensorDataset

    def train_privately(model: nn.Module) -> None:
        optimizer = torch.optim.Adam(model.parameters())
        loader = DataLoader(TensorDataset(torch.randn(16, 256)), batch_size=8)
        private, optimizer, loader = PrivacyEngine().make_private(
            module=model,
            optimizer=optimizer,
            data_loader=loader,
            noise_multiplier=1.0,
            max_grad_norm=1.0,
            poisson_sampling=False,
        )
        for (batch,) in loader:
            optimizer.zero_grad()
            private(batch).square().mean().backward()
            optimizer.step()

    with opacus_memprof.memory_profiled_training(tmp_path) as profiler:
        model = profiler.profile_stage("model_creation", create_model)
        profiler.profile_stage("training", train_privately, model)
    categories = categories_at_peak(profiler)
    assert categories["unattributed"] < 0.001 * sum(categories.values())
    assert profiler.profile is not None
    clipping = profiler.profile["devices"]["cpu"]["phases"]["clip"]["categories"]
    assert clipping["per_sample_gradients"] == 8 * sum(parameter.nbytes for parameter in model.parameters())
