# SPDX-License-Identifier: Apache-2.0
"""A small model, trained by Opacus in any mode: what the tests of the hooks run with and without them."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from opacus import PrivacyEngine
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from opacus_memprof import hooks
from opacus_memprof.profiles import core
from opacus_memprof.recording import native

BATCH, LENGTH, VOCABULARY, WIDTH, CLASSES = 8, 5, 11, 6, 3
MODES = ("vanilla", "hooks", "functorch", "ew", "ghost")


class Model(nn.Module):
    """Embedding, norm and two Linears over a sequence, as in a transformer; a class for each sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.block = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.ReLU())
        self.head = nn.Linear(4 * WIDTH, CLASSES)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.block(self.embed(tokens))).mean(dim=1)


@dataclass
class Training:
    """What a script holds after `make_private`, and what that returned as the model.

    The latter is a wrapper, which the script uses, or an object that holds the hooks.
    """

    model: Any
    optimizer: Any
    criterion: Any
    loader: Any
    returned: Any

    @property
    def prepared(self) -> tuple[Any, ...]:
        return self.returned, self.optimizer, self.criterion, self.loader

    def step(self, tokens: torch.Tensor, labels: torch.Tensor) -> float:
        loss = self.criterion(self.model(tokens), labels)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(loss.item())

    def run(self) -> list[float]:
        """One epoch: four steps."""
        return [self.step(tokens, labels) for tokens, labels in self.loader]


def batches() -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(VOCABULARY, (4 * BATCH, LENGTH), generator=generator)
    labels = torch.randint(CLASSES, (4 * BATCH,), generator=generator)
    return DataLoader(TensorDataset(tokens, labels), batch_size=BATCH)


def prepare(
    mode: str,
    model: Callable[[], nn.Module] = Model,
    engine: Callable[[], PrivacyEngine] = PrivacyEngine,
    loader: Callable[[], Any] = batches,
    **options: Any,
) -> Training:
    """A model on its seed, made private unless `mode` is vanilla. `options` go to make_private."""
    torch.manual_seed(0)
    built = model()
    optimizer = torch.optim.Adam(p for p in built.parameters() if p.requires_grad)
    if mode == "vanilla":
        return Training(built, optimizer, nn.CrossEntropyLoss(), loader(), built)
    chosen = {"noise_multiplier": 0.5, "max_grad_norm": 1.0, "poisson_sampling": False, "grad_sample_mode": mode}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Opacus warns that its random numbers are torch's
        module, private, *criterion, data = engine().make_private(
            module=built, optimizer=optimizer, criterion=nn.CrossEntropyLoss(), data_loader=loader(), **chosen | options
        )
    usable = module if isinstance(module, nn.Module) else built
    return Training(usable, private, criterion[0] if criterion else nn.CrossEntropyLoss(), data, module)


@contextmanager
def attached(training: Training) -> Iterator[None]:
    """The hooks, without a session; the allocator if it is installed."""
    attachment = hooks.attach_private(training.prepared)
    try:
        yield
    finally:
        attachment.detach()


def categories() -> dict[str, int]:
    """Live CPU bytes by category."""
    devices: dict[str, Any] = native.snapshot("test")["devices"]
    none_yet: dict[str, Any] = {"categories": dict.fromkeys(core.BUILTIN_CATEGORIES, 0)}
    counts: dict[str, int] = devices.get("cpu", none_yet)["categories"]
    return counts


@pytest.fixture
def cpu() -> Iterator[None]:
    """The recording CPU allocator; no earlier test's model dies in the middle of this one."""
    gc.collect()
    native.cpu_install()
    yield
    native.cpu_uninstall()
    native.set_phase(native.phase_id("idle"))  # a forward pass that nothing follows leaves its own
