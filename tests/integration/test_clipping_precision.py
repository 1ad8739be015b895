# SPDX-License-Identifier: Apache-2.0
"""Sums of bfloat16 and float16 parameters are formed and noised in float32, and rounded once."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from opacus_memprof.clipping.kernels.sums import sum_products
from opacus_memprof.clipping.workspace import Workspace
from tests.integration.flash_clip_models import MODELS, make_private, token_data, vector_data

LOW = [torch.bfloat16, torch.float16]


class Unit(nn.Module):
    """The gradient of each sample is 1."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layer(x)
        return out


class Tied(nn.Module):
    """Parameters that are used more than once."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.middle, self.head = nn.Embedding(17, 12), nn.Linear(12, 12), nn.Linear(12, 17, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.middle(torch.tanh(self.middle(self.tokens(ids)))))
        return logits.transpose(1, 2)


class Transposed(nn.Module):
    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight


def autoencoder() -> nn.Module:
    """The decoder has the encoder's weight."""
    encoder = nn.Linear(9, 40, bias=False)
    return nn.Sequential(encoder, nn.Tanh(), Transposed(encoder.weight))


class Own(nn.Module):
    """A parameter that no layer has."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix, self.head = nn.Parameter(torch.randn(9, 20)), nn.Linear(20, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(torch.tanh(x @ self.matrix))
        return out


ALL: dict[str, Any] = {**MODELS, "tied": (Tied, lambda n: token_data(n, 40)), "own": (Own, vector_data)}
ALL["autoencoder"] = autoencoder, vector_data


def private(model: nn.Module, bound: float, **options: Any) -> tuple[Any, Any]:
    options = {"loss_reduction": "sum", "noise_multiplier": 0.0, "max_grad_norm": bound, **options}
    module, optimizer, _ = make_private(model, vector_data(8), "flash_clip", **options)
    return module, optimizer


def total_of(optimizer: Any) -> torch.Tensor:
    return torch.cat([parameter.summed_grad.double().flatten() for parameter in optimizer.params])


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize(("passes", "parts"), [(1, 1), (2, 1), (1, 4), (2, 4)])
def test_one_of_a_thousand_samples_changes_the_sum_within_bounds(dtype: torch.dtype, passes: int, parts: int) -> None:
    """1027 and 1028 have the same bfloat16 as neighbours 8 apart."""

    def total(samples: int) -> float:
        module, optimizer = private(Unit().to(dtype), 1.0, flash_clip_passes=passes)
        for part in torch.ones(samples, 1, dtype=dtype).chunk(parts):
            module(part).float().sum().backward()
        optimizer.clip_and_accumulate()
        return float(total_of(optimizer))

    assert total(1028) - total(1027) == pytest.approx(1.0, abs=1e-3)


@pytest.mark.parametrize("dtype", LOW)
def test_sums_of_skipped_steps_stay_in_float32(dtype: torch.dtype) -> None:
    module, optimizer = private(Unit().to(dtype), 1.0)
    for step in range(5):
        optimizer.signal_skip_step(step < 4)
        module(torch.ones(201, 1, dtype=dtype)).float().sum().backward()
        optimizer.pre_step()
        if step < 4:
            assert float(total_of(optimizer)) == pytest.approx(201 * (step + 1), abs=1e-2)
            optimizer.zero_grad()
    (parameter,) = optimizer.params
    assert parameter.grad.dtype == dtype
    assert parameter.grad.item() == torch.tensor(1005.0).to(dtype).item()


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("name", ALL)
def test_no_sample_adds_more_than_its_bound(name: str, passes: int, dtype: torch.dtype) -> None:
    """One sample has a gradient, and all others have gradients of zero: the sum is what that sample adds."""
    torch.manual_seed(0)
    build, data = ALL[name]
    model = build().to(dtype)
    x, y = data(6).tensors
    x = x.to(dtype) if x.is_floating_point() else x
    for i in (0, 5):
        module, optimizer = private(copy.deepcopy(model), 0.01, flash_clip_passes=passes)
        each = functional.cross_entropy(module(x).float(), y, reduction="none").unsqueeze(-1).flatten(1).mean(1)
        (64 * each[i]).backward()
        optimizer.clip_and_accumulate()
        assert all(parameter.summed_grad.dtype == torch.float32 for parameter in optimizer.params)
        norm = float(total_of(optimizer).norm())
        assert 0.01 * (1 - 1e-3) < norm <= 0.01 * (1 + 1e-5)


@pytest.mark.parametrize("dtype", LOW)
def test_noise_is_added_before_the_sum_is_rounded(dtype: torch.dtype) -> None:
    """By hand: the float32 sum, torch's float32 numbers, the divisor, and one rounding."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(9, 20), nn.Tanh(), nn.Linear(20, 4)).to(dtype)
    x = torch.randn(6, 9).to(dtype)
    sums: list[torch.Tensor] = []
    for noise in (0.0, 0.7):
        module, optimizer = private(copy.deepcopy(model), 0.3, noise_multiplier=noise, loss_reduction="mean")
        module(x).float().square().mean().backward()
        if noise == 0:
            optimizer.clip_and_accumulate()
            sums = [parameter.summed_grad.clone() for parameter in optimizer.params]
        else:
            optimizer.pre_step()
    generator = torch.Generator().manual_seed(11)  # as that of make_private
    for parameter, total in zip(optimizer.params, sums, strict=True):
        drawn = torch.normal(0, 0.7 * 0.3, total.shape, generator=generator)
        expected = ((total + drawn) / optimizer.expected_batch_size).to(dtype)
        assert parameter.grad.dtype == dtype
        assert torch.equal(parameter.grad, expected)
        assert parameter.summed_grad is parameter.grad  # the sum in float32 is not kept beside it
    with pytest.raises(ValueError, match="zero_grad"):
        optimizer.pre_step()


