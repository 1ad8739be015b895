# SPDX-License-Identifier: Apache-2.0
"""What counts as `inputs`: a loader's batches with their labels, the model's arguments, ghost clipping's targets."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from opacus_memprof import hooks
from tests.integration.opacus_training import attached, categories, cpu, prepare  # noqa: F401

pytestmark = pytest.mark.filterwarnings("ignore:Full backward hook is firing")

FLOAT, INT = 4, 8


def test_all_that_a_loader_yields_and_nothing_else(cpu: None) -> None:  # noqa: F811
    dataset = TensorDataset(torch.randn(32, 50), torch.randint(9, (32, 7)))
    attachment = hooks.attach_model(nn.Linear(50, 9))
    before = categories()
    batches: list[Any] = list(DataLoader(dataset, batch_size=8))
    after = categories()
    attachment.detach()
    assert len(batches) == 4
    changed = {name: size - before[name] for name, size in after.items() if size != before[name]}
    assert changed == {"inputs": 32 * 50 * FLOAT + 32 * 7 * INT}

    kept = categories()["inputs"]
    batches = list(DataLoader(dataset, batch_size=8))  # nobody follows this one
    assert categories()["inputs"] == kept - after["inputs"] + before["inputs"]


def test_targets_of_the_criterion_that_opacus_wraps(cpu: None) -> None:  # noqa: F811
    training = prepare("ghost")
    with attached(training):
        tokens = torch.zeros(8, 5, dtype=torch.long)
        logits = training.model(tokens)
        before = categories()
        labels = torch.ones(8, dtype=torch.long)  # after the forward, as `labels.to(device)` may be
        loss = training.criterion(logits, labels)
        assert categories()["inputs"] - before["inputs"] == 8 * INT
        loss.backward()


def test_an_argument_that_was_computed_from_parameters_is_none(cpu: None) -> None:  # noqa: F811
    model = nn.Linear(50, 50)
    attachment = hooks.attach_model(model)
    hidden = torch.randn(8, 50, requires_grad=True) * 2
    before = categories()["inputs"]
    model(hidden)
    assert categories()["inputs"] == before
    attachment.detach()
