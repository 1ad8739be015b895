# SPDX-License-Identifier: Apache-2.0
"""Checks of the CUDA kernels under Triton's interpreter, which must be chosen before Triton is imported.

Run by test_clipping_triton in a process of its own.
"""

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from opacus_memprof.clipping.kernels import gram as gram_triton
from opacus_memprof.clipping.kernels import norms, sums
from opacus_memprof.clipping.kernels import stacks as stacks_triton
from opacus_memprof.clipping.kernels.formed import norms_of_outer_products_cuda
from opacus_memprof.clipping.kernels.gram import (
    gram_squared_norms_cuda,
    gram_squared_norms_of_layers,
    replace_lost_norms_cuda,
)
from opacus_memprof.clipping.kernels.noise import add_normals
from opacus_memprof.clipping.kernels.stacks import (
    TYPES,
    group_norm_gradients_cuda,
    scale_cuda,
    squared_norms_cuda,
    token_norm_gradients_cuda,
    weighted_sum_cuda,
    weighted_sums_cuda,
)
from opacus_memprof.clipping.layers import KeptTensors, base, linear, normalization, shared, small_layers
from opacus_memprof.clipping.layers.linear import LinearLayer
from opacus_memprof.clipping.layers.small_layers import pop_small_sums
from opacus_memprof.clipping.workspace import Workspace
from tests.integration.clipping_launches import LAUNCHES, count_launches, float32_difference


def _nightly(*values: object) -> Any:
    return pytest.param(*values, marks=pytest.mark.nightly)


