# SPDX-License-Identifier: Apache-2.0
"""Layer shapes are those of one model, whatever other models are attached, run and detached beside it."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from opacus import GradSampleModule
from opacus.layers import DPLSTM
from torch import nn

import opacus_memprof
from opacus_memprof.hooks import attach_model
from opacus_memprof.recording import observations

pytestmark = pytest.mark.usefixtures("clean_process")


def model(width: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, 4))


def test_a_model_that_comes_and_goes_beside_it(tmp_path: Path) -> None:
    private, teacher = GradSampleModule(model(16)), model(32)
    with opacus_memprof.profile(tmp_path, device="cpu") as session:
        session.attach(private)
        attachment = attach_model(teacher)
        teacher(torch.randn(64, 8))
        shapes = observations.layer_shapes()
        assert (dict(shapes.forwards), list(shapes.batches)) == ({}, [])
        private(torch.randn(2, 8)).sum().backward()
        assert shapes.forwards["0"].output_bytes == 2 * 16 * 4
        attachment.detach()
        private(torch.randn(6, 8))
        assert shapes.forwards["0"].output_bytes == 6 * 16 * 4
        assert [samples for _, samples in shapes.batches] == [2, 6]


def test_a_model_inside_of_the_forward_of_another(tmp_path: Path) -> None:
    """The forward of the inner one does not end the probing of the outer one."""

    class Student(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.first(x)
            teacher(x)
            return self.second(y)  # type: ignore[no-any-return]

    teacher, private = model(32), GradSampleModule(Student())
    with opacus_memprof.profile(tmp_path, device="cpu") as session:
        session.attach(teacher)
        session.attach(private)
        private(torch.randn(2, 8))
        assert list(observations.layer_shapes().forwards) == ["first", "second"]


class Tied(nn.Module):
    """An LSTM, whose inner Linear layers compute with its parameters, and two Linear layers with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = DPLSTM(8, 8, batch_first=True)
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.second.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(self.cell(x)[0][:, -1]))  # type: ignore[no-any-return]


def test_parameters_of_several_modules_count_once(tmp_path: Path) -> None:
    private = GradSampleModule(Tied())
    with opacus_memprof.profile(tmp_path, device="cpu") as session:
        session.attach(private)
        private(torch.randn(2, 5, 8))
        shapes = observations.layer_shapes()
    sizes = {name: (module.weight, module.bias, module.tied_to) for name, module in shapes.modules.items()}
    assert sizes == {
        "cell.l0.ih": (4 * 8 * 8, 4 * 8, ""),
        "cell.l0.hh": (4 * 8 * 8, 4 * 8, ""),
        "first": (8 * 8, 8, ""),
        "second": (0, 8, "first"),
    }
    assert shapes.trained_bytes == sum(parameter.nbytes for parameter in private.parameters())
    assert (shapes.modules["second"].rows, shapes.modules["second"].columns) == (8, 8)
    inner = shapes.forwards["cell.l0.hh"]
    assert (inner.calls, inner.tokens, inner.input_bytes, inner.output_bytes) == (5, 5, 5 * 2 * 8 * 4, 5 * 2 * 32 * 4)


class Scaled(nn.Module):
    """A block with a parameter of its own, which Opacus samples by functorch together with the layer inside."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.inner = nn.Parameter(torch.ones(8)), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scale * self.inner(x)


@pytest.mark.parametrize("build", [Scaled, Tied, lambda: nn.Sequential(nn.Linear(8, 8), Scaled(), nn.LayerNorm(8))])
def test_layers_are_sampled_where_opacus_hooks_them(build: Callable[[], nn.Module], tmp_path: Path) -> None:
    private = GradSampleModule(build())
    names = {module: name for name, module in private._module.named_modules()}
    hooked = {names[module] for module in private.iterate_submodules(private._module)}
    with opacus_memprof.profile(tmp_path, device="cpu") as session:
        session.attach(private)
        shapes = observations.layer_shapes().modules
    sampled = {name if shape.sampled_in is None else shape.sampled_in for name, shape in shapes.items()}
    assert sampled == hooked - {name for name in hooked if isinstance(private._module.get_submodule(name), DPLSTM)}
