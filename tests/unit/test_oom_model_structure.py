# SPDX-License-Identifier: Apache-2.0
"""Which layer's backward lets go of which activations, and which gradients pass by it."""

from __future__ import annotations

import pytest

from opacus_memprof.analysis.oom.layers import (
    Layer,
    distribute_missing,
    releasing_layers,
    repeated_units,
    with_residual_gradients,
)
from opacus_memprof.profiles.layer_shapes import CaptureShape, LayerShape

FLAT = ["features.0", "features.2", "features.10", "head"]
BLOCKS = ["blocks.0.norm", "blocks.0.mlp.0", "blocks.0.mlp.2", "blocks.1.norm", "blocks.1.mlp.0", "blocks.1.mlp.2"]


def layers(names: list[str], size: int = 400) -> list[Layer]:
    module = LayerShape("Linear", 40, 10, 0, 2, 5, True)
    return [Layer(name, module, CaptureShape(4, 1, size, size, 4, False), 0) for name in names]


@pytest.mark.parametrize(
    ("module", "home"),
    [
        ("features.2", "features.2"),
        ("features.1", "features.2"),  # a ReLU's output is the next convolution's input
        ("features.3", "features.10"),  # by number, not by spelling
        ("features.11", "features.10"),  # what no layer of the same container follows goes with the last one
        ("", None),
    ],
)
def test_homes_among_numbered_layers(module: str, home: str | None) -> None:
    assert releasing_layers([module], FLAT).get(module) == home


def test_homes_in_containers() -> None:
    homes = releasing_layers(["blocks.0.mlp.1", "blocks.1.mlp", "blocks.0"], BLOCKS)
    assert homes == {"blocks.0.mlp.1": "blocks.0.mlp.2", "blocks.1.mlp": "blocks.1.mlp.2", "blocks.0": "blocks.0.mlp.2"}


def test_a_model_without_containers() -> None:
    assert releasing_layers(["1", "3"], ["0", "2", "4"]) == {"1": "2", "3": "4"}


def test_what_has_gone_already_was_of_the_layers_behind() -> None:
    names = ["0", "2", "4"]
    assert [layer.activations for layer in distribute_missing(layers(names), 90, "2")] == [0, 0, 90]
    assert [layer.activations for layer in distribute_missing(layers(names), 90, "")] == [30, 30, 30]
    assert [layer.activations for layer in distribute_missing(layers(names), 90, "4")] == [
        30,
        30,
        30,
    ]  # nothing lies behind it


def test_the_gradient_of_a_residual_stream_passes_by_its_branches() -> None:
    known = layers([*BLOCKS, "head"])
    units = repeated_units({layer.name: layer.module for layer in known})
    adds = with_residual_gradients(known, {"blocks.0": 400, "blocks.0.mlp.1": 400}, units)
    # The other block is like the one that was seen.
    assert [layer.residual_gradient for layer in adds] == [400] * 6 + [0]
    assert all(layer.passed_gradients(4, mean_loss=False) == 800 + layer.residual_gradient for layer in adds)
    weights = with_residual_gradients(known, {"blocks.0": 6400}, units)  # something else is made there
    assert not any(layer.residual_gradient for layer in weights)
