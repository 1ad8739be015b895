# SPDX-License-Identifier: Apache-2.0
"""Norms of per-sample gradients whose tokens cancel, or whose factors are out of range.

The oracle is the gradient of the given numbers, formed in float64 (in Fraction's exact numbers for float64).
"""

import copy
from collections.abc import Callable
from fractions import Fraction

import pytest
import torch
from torch import nn

from opacus_memprof.clipping.kernels.norm_bounds import lost_digits
from opacus_memprof.clipping.kernels.norms import (
    _tiled_sums,
    gradient_squared_norms,
    gram_squared_norms,
    squared_norms,
)
from opacus_memprof.clipping.layers import LAYERS, shared
from opacus_memprof.clipping.layers.base import KeptTensors
from opacus_memprof.clipping.layers.convolution import ConvolutionLayer
from opacus_memprof.clipping.layers.embedding import EmbeddingLayer
from opacus_memprof.clipping.layers.linear import LinearLayer, TransposedLinearLayer
from opacus_memprof.clipping.layers.shared import SharedGradient, Use
from opacus_memprof.clipping.layers.small_layers import find_deferred_norms
from opacus_memprof.clipping.modes import FlashNormSampler
from opacus_memprof.clipping.workspace import Workspace

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
WORKSPACES = [Workspace(1 << 14), Workspace(1 << 28)]
ACCURACY = 1e-3  # of a squared norm: 5e-4 of the norm


