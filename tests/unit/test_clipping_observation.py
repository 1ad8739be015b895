# SPDX-License-Identifier: Apache-2.0
"""Summaries of tensors show every row that differs, and none that does not."""

import pytest
import torch

from opacus_memprof.clipping.forwards.repetition import close
from opacus_memprof.clipping.proof.sample_forwards import TensorSummary

SHAPES = [(3,), (3, 3), (3, 5), (3, 100), (12, 70), (5, 3, 40), (3, 7, 100), (3, 2, 9, 11), (3, 1, 64, 64)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_changed_element_is_seen_only_in_its_row(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = torch.randn(shape) if dtype.is_floating_point else torch.randint(0, 2, shape)
    x = x.to(dtype)
    summary = TensorSummary.from_tensor(x)
    assert summary.meta.shape == x.shape
    assert summary.sums.shape[: min(2, x.dim() - 1) or 1] == x.shape[: min(2, x.dim() - 1) or 1]
    for place in {0, x.numel() // 2, x.numel() - 1}:
        y = x.clone().flatten()
        y[place] = ~y[place] if dtype == torch.bool else y[place] + 40
        changed = TensorSummary.from_tensor(y.view(shape))
        row = place // (x.numel() // shape[0])
        same = [close(a, b) for a, b in zip(changed.sums, summary.sums, strict=True)]
        assert same == [n != row for n in range(shape[0])]


def test_rounding_is_no_change() -> None:
    torch.manual_seed(0)
    x = torch.randn(3, 50, 1000)
    assert close(TensorSummary.from_tensor(x * (1 + 1e-6)).sums, TensorSummary.from_tensor(x).sums)


@pytest.mark.parametrize("lowest", [float("-inf"), torch.finfo(torch.float32).min])
def test_masks_with_infinities(lowest: float) -> None:
    """Sums of infinities say nothing."""
    x = torch.zeros(3, 1, 64, 64).masked_fill(torch.ones(64, 64).triu(1).bool(), lowest)
    y, z = x.clone(), x.clone()
    y[1, 0, 0, 63] = 0
    z[1, 0, 63, 0] = 5
    own = TensorSummary.from_tensor(x)
    for other in map(TensorSummary.from_tensor, (y, z)):
        a, b = own.beside(other)
        assert [close(b[n], a[n]) for n in range(3)] == [True, False, True]


def test_a_summary_is_small() -> None:
    x = torch.randn(3, 512, 4096)
    assert TensorSummary.from_tensor(x).sums.nbytes * 30 < x.nbytes
    assert TensorSummary.from_tensor(x, shape_only=True).sums.numel() == 0
