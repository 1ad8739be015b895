# SPDX-License-Identifier: Apache-2.0
"""Checks, under Triton's interpreter, that clipped sums on CUDA do not round gradients whose tokens cancel.

Run by test_clipping_triton in a process of its own. The oracle is each sample's gradient in float64.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from opacus_memprof.clipping.arguments import ClipRule
from opacus_memprof.clipping.bookkeeping import Bookkeeping
from opacus_memprof.clipping.bookkeeping.backward_pass import BackwardPass
from opacus_memprof.clipping.kernels import norms, sums
from opacus_memprof.clipping.kernels.formed import add_products_cuda, add_rows_cuda
from opacus_memprof.clipping.layers import LAYERS, Layer, base, linear, shared, small_layers
from opacus_memprof.clipping.layers.linear import LinearLayer
from opacus_memprof.clipping.workspace import Workspace

WORKSPACE = Workspace(1 << 28)
BOUND = 1.0


def tf32(x: torch.Tensor) -> torch.Tensor:
    """Rounded to 11 bits, as the operands of a product with TF32."""
    return ((x.view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)


def rounded_products(pairs: Any, factors: torch.Tensor, most: int) -> list[torch.Tensor]:
    """``native.sum_outer_products`` as with TF32."""
    own = factors if factors.dim() == 2 else [factors] * len(pairs)
    found = []
    for (g, a), f in zip(pairs, own, strict=True):
        scaled = tf32((g * f.view(-1, *[1] * (g.dim() - 1))).contiguous())
        found.append(scaled.flatten(0, -2).mT @ tf32(a.contiguous()).flatten(0, -2))
    return found


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels and sums of CUDA with TF32."""
    for module in (norms, sums, base, linear, small_layers, shared):
        monkeypatch.setattr(module, "has_kernels", lambda x: x.dtype in (torch.float32, torch.float16))
    for module in (base, shared):
        monkeypatch.setattr(module, "pair_for_sums", lambda x, g, *_: (x, g))
    monkeypatch.setattr(small_layers, "sum_outer_products", rounded_products)
    monkeypatch.setattr(sums.native, "sum_outer_products", rounded_products)


def by_hand(layer: nn.Module, x: torch.Tensor, g: torch.Tensor) -> list[torch.Tensor]:
    """The gradients of the weight of each sample, in float64."""
    weight = layer.weight.detach().double().requires_grad_()  # type: ignore[operator, union-attr]
    found = []
    for n in range(len(x)):
        one = x[n : n + 1] if not x.is_floating_point() else x[n : n + 1].double()
        output = torch.func.functional_call(layer, {"weight": weight}, (one,))
        found.append(torch.autograd.grad(output, weight, g[n : n + 1].double())[0])
    return found