def exact_squared_norms(g: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
    """[N] in float64, from exact sums: ``g`` [N, rows, T] and ``a`` [N, T, columns]."""
    if g.dtype != torch.float64:
        return (g.double() @ a.double()).flatten(1).square().sum(1)
    norms = []
    for g_n, a_n in zip(g.tolist(), a.tolist(), strict=True):
        columns = list(zip(*a_n, strict=True))
        gradient = [sum(Fraction(x) * Fraction(y) for x, y in zip(r, c, strict=True)) for r in g_n for c in columns]
        norms.append(float(sum(each * each for each in gradient)))
    return torch.tensor(norms, dtype=torch.float64)


def assert_accurate(norms: torch.Tensor, exact: torch.Tensor) -> None:
    torch.testing.assert_close(norms.double(), exact, rtol=ACCURACY, atol=0)


def opposing(dtype: torch.dtype, size: float, rest: float, tokens: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs of 1/4, and two tokens with output gradients ``size`` and ``rest - size``, between ordinary samples."""
    torch.manual_seed(0)
    g, a = torch.randn(3, tokens, 8), torch.randn(3, tokens, 6)
    g, a = g.double(), a.double()
    g[1], a[1] = 0, 0.25
    g[1, 0], g[1, -1] = size, rest - size
    return g.to(dtype).mT, a.to(dtype)


@pytest.mark.parametrize("workspace", WORKSPACES)
@pytest.mark.parametrize("tokens", [2, 7, 90])
@pytest.mark.parametrize(
    ("dtype", "size", "rest"),
    [
        (torch.float32, 1e8, 8192.0),
        (torch.float32, 1e12, 65536.0),
        (torch.float32, 1.0, 0.125),
        (torch.float32, 1.0, 2.0**-7),
        (torch.float64, 1e12, 8192.0),
        (torch.float64, 1e12, 2.0**-13),
        (torch.bfloat16, 256.0, 2.0),
        (torch.bfloat16, 1e20, 1e18),
        (torch.float16, 1024.0, 1.0),
    ],
)
def test_opposing_tokens(dtype: torch.dtype, size: float, rest: float, tokens: int, workspace: Workspace) -> None:
    g, a = opposing(dtype, size, rest, tokens)
    exact = exact_squared_norms(g, a)
    assert exact[1] > 0
    assert_accurate(gram_squared_norms(g, a, workspace), exact)


@pytest.mark.parametrize("dtype", DTYPES)
def test_constant_dimensions(dtype: torch.dtype) -> None:
    """Every rounding error has the same sign, and the result is just large enough to be taken or just too small."""
    for width in (64, 768):
        for value in (0.1, 0.7, 1.7):
            for rest in (0.02, 0.05, 0.1, 0.2, 0.3):
                g = torch.full((1, 2, width), value)
                g[:, 1] *= rest - 1
                g, a = g.to(dtype).mT, torch.full((1, 2, 4), 0.1).to(dtype)
                exact = (g.double() @ a.double()).flatten(1).square().sum(1)
                assert_accurate(gram_squared_norms(g, a, WORKSPACES[1]), exact)


@pytest.mark.parametrize("dtype", DTYPES)
def test_inputs_from_a_layer_norm(dtype: torch.dtype) -> None:
    """Nearly equal tokens through a LayerNorm, and output gradients that cancel over them."""
    torch.manual_seed(0)
    tokens, features = 250, 32
    common = torch.randn(1, 1, features)
    a = nn.functional.layer_norm(common + 1e-4 * torch.randn(2, tokens, features), (features,))
    g = torch.randn(2, tokens, 5) * 100
    g -= g.mean(1, keepdim=True)
    g, a = g.to(dtype).mT, a.to(dtype)
    exact = (g.double() @ a.double()).flatten(1).square().sum(1)
    assert_accurate(gram_squared_norms(g, a, WORKSPACES[1]), exact)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_cross_entropy_with_opposing_labels(dtype: torch.dtype) -> None:
    """Two tokens that differ in the last digits only, with labels that are sure to be wrong."""
    torch.manual_seed(0)
    layer = nn.Linear(6, 2, bias=False).to(dtype)
    x = torch.randn(1, 1, 6).expand(3, 40, 6).clone().to(dtype)
    x += (1e-5 if dtype == torch.float32 else 1e-9) * torch.randn_like(x)
    output = (0.001 * layer(x)).detach().requires_grad_()
    labels = torch.arange(40).remainder(2).expand(3, 40).flatten()
    nn.functional.cross_entropy(output.flatten(0, 1), labels, reduction="sum").backward()
    assert output.grad is not None
    g = output.grad - output.grad.mean(1, keepdim=True)
    exact = exact_squared_norms(g.mT, x)
    assert_accurate(gram_squared_norms(g.mT, x, WORKSPACES[1]), exact)


@pytest.mark.parametrize("workspace", WORKSPACES)
@pytest.mark.parametrize("tokens", [1, 2, 30])
@pytest.mark.parametrize("sizes", [(1e-23, 1e19), (1e22, 1e-20), (1e-20, 1e3), (1e-30, 1e25), (1e-23, 1e12)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_factors_out_of_range(
    dtype: torch.dtype, sizes: tuple[float, float], tokens: int, workspace: Workspace
) -> None:
    """Squares underflow or overflow although the gradient does not; one sample has ordinary numbers as well."""
    torch.manual_seed(0)
    g, a = torch.randn(3, tokens, 8) * sizes[0], torch.randn(3, tokens, 6) * sizes[1]
    g[2, 0], a[2, 0] = 1e-3, 1e-2
    g, a = g.to(dtype).mT, a.to(dtype)
    assert_accurate(gram_squared_norms(g, a, workspace), exact_squared_norms(g, a))


def test_deferred_norms_of_single_tokens() -> None:
    torch.manual_seed(0)
    layers = [LinearLayer(str(i), nn.Linear(7, 5)) for i in range(4)]
    inputs = [(torch.randn(4, 7) * x, torch.randn(4, 5) * g) for x, g in [(1, 1), (1e12, 1e-23), (1e-23, 1e19)]]
    inputs.append(tuple(torch.cat([one[:3], other[3:]]) for one, other in zip(inputs[0], inputs[2], strict=True)))
    kept = {layer: layer.keep(x, g, WORKSPACES[1]) for layer, (x, g) in zip(layers, inputs, strict=True)}
    find_deferred_norms(kept)
    for layer, (x, g) in zip(layers, inputs, strict=True):
        norms = kept[layer].norms[layer.weight()]
        assert norms is not None
        gradients = g.unsqueeze(2) * x.unsqueeze(1)
        exact = gradients.double().flatten(1).square().sum(1)
        torch.testing.assert_close(norms.double(), exact, rtol=1e-5, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_norms_of_low_precision_are_not_of_rounded_gradients(dtype: torch.dtype) -> None:
    """All numbers of a gradient round the same way."""
    g, a = torch.full((2, 8, 7), 1.4).to(dtype), torch.full((2, 7, 6), 1.1).to(dtype)
    exact = exact_squared_norms(g, a)
    assert not torch.allclose((g @ a).double().flatten(1).square().sum(1), exact, rtol=3e-4)
    torch.testing.assert_close(gradient_squared_norms(g, a, WORKSPACES[1]).double(), exact, rtol=1e-5, atol=0)
    module = nn.Linear(6, 8).to(dtype)
    of_bias = LinearLayer("", module).keep_norms(a, g.mT, WORKSPACES[1]).norms[module.bias]
    assert of_bias is not None
    torch.testing.assert_close(of_bias.double(), g.double().sum(2).square().sum(1), rtol=1e-5, atol=0)


def test_a_number_for_each_sample_is_its_gradient() -> None:
    assert squared_norms(torch.tensor([1.0, 2.0, -3.0])).tolist() == [1, 4, 9]


def test_numbers_that_are_not_finite_stay_so() -> None:
    g, a = torch.randn(3, 8, 5), torch.randn(3, 5, 6)
    g[0, 1, 2], a[1, 2, 3] = torch.nan, torch.inf
    norms = gram_squared_norms(g, a, WORKSPACES[1])
    assert norms.isfinite().tolist() == [False, False, True]


def test_zero_gradients_have_norm_zero() -> None:
    g, a = torch.zeros(2, 8, 5), torch.randn(2, 5, 6)
    assert gram_squared_norms(g, a, WORKSPACES[1]).tolist() == [0, 0]


@pytest.mark.parametrize("tokens", [64, 1024])
@pytest.mark.parametrize("dtype", DTYPES)
def test_random_gradients_are_not_formed(dtype: torch.dtype, tokens: int) -> None:
    torch.manual_seed(0)
    g, a = torch.randn(2, tokens, 48).to(dtype).mT, torch.randn(2, tokens, 64).to(dtype)
    total, absolute = _tiled_sums(g, a, WORKSPACES[1])
    lost = lost_digits(total, absolute, g, a)
    assert lost is None or not lost.any()


def convolution(channels: int, groups: int) -> ConvolutionLayer:
    return ConvolutionLayer("", nn.Conv1d(channels, channels, 3, padding=1, groups=groups, bias=False))


@pytest.mark.parametrize("workspace", WORKSPACES)
@pytest.mark.parametrize(
    "build",
    [
        lambda: LinearLayer("", nn.Linear(64, 64, bias=False)),
        lambda: TransposedLinearLayer("", nn.Linear(64, 64, bias=False)),
        lambda: convolution(64, 1),
        lambda: convolution(64, 2),
    ],
)
def test_layers(build: Callable[[], LinearLayer | ConvolutionLayer], workspace: Workspace) -> None:
    """With two tokens that cancel except for one part in 10 000."""
    torch.manual_seed(0)
    layer = build()
    is_linear = isinstance(layer, LinearLayer)
    x, g = torch.full((2, 6, 64), 0.25), torch.zeros(2, 6, 64)
    g[:, 2], g[:, 3] = 1e8, -1e8 + 8192
    x[1], g[1] = torch.randn(6, 64), torch.randn(6, 64)
    if not is_linear:
        x, g = x.mT.contiguous(), g.mT.contiguous()
    choice = layer.choose(x, g, keep=False)
    assert choice.norm == "gram"
    norms = layer.weight_squared_norms(x, g, choice, workspace)
    gradients = layer.weight_gradients(x.double(), g.double(), WORKSPACES[1])
    assert_accurate(norms, gradients.flatten(1).square().sum(1))


class Tied(nn.Module):
    """A table that is an embedding and, scaled, a linear layer that undoes what the embedding does to the loss."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 16, padding_idx=3, dtype=dtype)
        self.head = nn.Linear(16, 50, bias=False, dtype=dtype)
        self.head.weight = self.embedding.weight


@pytest.mark.parametrize("workspace", WORKSPACES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_tied_weights_that_cancel(dtype: torch.dtype, workspace: Workspace) -> None:
    """The embedding's gradient undoes that of the linear layer, except for one part in 4096 (128 in low precision)."""
    torch.manual_seed(0)
    model = Tied(dtype)
    ids = torch.randint(4, 50, (3, 5))
    ids[:, 4] = 3  # padding
    a = torch.randn(3, 5, 16).to(dtype)
    g = torch.zeros(3, 5, 50, dtype=dtype)
    g.scatter_(2, ids.unsqueeze(2), 64)
    g[:, 4] = 0
    d = -64 * a
    d[1:] *= 1 + (2.0**-7 if dtype in (torch.bfloat16, torch.float16) else 2.0**-12)
    d[2] = torch.randn(5, 16)  # an ordinary sample
    gradient = SharedGradient(model.embedding.weight, EmbeddingLayer("", model.embedding))
    gradient.uses = [Use(LinearLayer("", model.head), a, g), Use(EmbeddingLayer("", model.embedding), ids, d)]
    exact = torch.zeros(3, 50, 16, dtype=torch.float64)
    for n in range(3):
        exact[n] = g[n].double().mT @ a[n].double()
        for t in range(4):
            exact[n, ids[n, t]] += d[n, t].double()
    norms = gradient.squared_norms(workspace)
    assert norms[0] == 0
    assert_accurate(norms, exact.flatten(1).square().sum(1))


@pytest.mark.parametrize("dtype", DTYPES)
def test_random_gradients_of_tied_weights_are_not_formed(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model, formed = Tied(dtype), []
    monkeypatch.setattr(shared, "replace_lost_norms", lambda norms, lost, *_: formed.extend(lost.tolist()) or norms)
    a, d, g = (torch.randn(3, 5, width).to(dtype) for width in (16, 16, 50))
    gradient = SharedGradient(model.embedding.weight, EmbeddingLayer("", model.embedding))
    embedding = Use(EmbeddingLayer("", model.embedding), torch.randint(4, 50, (3, 5)), d)
    gradient.uses = [Use(LinearLayer("", model.head), a, g), embedding]
    gradient.squared_norms(WORKSPACES[0])
    assert formed == [False] * 3


@pytest.mark.parametrize("dtype", DTYPES)
def test_uses_of_one_layer_that_cancel(dtype: torch.dtype) -> None:
    """A layer that runs twice, with output gradients that are opposite except for the last digits."""
    torch.manual_seed(0)
    module = nn.Linear(16, 12, bias=False, dtype=dtype)
    layer = LinearLayer("", module)
    x, g = torch.randn(2, 3, 16).to(dtype), torch.randn(2, 3, 12).to(dtype)
    other = -g * (1 + 2 * max(torch.finfo(dtype).eps, 1e-10))
    gradient = SharedGradient(module.weight, layer)
    gradient.uses = [Use(layer, x, g), Use(layer, x, other)]
    exact = ((g.double() + other.double()).mT @ x.double()).flatten(1).square().sum(1)
    assert exact.min() > 0
    assert_accurate(gradient.squared_norms(WORKSPACES[1]), exact)


def test_a_write_to_an_earlier_use_is_seen() -> None:
    """Also where a later use comes after it: the sums would be formed from what was written."""
    module = nn.Linear(16, 16, bias=False)
    layer = LinearLayer("", module)
    gradient = SharedGradient(module.weight, layer)
    first, second = (torch.randn(2, 1, 16) for _ in range(2))
    for x in (first, second):
        gradient.add(layer, KeptTensors(pair=(x, torch.randn(2, 1, 16))), WORKSPACES[1])
        first += x is first  # after its own backward, and before the next one
    assert gradient.version() != gradient.noted_version


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_ghost_clipping_with_these_norms(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(64, 64, bias=False, dtype=dtype)
    g, a = (x.to(dtype) for x in opposing(dtype, 1e8, 8192.0, 6))
    a = a.repeat(1, 1, 11)[..., :64]
    g = g.mT.repeat(1, 1, 8)
    norms = FlashNormSampler(WORKSPACES[1])(layer, [a], g)[layer.weight]
    assert_accurate(norms.square(), (g.mT.double() @ a.double()).flatten(1).square().sum(1))


@pytest.mark.parametrize(
    ("dtype", "size"),
    [(torch.float32, 1e8), (torch.float32, 1e9), (torch.float32, 1e10), (torch.float64, 1e10), (torch.bfloat16, 2**20)],
)
@pytest.mark.parametrize(
    "module",
    [
        nn.Linear(64, 64),
        nn.Linear(64, 256),
        nn.Linear(256, 64, bias=False),
        nn.Conv1d(64, 48, 1, bias=False),  # of which the pair is kept, and the norm found from gradients
        nn.Conv1d(64, 64, 3, padding=1),
        nn.Embedding(50, 16),
    ],
)
def test_a_sample_whose_tokens_cancel_contributes_what_it_may(
    module: nn.Module, size: float, dtype: torch.dtype
) -> None:
    """Clip factors apply to numbers that cancel only before they are rounded."""
    torch.manual_seed(0)
    module = copy.deepcopy(module).to(dtype)
    layer = LAYERS[type(module)]("", module)
    tokens = 40
    if isinstance(module, nn.Embedding):
        x = torch.full((1, tokens), 7)
    elif isinstance(module, nn.Conv1d):
        x = torch.full((1, 64, tokens), 0.25, dtype=dtype)
    else:
        x = torch.full((1, tokens, module.in_features), 0.25, dtype=dtype)
    x = x.repeat(2, *[1] * (x.dim() - 1))
    g = torch.zeros_like(module(x))
    positions = g.mT if isinstance(module, nn.Conv1d) else g
    factor = 0.5 + torch.rand(positions.shape[-1])
    if dtype == torch.bfloat16:  # whose differences are few: eight are left of four tokens
        positions[0, [2, 35, 7, 9]] = torch.tensor([[size * (1 + 2**-7), -size, -size * 2**-7, 8]]).to(dtype).mT
    else:
        positions[0, 2] = size * factor
        positions[0, 35] = 8192 - size * factor
    positions[1] = 0
    for _ in range(2):  # the second time by the layer's keep function
        kept = layer.keep(x, g, WORKSPACES[1])
        find_deferred_norms({layer: kept})
        norms = torch.stack([squares for squares in kept.norms.values() if squares is not None]).sum(0).sqrt()
        sums = layer.clipped_sums(kept, (0.3 / norms).clamp(max=1.0), WORKSPACES[1])
        names = {parameter: name for name, parameter in module.named_parameters()}
        found = {names[parameter]: total.double() for parameter, total in sums}
        by_hand = copy.deepcopy(module).double()
        by_hand(x if x.dtype == torch.int64 else x.double())[:1].backward(g[:1].double())
        norm = torch.stack([p.grad.norm() for p in by_hand.parameters() if p.grad is not None]).norm()
        torch.testing.assert_close(norms[0].double(), norm, rtol=5e-4, atol=0)
        errors = [found[name] - p.grad * (0.3 / norm) for name, p in by_hand.named_parameters() if p.grad is not None]
        assert torch.stack([error.norm() for error in errors]).norm() <= 1e-3 * 0.3


@pytest.mark.parametrize(
    "is_first", [True, False]
)  # a layer keeps later tensors of the same shapes by another function
@pytest.mark.parametrize("size", [2, 9])  # below and above the size of what small layers process together
@pytest.mark.parametrize("mode", ["keep", "keep_norms"])
def test_layer_norm_whose_tokens_cancel(mode: str, size: int, is_first: bool) -> None:
    """A sample's gradient is as exact with many samples as with few, so that it does not change when one leaves."""
    torch.manual_seed(0)
    x, g, half = torch.randn(size, 128, 64), torch.randn(size, 128, 64), 64
    x[:, half:], g[:, half:] = x[:, :half], -g[:, :half]
    g = 1e7 * g + torch.randn(size, 128, 64)
    module = nn.LayerNorm(64)
    layer = LAYERS[nn.LayerNorm]("layer", module)
    own = getattr(layer, mode)
    kept = own(x, g, Workspace.from_mib(1))
    if not is_first:
        kept = own(x, g, Workspace.from_mib(1))
    expected = (torch.layer_norm(x.double(), (64,)) * g.double()).sum(1)
    norms = kept.norms[module.weight]
    found = squared_norms(kept.stacks[module.weight]) if norms is None else norms
    torch.testing.assert_close(found.double(), expected.square().sum(1), rtol=1e-4, atol=0)
