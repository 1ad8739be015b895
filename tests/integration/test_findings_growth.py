# SPDX-License-Identifier: Apache-2.0
"""Memory that grows from step to step is found; a training without a defect has no findings."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from opacus_memprof.clipping import adopt_grad_samples
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

pytestmark = pytest.mark.usefixtures("clean_process")


def train(steps: int, model: nn.Module, mode: str, keep: Any = lambda output, step: None) -> Any:
    """Batches of varying size; Adam makes its states in the first step."""

    def run(session: Any) -> None:
        training = Training(model, mode, optimizer=torch.optim.Adam)
        sizes = torch.randint(1, 2 * BATCH, (steps,), generator=torch.Generator().manual_seed(5)).tolist()
        for step, size in enumerate(sizes):
            training.step(torch.randn(size, 8))
            keep(training.model, step)

    return run


def test_memory_that_grows(tmp_path: Path) -> None:
    kept = []
    profile = profiled(tmp_path, train(12, mlp(), "hooks", lambda model, step: kept.append(torch.zeros(200))))
    (found,) = of_kind(profile, "growing_memory")
    assert found["bytes"] == 8 * 200 * FLOAT  # of steps 2 to 9; the first and last two are left out
    assert found["category"] == "unattributed"
    assert "steps 2 to 9" in found["evidence"]
    assert "end of step 11" in found["evidence"]


def test_graphs_that_are_kept(tmp_path: Path) -> None:
    losses = []

    def keep(model: nn.Module, step: int) -> None:
        with torch.enable_grad():
            model.eval()
            losses.append(model(torch.randn(BATCH, 8)).mean())
            model.train()

    profile = profiled(tmp_path, train(12, mlp(), "hooks", keep))
    found = {finding["category"]: finding for finding in of_kind(profile, "growing_memory")}
    assert "loss.detach()" in found["activations"]["remedy"]
    # The ReLU's output of each step, which its own backward and the second Linear's share.
    assert found["activations"]["modules"]["1"] == 8 * BATCH * 16 * FLOAT
    losses.clear()


@pytest.mark.parametrize("records_graph", [True, False])
def test_an_evaluation_that_records_a_graph(tmp_path: Path, records_graph: bool) -> None:
    def run(session: Any) -> None:
        training = Training(mlp())
        for _ in range(2):
            training.step(torch.randn(BATCH, 8))
        training.model.eval()
        with torch.set_grad_enabled(records_graph):
            training.model(torch.randn(1000, 8))

    found = of_kind(profiled(tmp_path, run), "graphs_without_backward")
    # At the peak, the outputs of the first layer and of the ReLU.
    assert [finding["bytes"] for finding in found] == [1000 * (16 + 16) * FLOAT] * records_graph


@pytest.mark.parametrize("together", [True, False])
def test_models_of_one_training_are_not_earlier_ones(tmp_path: Path, together: bool) -> None:
    """Two equal models, as twin critics, or two of one class and other sizes, as a generator and a discriminator."""

    def run(session: Any) -> None:
        first, second = mlp(), mlp() if together else nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 4))
        for model in (first, second):
            session.attach(model)
        optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.1)
        for _ in range(3):
            x = torch.randn(64, 8)
            (first(x) - second(x)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    assert "models_of_earlier_runs" not in kinds(profiled(tmp_path, run))


@pytest.mark.parametrize("clears", [True, False])
def test_gradients_of_clients_that_wait_for_their_turn(tmp_path: Path, clears: bool) -> None:
    def run(session: Any) -> None:
        clients = [Training(mlp()) for _ in range(3)]
        for client in clients:
            model, optimizer = client.model, client.optimizer
            for _ in range(2):
                optimizer.zero_grad()
                model(torch.randn(BATCH, 8)).square().mean().backward()
                optimizer.step()
            if clears:
                optimizer.zero_grad()

    profile = profiled(tmp_path, run)
    found = of_kind(profile, "gradients_of_other_models")
    size = sum(parameter.numel() for parameter in mlp().parameters()) * FLOAT
    assert [finding["bytes"] for finding in found] == [2 * BATCH * size] * (not clears)  # while the last one is trained
    assert "models_of_earlier_runs" not in kinds(profile)


@pytest.mark.parametrize("mode", ["hooks", "functorch", "ew", "ghost"])
def test_steady_training_has_no_findings_but_the_inherent(tmp_path: Path, mode: str) -> None:
    """What every run of Opacus wastes may be found; nothing else is."""
    profile = profiled(tmp_path, train(16, mlp(), mode))
    assert kinds(profile) <= {"copied_per_sample_gradients", "discarded_gradients", "noise_allocated_twice"}


def test_a_clean_run_has_none(tmp_path: Path) -> None:
    """Training in the mode hooks, with larger batches and without what autograd and Opacus make in vain."""

    def run(session: Any) -> None:
        training = Training(mlp())
        drop_gradients(training)
        for size in (32, 24, 40, 31, 8, 33, 40, 12, 20):
            training.step(torch.randn(size, 8))
            with torch.no_grad():
                training.model(torch.randn(64, 8))

    restore = adopt_grad_samples()
    try:
        assert profiled(tmp_path, run)["findings"] == []
    finally:
        restore()