def opposing(x: torch.Tensor, shape: tuple[int, ...], token: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and output gradients of ordinary samples and, with index 1, of one whose tokens cancel."""
    g = torch.randn(shape)
    x[1] = 0.25 if x.is_floating_point() else 3
    g[1] = 0
    g[1].select(token, 0).fill_(1e8)
    g[1].select(token, 1).fill_(8192 - 1e8)
    return x, g


def clip(uses: list[tuple[Layer, torch.Tensor, torch.Tensor]], passes: int = 1) -> dict[nn.Parameter, torch.Tensor]:
    """The clipped sums of a backward."""
    rule = ClipRule("flat", BOUND)
    book = Bookkeeping(rule, "sum", WORKSPACE)
    book.places = {use[0].weight(): i for i, use in enumerate(uses)}
    each = BackwardPass(len(uses[0][2]), forwards={1})
    book._passes.append(each)
    if passes == 2:
        book.mode = "norms"
        for layer, x, g in uses:
            book.add(layer, x, g, 1)
        book.begin_sums()
    for layer, x, g in uses:
        book.add(layer, x, g, 1)
    if passes == 2:
        book.end_two_passes()
    return dict(book.pop_clipped_sums())


KINDS: dict[str, tuple[Callable[[], nn.Module], Callable[[], torch.Tensor], tuple[int, ...], int]] = {
    "linear": (lambda: nn.Linear(40, 36, bias=False), lambda: torch.randn(3, 4, 40), (3, 4, 36), 0),
    "linear_4d": (lambda: nn.Linear(40, 36, bias=False), lambda: torch.randn(3, 2, 3, 40), (3, 2, 3, 36), 0),
    "pointwise": (lambda: nn.Conv1d(40, 36, 1, bias=False), lambda: torch.randn(3, 40, 4), (3, 36, 4), 1),
    "conv": (lambda: nn.Conv2d(32, 36, 3, bias=False), lambda: torch.randn(3, 32, 4, 5), (3, 36, 2, 3), 2),
    "groups": (
        lambda: nn.Conv2d(64, 64, 3, groups=2, bias=False),
        lambda: torch.randn(3, 64, 4, 4),
        (3, 64, 2, 2),
        2,
    ),
    "embedding": (lambda: nn.Embedding(11, 130), lambda: torch.randint(0, 11, (3, 5)), (3, 5, 130), 0),
}


# Two passes form the same norms and then scale what the backward is given: a layer with products and one with ids tell.
TWICE = [pytest.param(kind, 2, marks=() if kind in ("linear", "embedding") else pytest.mark.nightly) for kind in KINDS]


@pytest.mark.parametrize(("kind", "passes"), [*((kind, 1) for kind in KINDS), *TWICE])
@pytest.mark.usefixtures("kernels")
def test_a_sample_that_cancels_adds_no_more_than_its_bound(kind: str, passes: int) -> None:
    """Two layers of one kind, and one in which no sample cancels."""
    torch.manual_seed(0)
    build, inputs, shape, token = KINDS[kind]
    modules = [build(), build()]
    uses = [(LAYERS[type(m)](str(i), m), *opposing(inputs(), shape, token)) for i, m in enumerate(modules)]
    plain = nn.Linear(8, 9, bias=False)
    uses.append((LinearLayer("plain", plain), torch.randn(3, 6, 8), torch.randn(3, 6, 9)))
    gradients = [by_hand(layer.module, x, g) for layer, x, g in uses]
    lengths = [sum(float(own[n].square().sum()) for own in gradients) ** 0.5 for n in range(3)]
    factors = [min(1.0, BOUND / (length + 1e-6)) for length in lengths]
    sums_of = clip(uses, passes)
    for (layer, _, _), own in zip(uses, gradients, strict=True):
        total = sums_of[layer.weight()].double()
        rest = total - sum(f * gradient for f, gradient in zip(factors, own, strict=True))
        assert float(rest.norm()) < 2e-3 * BOUND  # of which TF32 rounds the others by a part


@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.usefixtures("kernels")
def test_a_weight_that_is_used_twice(passes: int) -> None:
    torch.manual_seed(0)
    module = nn.Linear(40, 36, bias=False)
    layer = LinearLayer("a", module)
    layer.is_shared = True
    x, g = opposing(torch.randn(3, 4, 40), (3, 4, 36), 0)
    uses = [(layer, x, g), (layer, torch.randn(3, 4, 40), torch.randn(3, 4, 36))]
    own = [one + other for one, other in zip(*(by_hand(module, x, g) for _, x, g in uses), strict=True)]
    factors = [min(1.0, BOUND / (float(gradient.norm()) + 1e-6)) for gradient in own]
    (total,) = clip(uses, passes).values()
    exact = sum(f * gradient for f, gradient in zip(factors, own, strict=True))
    assert float((total.double() - exact).norm()) < 2e-3 * BOUND


@pytest.mark.parametrize("ceiling", [1 << 24, 1 << 14])
@pytest.mark.parametrize("groups", [1, 3])
def test_sums_with_tf32_of_norms_from_gradients(groups: int, ceiling: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each gradient is formed as it was for its norm, from operands that are not scaled."""
    torch.manual_seed(0)
    g, a, factors = torch.randn(4 * groups, 12, 200), torch.randn(4 * groups, 200, 40), torch.rand(4)
    parts = (g.double() @ a.double()).view(4, groups, 12, 40)
    exact = torch.einsum("n,ngij->gij", factors.double(), parts)
    monkeypatch.setattr(sums, "uses_tf32", lambda *_: True)
    assert sums.sum_outer_products(g.mT, a, factors, Workspace(ceiling)) is None
    formed: list[torch.Tensor] = []
    product = torch.bmm
    monkeypatch.setattr(torch, "bmm", lambda *args: formed.append(product(*args)) or formed[-1])  # type: ignore[func-returns-value]
    total = sums.sum_products(g, a, factors, groups, Workspace(ceiling))
    torch.testing.assert_close(total.double(), exact, rtol=1e-4, atol=1e-4)
    assert sum(each.numel() for each in formed) == parts.numel()  # one of each sample and group


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("transposed", [False, True])
def test_kernel_of_products(dtype: torch.dtype, transposed: bool) -> None:
    """Of two layers of other shapes; the sums stay where no sample has a factor."""
    torch.manual_seed(0)
    pairs, totals = [], []
    for tokens, rows, columns in ((5, 70, 33), (3, 7, 130)):
        g, a = torch.randn(4, tokens, rows).to(dtype), torch.randn(4, tokens, columns).to(dtype)
        pairs.append((g.mT.contiguous().mT if transposed else g, a))
        totals.append(torch.randn(rows, columns))
    factors = torch.tensor([[0, 0.5, 0, 1e-3], [0, 0, 0, 0]])
    before = [total.clone() for total in totals]
    add_products_cuda(pairs, totals, factors)
    g, a = pairs[0]
    exact = before[0].double() + torch.einsum("n,ntr,ntc->rc", factors[0].double(), g.double(), a.double())
    torch.testing.assert_close(totals[0].double(), exact, rtol=1e-6, atol=1e-6)
    assert torch.equal(totals[1], before[1])


@pytest.mark.parametrize("padding", [None, 2])
def test_kernel_of_an_embedding(padding: int | None) -> None:
    torch.manual_seed(0)
    ids, g, total = torch.randint(0, 6, (3, 9)), torch.randn(3, 140, 9).mT, torch.randn(6, 140)
    factors = torch.tensor([0.5, 0, 0.25])
    exact = total.double()
    for n, factor in enumerate(factors.tolist()):
        for row, own in zip(ids[n].tolist(), g[n].double(), strict=True):
            if row != padding:
                exact[row] += factor * own
    add_rows_cuda(ids, g, factors, total, padding)
    torch.testing.assert_close(total.double(), exact, rtol=1e-6, atol=1e-6)
