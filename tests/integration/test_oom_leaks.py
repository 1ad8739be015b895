# SPDX-License-Identifier: Apache-2.0
"""Memory that runs out in the fourth step: what loops keep on purpose is not taken for what they have left behind."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import opacus_memprof
from opacus_memprof.recording import native
from tests.models import MeanCrossEntropy

BATCH, CLASSES = 32, 2000


@pytest.fixture(autouse=True)
def _unlimited() -> Iterator[None]:
    yield
    native.cpu_limit(0)


def train(mode: str, keep: Callable[[nn.Module, torch.Tensor], Any]) -> None:
    """Until the fourth forward has no memory left; `keep` gets the model and each output."""
    data = torch.utils.data.TensorDataset(torch.randn(5 * BATCH, 64), torch.randint(CLASSES, (5 * BATCH,)))
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, CLASSES))
    module, optimizer, *criteria, loader = opacus_memprof.PrivacyEngine().make_private(
        module=model,
        optimizer=torch.optim.Adam(model.parameters()),
        criterion=MeanCrossEntropy(),
        data_loader=torch.utils.data.DataLoader(data, batch_size=BATCH),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        poisson_sampling=False,
        grad_sample_mode=mode,
        check="off",  # a proof in the fourth forward would need memory, too
    )
    criterion = criteria[0] if criteria else MeanCrossEntropy()
    for step, (inputs, targets) in enumerate(loader):
        if step == 3:
            native.cpu_limit(native.cpu_reported_bytes() + 50_000)
        output = module(inputs)
        criterion(output, targets).backward()
        optimizer.step()
        optimizer.zero_grad()
        keep(model, output)


def train_and_keep(directory: Path, mode: str, keep: Callable[[nn.Module, torch.Tensor], Any]) -> dict[str, Any]:
    with pytest.raises(torch.OutOfMemoryError), opacus_memprof.profile(directory, device="cpu"):
        train(mode, keep)
    report = json.loads((directory / "oom_report.json").read_text())
    assert report["request"]["step"] == 3
    left: dict[str, Any] = report["left_behind"]
    return left


@pytest.mark.parametrize("mode", ["hooks", "ghost", "flash_clip"])
def test_outputs_that_are_kept(mode: str, tmp_path: Path) -> None:
    kept: list[torch.Tensor] = []
    left = train_and_keep(tmp_path, mode, lambda _, output: kept.append(output))
    assert left["steps"] == [0, 1, 2]
    assert left["categories"] == {"activations": pytest.approx(sum(output.nbytes for output in kept), abs=100)}


class Averages:
    """Of parameters, made anew in each step."""

    def __call__(self, model: nn.Module, output: torch.Tensor) -> None:
        self.values = [parameter.detach().clone() for parameter in model.parameters()]


@pytest.mark.parametrize("mode", ["hooks", "ghost", "flash_clip"])
@pytest.mark.parametrize("keeps", ["nothing", "losses", "the last two outputs", "averages"])
def test_what_a_loop_keeps_on_purpose(keeps: str, mode: str, tmp_path: Path) -> None:
    losses: list[torch.Tensor] = []
    last: deque[torch.Tensor] = deque(maxlen=2)
    keep: Callable[[nn.Module, torch.Tensor], Any] = {
        "nothing": lambda _, output: None,
        "losses": lambda _, output: losses.append(output.detach().sum()),
        "the last two outputs": lambda _, output: last.append(output),
        "averages": Averages(),
    }[keeps]
    assert train_and_keep(tmp_path, mode, keep)["bytes"] == 0
