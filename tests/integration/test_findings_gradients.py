# SPDX-License-Identifier: Apache-2.0
"""Gradients and noise that a training makes in vain, planted on the CPU and found with their bytes."""

from pathlib import Path
from typing import Any

import opacus.optimizers.optimizer
import pytest
import torch
from torch import nn

from tests.integration.planted_findings import (
    BATCH,
    FLOAT,
    Training,
    drop_gradients,
    kinds,
    mlp,
    of_kind,
    profiled,
)

pytestmark = pytest.mark.usefixtures("no_remains")


class HalfFrozen(nn.Module):
    def __init__(self, freeze: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.mixed = nn.Linear(24, 16)
        self.mixed.weight.requires_grad_(not freeze)
        self.head = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.relu(self.mixed(x)))  # type: ignore[no-any-return]


@pytest.mark.parametrize("freeze", [True, False])
def test_functorch_and_frozen_parameters(tmp_path: Path, freeze: bool) -> None:
    def run(session: Any) -> None:
        training = Training(HalfFrozen(freeze), "functorch")
        for batch in (BATCH, 2 * BATCH, BATCH):
            training.step(torch.randn(batch, 24))

    found = of_kind(profiled(tmp_path, run), "frozen_per_sample_gradients")
    if freeze:
        assert [(one["module"], one["bytes"]) for one in found] == [("mixed", 2 * BATCH * 24 * 16 * FLOAT)]
        assert f"{2 * BATCH} samples" in found[0]["evidence"]
    else:
        assert found == []


def test_gradients_that_nobody_reads(tmp_path: Path) -> None:
    """With one sample, gradients weigh as much as per-sample gradients; the peak is in backward or clipping."""
    parameters = {}

    def run(session: Any) -> None:
        training = Training(mlp(), noise=0.0)
        training.step(torch.randn(1, 8))
        parameters["as it is"] = [p.detach().clone() for p in training.trained]

    profile = profiled(tmp_path / "as it is", run)
    peak = profile["devices"]["cpu"]["peak"]
    (found,) = of_kind(profile, "discarded_gradients")
    assert found["bytes"] == FLOAT * (16 * 8 + 16 + 4 * 16 + 4)  # none had been replaced yet
    assert peak["phase"] == "noise"
    assert peak["categories"]["gradients"] == found["bytes"] + FLOAT * 16 * 8  # the first that is to replace one
    assert found["modules"] == {"0": FLOAT * (16 * 8 + 16), "2": FLOAT * (4 * 16 + 4)}

    def mended(session: Any) -> None:
        training = Training(mlp(), noise=0.0)
        drop_gradients(training)
        training.step(torch.randn(1, 8))
        parameters["mended"] = [p.detach().clone() for p in training.trained]

    profile = profiled(tmp_path / "mended", mended)
    assert "discarded_gradients" not in kinds(profile)
    assert all(map(torch.equal, parameters["as it is"], parameters["mended"]))


@pytest.mark.parametrize("mode", ["ghost", "flash_clip"])
def test_gradients_that_are_used(tmp_path: Path, mode: str) -> None:
    def run(session: Any) -> None:
        training = Training(mlp(), mode)
        for _ in range(3):
            training.step(torch.randn(1, 8))

    assert "discarded_gradients" not in kinds(profiled(tmp_path, run))


def big_head() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 4), nn.Linear(4, 1000, bias=False))


def test_noise_that_is_allocated_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One sample and one large parameter: 2|p| of noise beside p, its gradients and its sum."""

    def run(session: Any) -> None:
        training = Training(big_head())
        drop_gradients(training)
        training.step(torch.randn(1, 2))

    profile = profiled(tmp_path / "twice", run)
    (found,) = of_kind(profile, "noise_allocated_twice")
    assert found["bytes"] == 4 * 1000 * FLOAT
    assert found["module"] == "1"

    original = opacus.optimizers.optimizer._generate_noise

    def _generate_noise(std: float, reference: Any, generator: Any = None, secure_mode: bool = False) -> Any:
        if std == 0 or secure_mode:
            return original(std, reference, generator, secure_mode)
        return torch.normal(0, std, reference.shape, device=reference.device, generator=generator)

    monkeypatch.setattr(opacus.optimizers.optimizer, "_generate_noise", _generate_noise)
    assert "noise_allocated_twice" not in kinds(profiled(tmp_path / "once", run))