@pytest.mark.parametrize("shape", [(2, 5, 7, 3), (1, 33, 40, 65), (3, 70, 16, 33), (2, 130, 70, 12)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])  # the interpreter's dot does not know bfloat16
def test_gram_kernel(shape: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    count, tokens, rows, columns = shape
    torch.manual_seed(0)
    # Strides as from linear layers (transposed), and as from unfolded convolutions.
    for transposed in (True, False):
        g = torch.randn(count, tokens, rows).to(dtype).mT if transposed else torch.randn(count, rows, tokens).to(dtype)
        a = (
            torch.randn(count, tokens, columns).to(dtype)
            if transposed
            else torch.randn(count, columns, tokens).to(dtype).mT
        )
        exact = (g.double() @ a.double()).flatten(1).square().sum(1)
        norms = gram_squared_norms_cuda(g, a)
        assert norms.dtype == torch.float32
        torch.testing.assert_close(norms.double(), exact, rtol=1e-4, atol=0)


def test_gram_kernel_on_slices_and_empty_batches() -> None:
    g, a = torch.randn(4, 20, 12).mT[1:3], torch.randn(4, 20, 6)[1:3]
    exact = (g.double() @ a.double()).flatten(1).square().sum(1)
    torch.testing.assert_close(gram_squared_norms_cuda(g, a).double(), exact, rtol=1e-5, atol=0)
    assert gram_squared_norms_cuda(g[:0], a[:0]).shape == (0,)


# The two transformers differ by their normalization alone, whose kernel has a check of its own.
@pytest.mark.parametrize("name", [_nightly(name) if "rms_norm" in name else name for name in LAUNCHES])
def test_a_step_with_few_launches(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step whose norms and sums are found by the kernels clips as by hand."""
    for module in (norms, sums, base, linear, normalization, small_layers, shared):
        monkeypatch.setattr(module, "has_kernels", lambda x: x.dtype == torch.float32)
    launched = count_launches(monkeypatch)
    assert float32_difference(name, "cpu") < 1e-4
    assert launched == LAUNCHES[name]


@pytest.mark.parametrize("name", ["bottlenecks", "convnet"])  # of which a pair is not smaller than the gradient
def test_a_step_of_a_single_sample(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (norms, sums, base, linear, normalization, small_layers, shared):
        monkeypatch.setattr(module, "has_kernels", lambda x: x.dtype == torch.float32)
    scaled: list[int] = []
    scale = stacks_triton.scale_cuda
    monkeypatch.setattr(stacks_triton, "scale_cuda", lambda *args: (scaled.append(len(args[0])), scale(*args)))
    assert float32_difference(name, "cpu", samples=1) < 1e-4
    assert len(scaled) == 1


def test_only_weights_are_scaled_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradients of a bias may be autograd's own."""
    for module in (norms, sums, small_layers):
        monkeypatch.setattr(module, "has_kernels", lambda x: x.dtype == torch.float32)
    layers = [LinearLayer("", nn.Linear(3, size)) for size in (2, 300, 2**19)]
    kept = {
        layer: KeptTensors(stacks={p: torch.rand(1, *p.shape) for p in layer.module.parameters()}) for layer in layers
    }
    stacks = {parameter: stack for each in kept.values() for parameter, stack in each.stacks.items()}
    before, factors = {parameter: stack.clone() for parameter, stack in stacks.items()}, torch.rand(1)
    totals = dict(pop_small_sums(kept, factors))
    for layer, each in kept.items():
        totals.update(layer.clipped_sums(each, factors, Workspace(1 << 20)))
    assert len(totals) == 6
    for parameter, total in totals.items():
        torch.testing.assert_close(total, before[parameter][0] * factors, rtol=1e-6, atol=0)
        is_weight = any(parameter is layer.module.weight for layer in layers)
        assert (total.data_ptr() == stacks[parameter].data_ptr()) == is_weight


def test_sums_in_float64_are_left_to_the_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parameters in float64 that compute in float32, as under mixed precision."""
    for module in (norms, small_layers):
        monkeypatch.setattr(module, "has_kernels", lambda x: x.dtype == torch.float32)
    layer = nn.Linear(3, 2)
    kept = KeptTensors()
    for parameter in layer.parameters():
        kept.stacks[parameter] = torch.rand(4, *parameter.shape)
    layer.bias.data = layer.bias.data.double()
    factors, expected = torch.rand(4), kept.stacks[layer.weight].clone()
    ((parameter, total),) = pop_small_sums({LinearLayer("", layer): kept}, factors)
    assert parameter is layer.weight
    torch.testing.assert_close(total, torch.einsum("n,n...->...", factors, expected))
    assert list(kept.stacks) == [layer.bias]


@pytest.mark.parametrize("limit", ["_MOST_PROGRAMS", "_MOST_PARTS", None])  # of a launch: takes the layers in several
@pytest.mark.parametrize("offset", [0, 1])  # an address that is not a multiple of 16
def test_gram_kernel_of_several_layers(limit: str | None, offset: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if limit:
        monkeypatch.setattr(gram_triton, limit, 9)
    torch.manual_seed(0)
    pairs = []
    for _ in range(4):
        g = torch.randn(3 * 40 * 12 + offset)[offset:].view(3, 40, 12).mT
        pairs.append((g, torch.randn(3, 40, 7)))
    norms, lost = gram_squared_norms_of_layers(pairs)
    assert not lost.any()
    assert norms.shape == (4, 3)
    for found, (g, a) in zip(norms, pairs, strict=True):
        exact = (g.double() @ a.double()).flatten(1).square().sum(1)
        torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=0)


def cancelling_operands(
    tokens: int, dtype: torch.dtype, sizes: tuple[float, float]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Three samples: ordinary ones, and between them one whose tokens' gradients cancel except for 2^-7."""
    torch.manual_seed(0)
    g, a = torch.randn(3, tokens, 70), torch.randn(3, tokens, 33)
    a[1], g[1] = 0.25, 0
    g[1, 3], g[1, tokens - 2] = 64, -64 + 0.5
    return (g * sizes[0]).to(dtype).mT, (a * sizes[1]).to(dtype)


SIZES = [(1.0, 1.0), (1e-23, 1e19), (1e22, 1e-20)]


@pytest.mark.parametrize(
    ("tokens", "sizes"),
    [*((5, sizes) for sizes in SIZES), (130, SIZES[0]), *(_nightly(130, each) for each in SIZES[1:])],
)
def test_gram_kernels_form_gradients_that_cancel(tokens: int, sizes: tuple[float, float]) -> None:
    g, a = cancelling_operands(tokens, torch.float32, sizes)
    exact = (g.double() @ a.double()).flatten(1).square().sum(1)
    lost = torch.empty(3, dtype=torch.bool)
    torch.testing.assert_close(gram_squared_norms_cuda(g, a, lost).double(), exact, rtol=1e-5, atol=0)
    assert lost[1] or tokens == 5  # where both tokens are one
    norms, lost_of_layers = gram_squared_norms_of_layers([(g, a), (g, a)])
    for found, own in zip(norms, lost_of_layers, strict=True):
        torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=0)
        assert torch.equal(own, lost)


def test_gram_kernels_form_gradients_in_low_precision() -> None:
    g, a = cancelling_operands(40, torch.float16, (1.0, 1.0))
    exact = (g.double() @ a.double()).flatten(1).square().sum(1)
    torch.testing.assert_close(gram_squared_norms_cuda(g, a).double(), exact, rtol=1e-5, atol=0)


def test_gram_kernels_form_only_gradients_that_cancel(monkeypatch: pytest.MonkeyPatch) -> None:
    """A norm that the tiles would get right shows whether it is replaced."""
    g, a = cancelling_operands(40, torch.float32, (1.0, 1.0))
    norms = gram_squared_norms_cuda(g, a)
    monkeypatch.setattr(gram_triton, "least_share", lambda *_: 0.0)
    monkeypatch.setattr(gram_triton, "least_product", lambda *_: 0.0)
    unbounded = gram_squared_norms_cuda(g, a)
    assert torch.equal(norms[[0, 2]], unbounded[[0, 2]])
    assert norms[1] != unbounded[1]


def test_norms_are_replaced_in_float64() -> None:
    g, a = (x.double() for x in cancelling_operands(40, torch.float32, (1.0, 1.0)))
    exact = (g @ a).flatten(1).square().sum(1)
    norms = replace_lost_norms_cuda(torch.full((3,), 7.0).double(), torch.tensor([True, False, True]), g, a)
    assert norms[1] == 7
    torch.testing.assert_close(norms[[0, 2]], exact[[0, 2]], rtol=1e-12, atol=0)


def test_norms_are_replaced_with_those_of_tied_embeddings() -> None:
    torch.manual_seed(0)
    g, a = torch.randn(2, 5, 70).mT, torch.randn(2, 5, 33)
    ids, d = torch.randint(-1, 70, (2, 9)), torch.randn(2, 33, 9).mT
    gradients = g.double() @ a.double()
    for n in range(2):
        for i, row in zip(ids[n].tolist(), d[n], strict=True):
            if i >= 0:
                gradients[n, i] += row
    norms = replace_lost_norms_cuda(torch.ones(2), torch.tensor([True, True]), g, a, (ids, d))
    torch.testing.assert_close(norms.double(), gradients.flatten(1).square().sum(1), rtol=1e-5, atol=0)


def test_kernel_of_outer_products() -> None:
    torch.manual_seed(0)
    pairs = [
        (torch.randn(3, 700, 1) * 1e-23, torch.randn(3, 1, 33) * 1e19),
        (torch.randn(3, 7, 1), torch.randn(3, 1, 2)),
    ]
    for found, (g, a) in zip(norms_of_outer_products_cuda(pairs), pairs, strict=True):
        exact = (g.double() @ a.double()).flatten(1).square().sum(1)
        torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("count", [1, 5])
def test_kernels_of_several_stacks(count: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    stacks = [torch.randn(count, *shape).to(dtype) for shape in [(3,), (1,), (40, 50), (1025,), (7, 2, 2)]]
    factors = torch.rand(count)
    norms = squared_norms_cuda(stacks)
    totals = weighted_sums_cuda(stacks, factors, torch.float32)
    for stack, found, total in zip(stacks, norms, totals, strict=True):
        exact = stack.double().flatten(1).square().sum(1)
        torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=0)
        expected = torch.einsum("n,n...->...", factors.double(), stack.double())
        assert total.shape == stack.shape[1:]
        torch.testing.assert_close(total.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1, 3), (5, 7, 11), (3, 5000)])
