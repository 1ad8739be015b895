# SPDX-License-Identifier: Apache-2.0
"""Leaks planted in real training are found with their bytes and named by category, module and site.

Clean training of many kinds raises no alarm.
"""

import gc
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from opacus import PrivacyEngine
from opacus.utils.batch_memory_manager import BatchMemoryManager
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import opacus_memprof

FLOAT = 4
STEPS = 14
WATCHED = STEPS - 4  # all but the first two and the last two


@pytest.fixture(autouse=True)
def no_cyclic_garbage() -> Iterator[None]:
    """Earlier tests' models die before; a cycle lives for as long as the test says."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()
    gc.collect()


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))


def loss_of(output: Tensor) -> Tensor:
    return output.flatten(1).square().mean()


def growths(directory: Path, run: Callable[[], None]) -> dict[str, dict[str, Any]]:
    """The growing_memory findings of a run by category."""
    with opacus_memprof.profile(directory, device="cpu") as session:
        session.attach(PrivacyEngine)
        run()
    profile = json.loads((directory / "profile.json").read_text())
    return {found["category"]: found for found in profile["findings"] if found["kind"] == "growing_memory"}


def private(
    model: nn.Module, mode: str = "hooks", *, poisson: bool = False, batch: int = 4, size: int = 4 * STEPS
) -> Any:
    data = TensorDataset(torch.randn(size, 8))
    model, optimizer, loader = PrivacyEngine().make_private(
        module=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=0.1),
        data_loader=DataLoader(data, batch_size=batch),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        poisson_sampling=poisson,
        grad_sample_mode=mode,
    )[:3]
    return model, optimizer, loader


def train(each: Callable[[nn.Module, Tensor], None], *, zero_grad: bool = True) -> None:
    model, optimizer, loader = private(mlp())
    for (x,) in loader:
        loss = loss_of(model(x))
        loss.backward()
        optimizer.step()
        if zero_grad:
            optimizer.zero_grad(set_to_none=True)
        each(model, loss)


def test_a_list_that_keeps_losses(tmp_path: Path) -> None:
    losses = []
    found = growths(tmp_path, lambda: train(lambda model, loss: losses.append(loss)))
    # The loss itself is all that a graph keeps after its backward: four bytes a step, far below one percent.
    (growth,) = found.values()
    assert growth["bytes"] == WATCHED * FLOAT
    assert growth["sites"] == [
        {"module": "", "phase": "forward", "op": "", "bytes": WATCHED * FLOAT, "blocks": WATCHED, "steps": WATCHED}
    ]
    assert "loss" in growth["remedy"]


def test_captures_without_a_backward(tmp_path: Path) -> None:
    def evaluate(model: nn.Module, loss: Tensor) -> None:
        model.train()
        model(torch.randn(4, 8))  # nobody calls backward: Opacus keeps the inputs of both Linears

    def run() -> None:
        model, optimizer, loader = private(mlp())
        for (x,) in loader:
            loss_of(model(x)).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            evaluate(model, x)
            for parameter in model.parameters():
                parameter._forward_counter = 0  # else the next step fails

    found = growths(tmp_path, run)
    # The first Linear's input is the batch; the second one's is the ReLU's output.
    assert found["inputs"]["bytes"] == WATCHED * 4 * 8 * FLOAT
    assert found["activation_hooks"]["modules"] == {"1": WATCHED * 4 * 16 * FLOAT}
    assert "no_grad" in found["activation_hooks"]["remedy"]


def test_a_growing_list_of_grad_samples(tmp_path: Path) -> None:
    """A plain optimizer has none of Opacus' guards: without zero_grad each backward adds its samples to the list."""

    def run() -> None:
        model, _, loader = private(mlp())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        running = opacus_memprof.session.current()
        assert running is not None
        running.attach(optimizer)
        for (x,) in loader:
            loss_of(model(x)).backward()
            optimizer.step()

    found = growths(tmp_path, run)["per_sample_gradients"]
    samples = 4 * FLOAT * sum(parameter.numel() for parameter in mlp().parameters())
    assert found["bytes"] == WATCHED * samples
    assert set(found["modules"]) == {"0", "2"}
    assert {site["phase"] for site in found["sites"]} == {"backward"}
    assert "zero_grad" in found["remedy"]


def test_a_cycle(tmp_path: Path) -> None:
    class Node:
        def __init__(self) -> None:
            self.itself = self
            self.scores = torch.zeros(50)

    def each(model: nn.Module, loss: Tensor) -> None:
        Node()

    (growth,) = growths(tmp_path, lambda: train(each)).values()
    assert growth["bytes"] == WATCHED * 50 * FLOAT
    assert growth["sites"][0]["phase"] in {"idle", "zero_grad"}
    assert "gc.collect()" in growth["remedy"]


@pytest.mark.parametrize("mode", ["hooks", "functorch", "ew", "ghost"])
@pytest.mark.parametrize("seed", range(3))
def test_poisson_batches_raise_no_alarm(tmp_path: Path, mode: str, seed: int) -> None:
    """12 clean runs: batches vary; caches and optimizer states come and stay."""

    def run() -> None:
        torch.manual_seed(seed)
        if mode == "ghost":
            criterion, model, optimizer, loader = ghost()
        else:
            model, optimizer, loader = private(mlp(), mode, poisson=True, batch=12, size=12 * STEPS)
            criterion = None
        for (x,) in loader:
            output = model(x)
            loss = loss_of(output) if criterion is None else criterion(output, torch.zeros(len(x), dtype=torch.long))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    assert growths(tmp_path, run) == {}


def ghost() -> tuple[Any, ...]:
    model = mlp()
    model, optimizer, criterion, loader = PrivacyEngine().make_private(
        module=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=0.1),
        criterion=nn.CrossEntropyLoss(),
        data_loader=DataLoader(TensorDataset(torch.randn(12 * STEPS, 8)), batch_size=12),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        grad_sample_mode="ghost",
    )
    return criterion, model, optimizer, loader


@pytest.mark.parametrize("seed", range(8))
def test_virtual_batches_raise_no_alarm(tmp_path: Path, seed: int) -> None:
    """8 clean runs with logical batches of several physical ones, and values that are read but not kept."""

    def run() -> None:
        torch.manual_seed(seed)
        model, optimizer, loader = private(mlp(), poisson=True, batch=8, size=64)
        read = []
        for _ in range(2):
            with BatchMemoryManager(data_loader=loader, max_physical_batch_size=3, optimizer=optimizer) as batches:
                for (x,) in batches:
                    loss = loss_of(model(x))
                    loss.backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    read.append(loss.item())

    assert growths(tmp_path, run) == {}
