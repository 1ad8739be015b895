# SPDX-License-Identifier: Apache-2.0
"""What counts as `inputs`: a loader's batches with their labels, the model's arguments, ghost clipping's targets."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from opacus.utils.batch_memory_manager import BatchSplittingSampler
from opacus.utils.uniform_sampler import UniformWithReplacementSampler
from torch import Tensor, nn
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset, TensorDataset

from opacus_memprof import hooks
from opacus_memprof.hooks.inputs import observe_what_comes
from opacus_memprof.profiles.layer_shapes import TrainingShapes
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
    size = 32 * 50 * FLOAT + 32 * 7 * INT
    assert changed == {"inputs": size, "dataset": size, "unattributed": -size}

    kept = categories()["inputs"]
    batches = list(DataLoader(dataset, batch_size=8))  # nobody follows this one
    assert categories()["inputs"] == kept - after["inputs"] + before["inputs"]


class Images(Dataset[Tensor]):
    """As torchvision's are: tensors as attributes, and what is none of the data set's memory."""

    def __init__(self) -> None:
        self.data, self.targets = torch.randn(20, 3), [0] * 20
        self.model = nn.Linear(3, 3)
        self.learned = torch.randn(3, requires_grad=True)

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Tensor:
        return self.data[index]


def test_the_data_set_that_a_loader_draws_from(cpu: None) -> None:  # noqa: F811
    images, other = Images(), TensorDataset(torch.randn(12, 3, dtype=torch.float64))
    parts = ConcatDataset([Subset(images, range(5)), other])
    attachment = hooks.attach_model(nn.Linear(3, 3))
    before = categories()
    for _ in range(2):  # epochs
        iterator = iter(DataLoader(parts, batch_size=5))
    changed = {name: size - before[name] for name, size in categories().items() if size != before[name]}
    size = 20 * 3 * FLOAT + 12 * 3 * 2 * FLOAT
    assert changed == {"dataset": size, "unattributed": -size}
    assert next(iterator).shape == (5, 3)
    attachment.detach()


class OwnLoss(nn.Module):
    """Calls none of torch's losses, which would be followed by themselves."""

    reduction = "mean"

    def forward(self, logits: Tensor, target: Tensor) -> Tensor:
        return (logits[:, 0] - target).square()


@pytest.mark.parametrize("by_keyword", [False, True])
def test_targets_of_the_criterion_that_opacus_wraps(by_keyword: bool, cpu: None) -> None:  # noqa: F811
    training = prepare("ghost")
    training.criterion.criterion = OwnLoss()
    with attached(training):
        tokens = torch.zeros(8, 5, dtype=torch.long)
        logits = training.model(tokens)
        before = categories()
        labels = torch.ones(8, dtype=torch.long)  # after the forward, as `labels.to(device)` may be
        loss = training.criterion(logits, target=labels) if by_keyword else training.criterion(logits, labels)
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


@pytest.mark.parametrize(("samples", "rate"), [(512, 1 / 8), (640, 1 / 80), (20, 1 / 2), (4, 1.0)])
def test_a_poisson_batch_rarely_exceeds_what_is_expected_of_later_ones(
    samples: int, rate: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampler = UniformWithReplacementSampler(num_samples=samples, sample_rate=rate)
    live: list[object] = [sampler]
    monkeypatch.setattr("gc.get_objects", lambda: live)
    shapes = TrainingShapes()
    observe_what_comes(shapes, None)
    most = shapes.most_samples
    assert most is not None

    def more_than(number: int) -> float:
        sizes = range(number + 1, samples + 1)
        return sum(math.comb(samples, k) * rate**k * (1 - rate) ** (samples - k) for k in sizes)

    assert more_than(most) < 1 / 200
    assert more_than(most - 2) > 1 / 2000
    live.append(BatchSplittingSampler(sampler=sampler, max_batch_size=3, optimizer=None))
    observe_what_comes(shapes, None)
    assert shapes.most_samples == 3


def test_states_that_the_optimizers_of_other_models_will_make(monkeypatch: pytest.MonkeyPatch) -> None:
    model, other = nn.Linear(4, 4), nn.Linear(10, 2)
    size = sum(parameter.nbytes for parameter in other.parameters())
    amsgrad = torch.optim.Adam(other.parameters(), amsgrad=True)
    live = [torch.optim.Adam(model.parameters()), amsgrad, torch.optim.SGD(other.parameters())]
    monkeypatch.setattr("gc.get_objects", lambda: live)
    monkeypatch.setattr("opacus_memprof.recording.native.step", lambda: (0, 0))  # an earlier test's session has steps
    shapes = TrainingShapes()
    observe_what_comes(shapes, model)
    other(torch.randn(2, 10)).sum().backward()
    amsgrad.step()
    made = sum(state.nbytes for each in amsgrad.state.values() for state in each.values() if state.dim())
    assert shapes.coming_states == made == 3 * size
    assert shapes.coming_gradients == size
    observe_what_comes(shapes, model)
    assert shapes.coming_states == shapes.coming_gradients == 0