def test_few_sums_are_in_float32_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a step of a single pass, each sum is rounded before the next is formed.

    Noise is still drawn in the order of the parameters.
    """
    from opacus_memprof.clipping.optimizers import optimizer as flash

    monkeypatch.setattr(flash, "_BYTES_AT_ONCE", 1)
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(300, 300, bias=False) for _ in range(4)), nn.LayerNorm(300)).to(torch.bfloat16)
    x = torch.randn(3, 2, 300).to(torch.bfloat16)
    gradients = []
    for parts in (1, 2):
        module, optimizer = private(copy.deepcopy(model), 0.3, noise_multiplier=0.7)
        in_float32: list[int] = []
        check = optimizer._add_noise_to

        def count(
            params: Any, divisor: float, sum_check: Any = None, check: Any = check, optimizer: Any = optimizer
        ) -> None:
            sums = [p.summed_grad for p in optimizer.params if p.summed_grad is not None]
            in_float32.append(sum(total.dtype == torch.float32 for total in sums))  # noqa: B023
            check(params, divisor, sum_check)

        monkeypatch.setattr(optimizer, "_add_noise_to", count)
        for part in [x] if parts == 1 else [x, x[:0]]:
            module(part).float().sum().backward()
        optimizer.pre_step()
        assert in_float32 == ([1] * 6 if parts == 1 else [6])
        gradients.append([p.grad for p in optimizer.params])
    for one, other in zip(*gradients, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("ceiling", [1 << 20, 600])
@pytest.mark.parametrize("shape", [(3, 5), (5, 3)])
def test_products_are_scaled_and_added_up_in_float32(
    shape: tuple[int, int], ceiling: int, groups: int, dtype: torch.dtype
) -> None:
    """A factor of 1/3 rounds each number of a constant operand by the same 0.1 to 0.2 %."""
    rows, columns = shape
    g = torch.full((4 * groups, rows, 7), 1.4).to(dtype)
    a = torch.full((4 * groups, 7, columns), 1.1).to(dtype)
    factors = torch.tensor([1 / 3, 0.1, 0.7, 0.01])
    total = sum_products(g, a, factors, groups, Workspace(ceiling))
    parts = torch.bmm(g.double(), a.double()).view(4, groups, rows, columns)
    exact = torch.einsum("n,ngij->gij", factors.double(), parts)
    assert total.dtype == torch.float32
    torch.testing.assert_close(total.double(), exact, rtol=1e-6, atol=0)


def test_two_passes_scale_no_gradient_of_the_model() -> None:
    """Samples need not be the first dimension of the output: [T, B, features] with as many tokens as samples."""

    class TimeFirst(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.layer(x)
            return out.transpose(0, 1)

    torch.manual_seed(0)
    model = TimeFirst().double()
    x = torch.randn(4, 4, 3, dtype=torch.float64) * torch.tensor([0.1, 1.0, 10.0, 100.0]).view(-1, 1, 1)
    expected = torch.zeros(6, dtype=torch.float64)
    for sample in x:
        weight = torch.ones(2, 1, dtype=torch.float64) @ sample.sum(0, keepdim=True)
        norm = (weight.square().sum() + 2 * 4.0**2).sqrt()  # of the bias: four tokens
        expected += weight.flatten() * min(1.0, 0.3 / float(norm + 1e-6))
    module, optimizer = private(model, 0.3, flash_clip_passes=2)
    module(x).sum().backward()
    optimizer.clip_and_accumulate()
    torch.testing.assert_close(optimizer.params[0].summed_grad.flatten(), expected, rtol=1e-10, atol=0)


@pytest.mark.parametrize("make", [lambda: nn.Linear(9, 4), lambda: nn.Sequential(nn.Linear(9, 4), nn.LayerNorm(4))])
def test_float32_and_float64_stay_as_they_are(make: Callable[[], nn.Module]) -> None:
    for dtype in (torch.float32, torch.float64):
        module, optimizer = private(make().to(dtype), 0.3)
        module(torch.randn(5, 9, dtype=dtype)).square().sum().backward()
        optimizer.pre_step()
        for parameter in optimizer.params:
            assert parameter.grad.dtype == parameter.summed_grad.dtype == dtype
            assert parameter.grad.data_ptr() == parameter.summed_grad.data_ptr()