def test_sum_kernel(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    stack, factors = torch.randn(shape).to(dtype), torch.rand(shape[0])
    expected = torch.einsum("n,n...->...", factors.double(), stack.double())
    total = weighted_sum_cuda(stack, factors, torch.float32)
    assert total.shape == shape[1:]
    torch.testing.assert_close(total.double(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shapes", [[(1, 70, 50)], [(1, 3), (1, 70, 50), (1, 1025)]])
def test_single_samples_are_scaled_in_place(shapes: list[tuple[int, ...]], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    stacks, factors = [torch.randn(shape).to(dtype) for shape in shapes], torch.rand(1)
    expected = [(stack.float() * factors).to(dtype) for stack in stacks]
    scale_cuda(stacks, factors)
    rtol = 0 if dtype == torch.float32 else 2**-7  # the interpreter truncates to bfloat16
    for stack, scaled in zip(stacks, expected, strict=True):
        torch.testing.assert_close(stack, scaled, rtol=rtol, atol=0)


def test_sum_kernel_on_empty_batches() -> None:
    total = weighted_sum_cuda(torch.empty(0, 3, 4), torch.empty(0), torch.float32)
    assert torch.equal(total, torch.zeros(3, 4))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(2, 6, 5, 5), (1, 4, 2), (3, 80, 7, 7), (2, 4, 13, 13), (1, 6, 50, 50), (2, 6)])
@pytest.mark.parametrize("groups", [1, 2])
def test_group_norm_kernel(shape: tuple[int, ...], groups: int, dtype: torch.dtype) -> None:
    """Against autograd, one sample at a time in float64; inputs whose mean is far from 0."""
    torch.manual_seed(0)
    x, g = (5 + torch.randn(shape)).to(dtype), torch.randn(shape).to(dtype)
    layer = nn.GroupNorm(groups, shape[1], eps=1e-3).double()
    weight, bias = group_norm_gradients_cuda(x, g, groups, layer.eps)
    for n in range(len(x)):
        layer.zero_grad()
        layer(x[n : n + 1].double()).backward(g[n : n + 1].double())
        for found, parameter in ((weight[n], layer.weight), (bias[n], layer.bias)):
            assert parameter.grad is not None
            torch.testing.assert_close(found.double(), parameter.grad, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(2, 5, 6), (3, 70, 129), (2, 32, 16), (2, 33, 1), (1, 1, 7), (2, 3, 4100)])
@pytest.mark.parametrize("norm", [nn.LayerNorm, nn.RMSNorm])
def test_token_norm_kernel(norm: type[nn.LayerNorm | nn.RMSNorm], shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Against autograd, one sample at a time in float64; inputs whose mean is far from 0."""
    torch.manual_seed(0)
    x, g = (5 + torch.randn(shape)).to(dtype), torch.randn(shape).to(dtype)
    layer = norm(shape[-1], eps=1e-3).double()
    weight, bias = token_norm_gradients_cuda(x, g, 1e-3, has_mean=norm is nn.LayerNorm)
    for n in range(len(x)):
        layer.zero_grad()
        layer(x[n : n + 1].double()).backward(g[n : n + 1].double())
        for found, parameter in zip((weight, bias), layer.parameters(), strict=False):
            assert found is not None
            assert parameter.grad is not None
            torch.testing.assert_close(found[n].double(), parameter.grad, rtol=1e-5, atol=2e-4)


@pytest.mark.parametrize("has_mean", [True, False])
def test_token_norm_kernel_without_eps(has_mean: bool) -> None:
    """What a program reads past the last token adds nothing."""
    torch.manual_seed(0)
    x, g = torch.randn(2, 2, 5, 6)
    weight, _ = token_norm_gradients_cuda(x, g, 0.0, has_mean=has_mean)
    own = x.double() - x.double().mean(2, keepdim=True) * has_mean
    expected = (g * own / own.square().mean(2, keepdim=True).sqrt()).sum(1)
    torch.testing.assert_close(weight.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("divisor", "rounds"), [(3.0, True), (4.0, False), _nightly(3.0, False), _nightly(4.0, True)])
def test_noise_kernel(divisor: float, rounds: bool) -> None:
    """The noise is that of curand's formulas, written down in float64.

    Covers sizes below and above torch's threads, a counter above 32 bits, and a launch whose programs share no row.
    """
    seed, std, block, most = 0x1234567890ABCDEF, 1.5, 32, 256
    sums = [torch.randn(size) for size in (1, 300, 2500, 256 * 4, 256 * 4 + 1)]
    sums[1] = sums[1].to(torch.float16)  # in a table of its own, since its dtype differs
    for dtype in (torch.float32, torch.float16):
        own = [total for total in sums if total.dtype == dtype]
        before, table, programs, counter = [total.clone() for total in own], [], 0, (1 << 32) - 1
        counters = []
        for total in own:
            threads = min(-(-total.numel() // 256) * 256, most)
            table.append([total.data_ptr(), total.numel(), threads, counter, programs, seed])
            counters.append((counter, threads))
            turns = -(-total.numel() // (4 * threads))
            counter, programs = counter + turns, programs + turns * -(-threads // block)
        targets = [torch.empty_like(total, dtype=torch.float16) if rounds else total for total in own]
        addresses = torch.tensor([target.data_ptr() for target in targets])
        squares = torch.zeros(len(own), dtype=torch.float64)
        constants = {"BLOCK": block, "TYPE": TYPES[dtype], "TARGET": TYPES[targets[0].dtype]}
        constants |= {"STEP": 1, "BY_POWER_OF_2": divisor == 4, "ADDS_SQUARES": rounds}
        add_normals[(programs,)](torch.tensor(table), addresses, squares, len(table), std, divisor, **constants)
        norms = [old.double().square().sum() if rounds else squares.new_zeros(()) for old in before]
        torch.testing.assert_close(squares, torch.stack(norms), rtol=1e-6, atol=0)
        for target, old, (first, threads) in zip(targets, before, counters, strict=True):
            noise = torch.from_numpy(curand_normals(seed, first, threads, target.numel())) * std
            expected = (old.double() + noise.to(dtype).double()).to(dtype) / divisor
            tolerance = (1e-5 if target.dtype == torch.float32 else 4e-3) / divisor
            torch.testing.assert_close(target.to(dtype), expected, rtol=0, atol=tolerance)


def test_the_oracle_of_the_noise_kernel() -> None:
    """Known answers of Philox4x32-10, of the authors' library Random123."""
    words = philox4x32(np.zeros((4, 1), dtype=np.uint64), (0, 0))
    assert [int(word[0]) for word in words] == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    words = philox4x32(np.full((4, 1), 0xFFFFFFFF, dtype=np.uint64), (0xFFFFFFFF, 0xFFFFFFFF))
    assert [int(word[0]) for word in words] == [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]


def philox4x32(counter: Any, key: tuple[int, int]) -> Any:
    """Ten rounds of Philox4x32, of counters [4, n]: four words of 32 bits for each."""
    mask = np.uint64(0xFFFFFFFF)
    a, b, c, d = counter
    first, second = key
    for _ in range(10):
        one, other = a * np.uint64(0xD2511F53), c * np.uint64(0xCD9E8D57)
        a, b, c, d = (
            (other >> np.uint64(32)) ^ b ^ np.uint64(first),
            other & mask,
            (one >> np.uint64(32)) ^ d ^ np.uint64(second),
            one & mask,
        )
        first, second = (first + 0x9E3779B9) & 0xFFFFFFFF, (second + 0xBB67AE85) & 0xFFFFFFFF
    return a, b, c, d


def curand_normals(seed: int, counter: int, threads: int, size: int) -> Any:
    """The first ``size`` numbers of N(0, 1) that torch's threads draw with curand_normal4 from this counter on."""
    parts = []
    for turn in range(-(-size // (4 * threads))):
        low, high = (counter + turn) & 0xFFFFFFFF, (counter + turn) >> 32
        thread = np.arange(threads, dtype=np.uint64)
        own = [np.full_like(thread, low), np.full_like(thread, high), thread, np.zeros_like(thread)]
        words = [word.astype(np.float64) for word in philox4x32(own, (seed & 0xFFFFFFFF, seed >> 32))]
        for x, y in (words[:2], words[2:]):
            length = np.sqrt(-2 * np.log((x + 0.5) / 2**32))
            angle = (y + 0.5) / 2**32 * 2 * np.pi
            parts += [np.sin(angle) * length, np.cos(angle) * length]
    return np.concatenate(parts)[:size]
