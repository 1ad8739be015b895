# SPDX-License-Identifier: Apache-2.0
"""The noise of flash_clip: the numbers that Opacus draws, and nothing beside them."""

import pytest
import torch
from opacus.optimizers.optimizer import _generate_noise

from opacus_memprof.clipping.kernels.sums import _sum_products, add_noise, draw_noise
from opacus_memprof.clipping.optimizers.fsdp import _own_generator
from opacus_memprof.clipping.workspace import Workspace
from tests.unit.test_clipping_layers import peak_bytes

SHAPES = [(), (3,), (3,), (16,), (17, 5), (0, 4), (64, 128)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize(("std", "secure"), [(1.7, False), (0.0, False), (1.7, True)])
def test_the_numbers_are_those_of_opacus(dtype: torch.dtype, std: float, secure: bool) -> None:
    mine, theirs = torch.Generator().manual_seed(3), torch.Generator().manual_seed(3)
    references = [torch.zeros(shape, dtype=dtype) for shape in SHAPES]
    for drawn, reference in zip(draw_noise(references, std, mine, secure), references, strict=True):
        expected = _generate_noise(std, reference, theirs, secure)
        assert drawn.dtype == expected.dtype
        assert torch.equal(drawn, expected)
    assert torch.equal(mine.get_state(), theirs.get_state())


@pytest.mark.parametrize("std", [0.0, 1.7])
def test_sums_with_noise_are_divided(std: float) -> None:
    mine, theirs = torch.Generator().manual_seed(3), torch.Generator().manual_seed(3)
    sums = [torch.rand(shape) for shape in SHAPES]
    expected = [(total + _generate_noise(std, total, theirs)) / 12 for total in sums]
    add_noise(sums, std=std, generator=mine, secure_mode=False, divisor=12)
    for total, divided in zip(sums, expected, strict=True):
        assert torch.equal(total, divided)


def test_shards_have_generators_of_their_own() -> None:
    seeds = {_own_generator(torch.Generator(), rank, torch.device("cpu")).initial_seed() for rank in range(1000)}
    assert len(seeds) == 1000


def test_noise_takes_no_more_memory_than_itself() -> None:
    reference = torch.zeros(1000)
    assert peak_bytes(lambda: draw_noise([reference], 1.0, None, False)) == (4000, 4000)
    assert peak_bytes(lambda: _generate_noise(1.0, reference))[0] == 8000


@pytest.mark.parametrize(("samples", "tokens"), [(0, 5), (3, 0)])
def test_the_sum_of_nothing_is_where_its_gradients_are(samples: int, tokens: int) -> None:
    g, a = torch.empty(samples, 4, tokens, device="meta"), torch.empty(samples, tokens, 6, device="meta")
    total = _sum_products(g, a, torch.empty(samples, device="meta"), 1, Workspace(2**20))
    assert (total.shape, total.device.type) == ((1, 4, 6), "meta")
