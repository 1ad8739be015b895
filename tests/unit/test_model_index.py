# SPDX-License-Identifier: Apache-2.0
"""The index of models by their parameters: right after every change of a model, and made by few looks at the heap."""

import gc

import pytest
import torch
from torch import nn

from opacus_memprof.running import plain_models
from opacus_memprof.running.plain_models import ModelIndex


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[type]:
    """The classes whose instances were looked for."""
    found: list[type] = []
    original = plain_models.instances

    def instances(cls: type) -> list[object]:
        found.append(cls)
        return original(cls)

    monkeypatch.setattr(plain_models, "instances", instances)
    return found


def test_an_optimizer_for_each_parameter_costs_one_look(looks: list[type]) -> None:
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(100)))
    index = ModelIndex()
    for parameter in model.parameters():
        assert index.models_of([parameter]) == [model]
    assert looks == [nn.Module]


def test_a_model_that_becomes_a_part_of_another(looks: list[type]) -> None:
    inner = nn.Linear(2, 2)
    index = ModelIndex()
    assert index.models_of(inner.parameters()) == [inner]
    outer = nn.Sequential(inner)
    assert index.models_of(inner.parameters()) == [outer]
    inner.weight = nn.Parameter(torch.zeros(2, 2))
    assert index.models_of([inner.weight]) == [outer]
    assert len(looks) == 3


def test_what_is_in_no_model_and_what_is_gone() -> None:
    index = ModelIndex()
    model = nn.Linear(2, 2)
    weight, bare = model.weight, nn.Parameter(torch.zeros(2))
    assert index.models_of([bare]) == []
    assert index.models_of([weight, bare]) == [model]
    del model
    gc.collect()
    assert index.models_of([weight]) == []


def test_a_parameter_of_several_models() -> None:
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    second.weight = first.weight
    assert {id(model) for model in ModelIndex().models_of([first.weight])} == {id(first), id(second)}
