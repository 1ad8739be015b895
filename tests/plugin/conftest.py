# SPDX-License-Identifier: Apache-2.0
"""Runs pytest on small test files in this process (pytester), on the CPU also where there is a GPU."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from opacus_memprof.pytest_plugin import lifecycle, plugin, summary  # noqa: F401 (pytester unloads what a run loads first)
from opacus_memprof.recording import allocators

ROOT = Path(plugin.__file__).parents[2]
PLUGIN = "opacus_memprof.pytest_plugin.plugin"
LOAD = ("-p", PLUGIN, "-p", "no:cacheprovider")

# What the tests train: on the CPU, with a fixed seed, and blocks of whole MiB where the size matters.
TRAINING = """
import gc

import opacus
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

MIB = 2**20

def block(mib):
    return torch.empty(int(mib * MIB), dtype=torch.uint8)

def train(width=32, steps=1, mode="hooks"):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, width), nn.ReLU(), nn.Linear(width, 4))
    data = TensorDataset(torch.randn(8 * steps, 16), torch.randint(4, (8 * steps,)))
    model, optimizer, *criterion, loader = opacus.PrivacyEngine().make_private(
        module=model, optimizer=torch.optim.Adam(model.parameters()), criterion=nn.CrossEntropyLoss(),
        data_loader=DataLoader(data, batch_size=8), noise_multiplier=1.0, max_grad_norm=1.0,
        poisson_sampling=False, grad_sample_mode=mode)
    criterion = criterion[0] if criterion else nn.CrossEntropyLoss()
    for features, labels in loader:
        optimizer.zero_grad()
        criterion(model(features), labels).backward()
        optimizer.step()
"""

Run = Callable[..., pytest.RunResult]


@pytest.fixture(scope="package", autouse=True)
def preloaded_torch() -> None:
    """Torch loads parts of itself on their first use, and none of them can be loaded twice."""
    scope: dict[str, Any] = {}
    exec(TRAINING, scope)
    for mode in ("hooks", "functorch", "ghost"):
        scope["train"](mode=mode)


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    # Entry points are left out, ours too where the package is installed: pytest refuses to register a plugin twice.
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setattr(allocators, "_cuda_available", lambda: False)


@pytest.fixture
def run(pytester: pytest.Pytester) -> Run:
    """Writes a test file after what TRAINING defines, and runs pytest on it with these arguments."""

    def on(source: str, *arguments: str) -> pytest.RunResult:
        pytester.makepyfile(test_it=TRAINING + source)
        return pytester.runpytest_inprocess(*LOAD, "-W", "ignore", *arguments)

    return on
