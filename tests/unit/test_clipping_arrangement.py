# SPDX-License-Identifier: Apache-2.0
"""Where the samples are in a tensor, with tensors whose numbers are the samples' indices."""

import pytest
import torch

from opacus_memprof.clipping.forwards.state import Arrangement


@pytest.mark.parametrize(
    ("where", "indices"),
    [
        (Arrangement(), [0, 1, 2]),
        (Arrangement(), [0, 0, 1, 1, 2, 2]),
        (Arrangement(sample_major=False), [0, 1, 2, 0, 1, 2]),
        (Arrangement(dim=1), [[0, 1, 2]] * 4),
    ],
)
def test_rows_belong_to_their_samples(where: Arrangement, indices: list[int]) -> None:
    x = torch.tensor(indices).unsqueeze(-1).expand(*torch.tensor(indices).shape, 5)
    rows = where.by_sample(x, 3)
    assert len(rows) == 3
    assert all(bool((row == n).all()) for n, row in enumerate(rows))
    assert rows.numel() == x.numel()
