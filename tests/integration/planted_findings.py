# SPDX-License-Identifier: Apache-2.0
"""Small trainings in which findings are planted, and what their profiles found."""

import contextlib
import gc
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from opacus import PrivacyEngine
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import opacus_memprof
from opacus_memprof.analysis.profile import load_profile

FLOAT = 4
BATCH = 4


class Training:
    """A model made private, and a step on a batch of the given shape; the loss is a mean over all outputs."""

    def __init__(
        self, model: nn.Module, mode: str = "hooks", noise: float = 1.0, optimizer: Any = torch.optim.SGD
    ) -> None:
        self.trained = [p for p in model.parameters() if p.requires_grad]
        data = DataLoader(TensorDataset(torch.zeros(BATCH, 1)), batch_size=BATCH)
        options: dict[str, Any] = {"criterion": PerSample()} if mode == "ghost" else {}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.model, self.optimizer, *rest = opacus_memprof.PrivacyEngine().make_private(
                module=model,
                optimizer=optimizer(self.trained, lr=0.1),
                data_loader=data,
                noise_multiplier=noise,
                max_grad_norm=1.0,
                poisson_sampling=False,
                grad_sample_mode=mode,
                **options,
            )
        self.criterion = rest[0] if mode == "ghost" else PerSample()

    def step(self, x: torch.Tensor) -> None:
        self.criterion(self.model(x), torch.zeros(len(x))).backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


class PerSample(nn.Module):
    """The mean of each sample's outputs, then the reduction over samples."""

    def __init__(self, reduction: str = "mean") -> None:
        super().__init__()
        self.reduction = reduction

    def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        losses = output.flatten(1).square().mean(1) - target
        return losses if self.reduction == "none" else losses.mean()


def profiled(directory: Path, run: Any, error: type[Exception] | None = None) -> dict[str, Any]:
    """The profile of `run(session)`, which raises `error`."""
    expected = pytest.raises(error) if error else contextlib.nullcontext()
    gc.collect()  # earlier models, which are in cycles
    with expected, opacus_memprof.profile(directory, device="cpu") as session:
        session.attach(PrivacyEngine)
        run(session)
    return load_profile(directory)


def of_kind(profile: dict[str, Any], kind: str) -> list[dict[str, Any]]:
    return [finding for finding in profile["findings"] if finding["kind"] == kind]


def kinds(profile: dict[str, Any]) -> set[str]:
    return {finding["kind"] for finding in profile["findings"]}


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))


def drop_gradients(training: Training) -> None:
    """The remedy for discarded gradients."""
    for p in training.trained:
        p.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
