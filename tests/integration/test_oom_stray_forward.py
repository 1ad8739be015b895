# SPDX-License-Identifier: Apache-2.0
"""A large forward in train mode without a backward is named when memory runs out.

Its batch is much larger than a step's, and Opacus sizes per-sample gradients by the largest batch that it holds.
"""

from __future__ import annotations

import gc
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import opacus_memprof
from opacus_memprof.recording import native
from tests.models import MeanCrossEntropy

BATCH, EVALUATED, WIDTH, CLASSES = 32, 256, 128, 500
LIMIT = 60_000_000
GRADIENTS = BATCH * 4 * ((WIDTH + 1) * WIDTH + (WIDTH + 1) * CLASSES)  # of all samples
pytestmark = pytest.mark.usefixtures("clean_process")


@pytest.fixture(autouse=True)
def _unlimited() -> Iterator[None]:
    yield
    native.cpu_limit(0)


def train(mode: str, before: Callable[[int, nn.Module], Any]) -> None:
    """Three steps, each after what `before` does with the step's number and the model."""
    torch.manual_seed(0)
    data = torch.utils.data.TensorDataset(torch.randn(3 * BATCH, WIDTH), torch.randint(CLASSES, (3 * BATCH,)))
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, CLASSES))
    module, optimizer, loader = opacus_memprof.PrivacyEngine().make_private(
        module=model,
        optimizer=torch.optim.Adam(model.parameters()),
        data_loader=torch.utils.data.DataLoader(data, batch_size=BATCH),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        poisson_sampling=False,
        grad_sample_mode=mode,
    )
    for step, (inputs, targets) in enumerate(loader):
        optimizer.zero_grad()
        earlier_output = before(step, module)
        loss = MeanCrossEntropy()(module(inputs), targets)
        (loss if earlier_output is None else loss + 0 * earlier_output.square().mean()).backward()
        optimizer.step()


def report_of(directory: Path, mode: str, before: Callable[[int, nn.Module], Any]) -> dict[str, Any]:
    native.cpu_limit(native.cpu_reported_bytes() + LIMIT)
    with pytest.raises(torch.OutOfMemoryError), opacus_memprof.profile(directory, device="cpu"):
        train(mode, before)
    native.cpu_limit(0)
    return dict(json.loads((directory / "oom_report.json").read_text()))


@pytest.mark.parametrize("keeps_output", [False, True])
@pytest.mark.parametrize(("mode", "at"), [("hooks", 0), ("hooks", 2), ("functorch", 0)])
def test_it_is_named_first_with_what_it_costs(mode: str, at: int, keeps_output: bool, tmp_path: Path) -> None:
    kept: list[torch.Tensor] = []

    def evaluate(step: int, model: nn.Module) -> None:
        if step == at:
            output = model(torch.randn(EVALUATED, WIDTH))
            kept.extend([output] * keeps_output)

    def evaluate_without_gradients(step: int, model: nn.Module) -> None:
        with torch.no_grad():
            evaluate(step, model)

    report = report_of(tmp_path / "failed", mode, evaluate)
    assert report["request"]["op"] == "create_or_accumulate_grad_sample"
    assert report["request"]["bytes"] == pytest.approx(EVALUATED * 4 * WIDTH * CLASSES, rel=0.01)  # of the last layer
    first = report["suggestions"][0]
    assert [action["kind"] for action in first["actions"]] == ["no_grad"]
    assert first["fits"]
    for size in (GRADIENTS, GRADIENTS * EVALUATED // BATCH):
        assert f"{size / 2**20:.2f} MiB" in first["computed"]
    assert report["batch"]["largest_that_fits"] is None  # of no smaller batch is the block smaller
    kept.clear()
    gc.collect()  # the model of the run that failed
    with opacus_memprof.profile(tmp_path / "followed", device="cpu"):
        train(mode, evaluate_without_gradients)
    followed = json.loads((tmp_path / "followed" / "profile.json").read_text())
    measured = followed["devices"]["cpu"]["peak"]["requested_bytes"]
    assert 0.97 * measured <= first["predicted_peak_bytes"] <= 1.1 * measured


def test_forwards_that_share_a_backward_are_none(tmp_path: Path) -> None:
    """The first two steps have shown that they do."""

    def first_forward(step: int, model: nn.Module) -> torch.Tensor:
        output: torch.Tensor = model(torch.randn(2 * BATCH, WIDTH))
        if step == 2:
            native.cpu_limit(native.cpu_reported_bytes() + 50_000)
        return output

    report = report_of(tmp_path, "hooks", first_forward)
    assert (report["request"]["step"], report["request"]["phase"]) == (2, "forward")
    assert not any(
        action["kind"] == "no_grad" for suggestion in report["suggestions"] for action in suggestion["actions"]
    )
