# SPDX-License-Identifier: Apache-2.0
"""On CUDA clipped sums of low precision are formed in float32: products of bfloat16 are split into two."""

import contextlib
import copy
import math

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from benchmarks.virtual_gpu import models
from opacus_memprof.clipping.kernels import native
from opacus_memprof.clipping.kernels.sums import sum_products
from opacus_memprof.clipping.workspace import Workspace
from opacus_memprof.errors import MemprofError
from tests.exactness.program import changed_in_backward
from tests.integration.flash_clip_models import make_private, vector_data

pytestmark = pytest.mark.cuda
LOW = [torch.bfloat16, torch.float16]


def operands(dtype: torch.dtype, groups: int = 1) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """g [N groups, rows, T], a [N groups, T, columns], factors [N], and their sum in float64 by hand.

    Constant numbers, whose products with a factor would all be rounded alike.
    """
    g = torch.full((4 * groups, 24, 64), 1.4, device="cuda").to(dtype)
    a = torch.full((4 * groups, 64, 40), 1.1, device="cuda").to(dtype)
    factors = torch.tensor([1 / 3, 0.1, 0.7, 0.01], device="cuda")
    parts = torch.bmm(g.double(), a.double()).view(4, groups, 24, 40)
    return g, a, factors, torch.einsum("n,ngij->gij", factors.double(), parts)


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize(
    "is_true", [False, pytest.param(True, marks=pytest.mark.true_numbers)], ids=["dtype", "numbers"]
)
def test_sums_of_products(dtype: torch.dtype, is_true: bool) -> None:
    for groups in (1, 2):
        for ceiling in (1 << 24, 1 << 14):
            g, a, factors, exact = operands(dtype, groups)
            total = sum_products(g, a, factors, groups, Workspace(ceiling))
            assert total.dtype == torch.float32
            if is_true:
                torch.testing.assert_close(total.double(), exact, rtol=1e-4, atol=0)
    g, a, factors, exact = operands(dtype)
    for left, right, expected in ((g.mT.contiguous(), a, exact[0]), (a, g.mT, exact[0].T), (g.mT, a, exact[0])):
        (total,) = native.sum_outer_products([(left, right)], factors, 1 << 24)
        assert total.dtype == torch.float32
        if is_true:
            torch.testing.assert_close(total.double(), expected, rtol=1e-4, atol=0)


@pytest.mark.true_numbers
@pytest.mark.parametrize("number", [16, 29, 34])
def test_convolutions_in_tf32_are_exact_and_not_refused(number: int) -> None:
    """Sums cancel to less than the rounding errors of TF32, in which torch lets convolutions compute."""
    assert torch.backends.cudnn.conv.fp32_precision == "tf32"
    drawn = models.named(f"drawn 1 {number}")
    torch.manual_seed(0)
    model = drawn.build().cuda()
    by_hand = copy.deepcopy(model).double()
    x, y = (tensor.cuda() for tensor in drawn.data(12))
    options = {"noise_multiplier": 0.0, "max_grad_norm": 1.0, "loss_reduction": "sum"}
    data = TensorDataset(x.cpu(), y.cpu())
    module, optimizer, _ = make_private(model, data, "flash_clip", 12, **options)
    functional.cross_entropy(module(x), y, reduction="sum").backward()
    optimizer.step()
    total = [torch.zeros_like(p) for p in by_hand.parameters()]
    for n in range(12):
        loss = functional.cross_entropy(by_hand(x[n : n + 1].double()), y[n : n + 1])
        gradients = torch.autograd.grad(loss, list(by_hand.parameters()))
        norm = math.hypot(*(float(g.norm()) for g in gradients))
        for each, gradient in zip(total, gradients, strict=True):
            each += min(1.0, 1.0 / (norm + 1e-6)) * gradient
    errors = [float((p.grad - each).norm()) for p, each in zip(model.parameters(), total, strict=True)]
    assert math.hypot(*errors) < 0.05  # of bounds of 1 for each of the 12 samples


@changed_in_backward
def limited(g: torch.Tensor) -> torch.Tensor:
    return g * (50 / g.norm().clamp(min=50))


class Convolutions(nn.Module):
    """Convolutions for which cuDNN takes kernels with TF32 in some sizes of a batch only, with a limit on gradients."""

    def __init__(self) -> None:
        super().__init__()
        strided = nn.Conv2d(1, 32, 7, 2, 3), nn.GroupNorm(4, 32), nn.Tanh(), nn.Conv2d(32, 64, 3, padding=1), nn.Tanh()
        deep = nn.MaxPool2d(2), nn.Conv2d(64, 128, 3, padding=1), nn.Tanh(), nn.Conv2d(128, 128, 3, 2, 1), nn.Tanh()
        self.body = nn.Sequential(*strided, *deep, nn.Flatten(), nn.Linear(128 * 36, 64), nn.Tanh())
        self.head = nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(limited(self.body(x)))


@pytest.mark.true_numbers
@pytest.mark.parametrize("batch", [100, 33])
@pytest.mark.parametrize("scale", [1.0, 1e4], ids=["below", "above"])
def test_other_kernels_for_half_batches_neither_mix_nor_hide_mixing(batch: int, scale: float) -> None:
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(batch, 1, 46, 46), torch.randint(0, 10, (batch,)))
    module, optimizer, _ = make_private(Convolutions().cuda(), data, "flash_clip", batch, noise_generator=None)
    loss = functional.cross_entropy(module(data.tensors[0].cuda()), data.tensors[1].cuda())
    (scale * loss).backward()
    with contextlib.nullcontext() if scale == 1 else pytest.raises(MemprofError, match="outputs of the model explain"):
        optimizer.step()


@pytest.mark.true_numbers
@pytest.mark.parametrize("dtype", LOW)
def test_one_of_a_thousand_samples_changes_the_sum_within_bounds(dtype: torch.dtype) -> None:
    totals = []
    for samples in (1027, 1028):
        module, optimizer, _ = make_private(
            nn.Linear(1, 1, bias=False).to("cuda", dtype),
            vector_data(8),
            "flash_clip",
            noise_multiplier=0.0,
            noise_generator=None,
            max_grad_norm=1.0,
            loss_reduction="sum",
        )
        module(torch.ones(samples, 1, device="cuda", dtype=dtype)).float().sum().backward()
        optimizer.clip_and_accumulate()
        totals.append(float(optimizer.params[0].summed_grad))
    assert totals[1] - totals[0] == pytest.approx(1.0, abs=1e-3)


@pytest.mark.true_numbers
@pytest.mark.parametrize("dtype", LOW)
def test_a_refused_step_leaves_the_generator(dtype: torch.dtype) -> None:
    model = nn.Linear(9, 4).to("cuda", dtype)
    module, optimizer, _ = make_private(model, vector_data(8), "flash_clip", noise_generator=None)
    x = torch.randn(4, 9, device="cuda", dtype=dtype)
    x[1] = float("nan")
    module(x).float().sum().backward()
    before = torch.cuda.get_rng_state()
    with pytest.raises(MemprofError, match=r"samples \[1\]"):
        optimizer.step()
    assert torch.equal(torch.cuda.get_rng_state(), before)
