# SPDX-License-Identifier: Apache-2.0
"""Layers recognized by what they compute: which, and their norms and sums against plain autograd, in float64."""

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional

from opacus_memprof.clipping.layers import layer_for
from opacus_memprof.clipping.workspace import Workspace
from tests.unit.clipping_cases import keep_with_norms, per_sample_gradients, relative_error

WIDTH = 6


class Transposed(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(inputs, outputs)), nn.Parameter(torch.randn(outputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight + self.bias


class OnePlus(nn.Module):
    """RMSNorm with one added to its weight, as Gemma's."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden * torch.rsqrt(hidden.square().mean(-1, keepdim=True) + 1e-6) * (1 + self.weight)


class OverChannels(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(WIDTH)), nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.layer_norm(x.movedim(1, -1), (WIDTH,), self.weight, self.bias).movedim(-1, 1)


class Scaled(nn.Embedding):
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return super().forward(ids) * 2.5


class Shifted(nn.Embedding):
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return super().forward((ids + 1) % self.num_embeddings)


class Squared(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) ** 2


class Twisted(nn.Module):
    """Not linear in its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight.tanh()


class AcrossSamples(OnePlus):
    """Scales what depends on all samples."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return super().forward(hidden - hidden.mean(0))


class Noisy(OnePlus):
    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return super().forward(functional.dropout(hidden, 0.5))


def zeroed(module: nn.Module) -> nn.Module:
    for parameter in module.parameters():
        nn.init.zeros_(parameter)
    return module


def ids(*shape: int) -> Callable[[], torch.Tensor]:
    return lambda: torch.randint(0, 9, (4, *shape))


def reals(*shape: int) -> Callable[[], torch.Tensor]:
    return lambda: torch.randn(4, *shape, dtype=torch.float64)


RECOGNIZED: list[tuple[Callable[[], nn.Module], Callable[[], torch.Tensor], str]] = [
    (lambda: Transposed(WIDTH, 4), reals(3, WIDTH), "TransposedLinearLayer"),
    (lambda: Transposed(WIDTH, 30), reals(2, WIDTH), "TransposedLinearLayer"),
    (lambda: Transposed(WIDTH, WIDTH), reals(WIDTH), "TransposedLinearLayer"),
    (lambda: type("Subclass", (nn.Linear,), {})(WIDTH, WIDTH), reals(3, WIDTH), "LinearLayer"),
    (OnePlus, reals(3, WIDTH), "ScaleLayer"),
    (OverChannels, reals(WIDTH, 3, 2), "ScaleLayer"),
    (lambda: Scaled(9, WIDTH, padding_idx=2), ids(5), "ScaledEmbeddingLayer"),
    (lambda: type("Subclass", (nn.Embedding,), {})(9, WIDTH), ids(5), "EmbeddingLayer"),
    (lambda: nn.BatchNorm2d(WIDTH).eval(), reals(WIDTH, 3, 2), "ScaleLayer"),
]


@pytest.mark.parametrize(("build", "inputs", "kind"), RECOGNIZED)
@pytest.mark.parametrize("size", [500, 1 << 40])
def test_recognized_layers_equal_plain_autograd(
    build: Callable[[], nn.Module], inputs: Callable[[], torch.Tensor], kind: str, size: int
) -> None:
    torch.manual_seed(0)
    module = build().double()
    for parameter in module.parameters():
        nn.init.normal_(parameter)
    before, state = {n: t.clone() for n, t in module.state_dict().items()}, torch.get_rng_state()
    layer = layer_for("layer", module, [name for name, _ in module.named_parameters()])
    assert type(layer).__name__ == kind
    assert all(torch.equal(t, before[n]) for n, t in module.state_dict().items())
    assert torch.equal(torch.get_rng_state(), state)

    x, workspace = inputs(), Workspace(size)
    g = torch.randn_like(module(x))
    gradients = per_sample_gradients(module, x, lambda i: g[i : i + 1])
    factors = torch.rand(4, dtype=torch.float64)
    kept = keep_with_norms(layer, x, g, workspace)
    norms = layer.keep_norms(x, g, workspace).norms
    formed = layer.sums_of_backward(x, g, factors, None, workspace)
    sums = dict(layer.clipped_sums(kept, factors, workspace))
    for name, parameter in module.named_parameters():
        expected = torch.einsum("n,n...->...", factors, gradients[name])
        assert relative_error(norms[parameter], gradients[name].flatten(1).square().sum(1)) < 1e-10
        assert relative_error(kept.norms[parameter], norms[parameter]) < 1e-10
        assert relative_error(sums[parameter].view_as(parameter), expected) < 1e-10
        assert relative_error(formed[parameter].view_as(parameter), expected) < 1e-10


@pytest.mark.parametrize(("build", "kind"), [(build, kind) for build, _, kind in RECOGNIZED])
def test_zeros_are_recognized_as_well(build: Callable[[], nn.Module], kind: str) -> None:
    module = zeroed(build())
    state = torch.get_rng_state()
    assert type(layer_for("layer", module, [name for name, _ in module.named_parameters()])).__name__ == kind
    assert not any(parameter.any() for parameter in module.parameters())
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    "build",
    [
        lambda: Squared(WIDTH, WIDTH),
        lambda: zeroed(Squared(WIDTH, WIDTH)),
        lambda: Shifted(9, WIDTH),
        Twisted,
        AcrossSamples,
        Noisy,
        lambda: nn.PReLU(WIDTH),
        lambda: nn.Bilinear(3, 3, 4),
        lambda: nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, 4)),
    ],
)
def test_other_layers_are_not_recognized(build: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    module = build()
    names = [name for name, _ in module.named_parameters(recurse=False)] or ["bias"]
    assert type(layer_for("layer", module, names)).__name__ == "GenericLayer"


class Flagged(Transposed):
    """What it computes follows from an attribute, not from its class."""

    def __init__(self, squares: bool, private: bool) -> None:
        super().__init__(4, 5)
        for parameter in self.parameters():
            nn.init.zeros_(parameter)
        self.squares, self._squares = (False, squares) if private else (squares, False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = super().forward(x)
        return found**2 if self.squares or self._squares else found


def test_layers_of_zeros_are_told_apart_by_their_attributes() -> None:
    layers = [Flagged(squares, private) for squares in (False, True, False) for private in (False, True)]
    kinds = [type(layer_for("layer", layer, ["weight", "bias"])).__name__ for layer in layers]
    assert kinds == ["TransposedLinearLayer"] * 2 + ["GenericLayer"] * 2 + ["TransposedLinearLayer"] * 2
