# SPDX-License-Identifier: Apache-2.0
"""The choice per layer: numbers worked out by hand, and its one rule."""

import subprocess
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.profiler import record_function

from opacus_memprof.clipping.cost import Cost, choose, ghost_norm_cost, gram_norm_cost, kept_norm_cost
from opacus_memprof.clipping.kernels.sums import sum_products
from opacus_memprof.clipping.workspace import Workspace
from tests.oracle.meter import WINDOW, window_peaks

SIZES = st.integers(1, 5000)


def test_long_sequences_keep_gradients() -> None:
    choice = choose(1, 16384, 2048, 2048, 4)
    assert (choice.norm, choice.keep) == ("gradient", "gradient")
    assert choice.kept_bytes == 2048 * 2048 * 4
    assert choice.norm_cost.bytes == 2048 * 2048 * 4  # one read of what is kept anyway


def test_short_sequences_keep_the_pair() -> None:
    choice = choose(16, 512, 8192, 2048, 2)
    assert (choice.norm, choice.keep) == ("gram", "pair")
    assert choice.kept_bytes == 16 * 512 * (8192 + 2048) * 2
    assert choice.norm_cost.flops == 16 * 512 * (512 + 128) * (8192 + 2048)
    assert choice.norm_cost.bytes == 16 * 10 * 2 * 128 * (8192 + 2048) * 2  # ten tiles of two strips


def test_adapters_of_low_rank_keep_gradients() -> None:
    assert choose(16, 1024, 16, 768, 4).keep == "gradient"
    assert choose(16, 1024, 2304, 16, 4).keep == "gradient"


def test_one_token_needs_no_product() -> None:
    choice = choose(64, 1, 1000, 512, 4)
    assert (choice.norm, choice.keep) == ("gram", "pair")
    assert choice.norm_cost.bytes == 64 * 1512 * 4


def test_convolutions_hold_their_input_not_the_unfolded_one() -> None:
    unfolded = choose(32, 196, 256, 2304, 4)
    folded = choose(32, 196, 256, 2304, 4, pair_elements=32 * 196 * (256 + 256))
    assert folded.kept_bytes == 32 * 196 * 512 * 4 < unfolded.kept_bytes


def test_bytes_of_the_norm_step_at_sequence_16384() -> None:
    """Twenty blocks of width 2048 with biases, one sample: at most a ninth of ghost clipping's traffic."""
    layers = [(3 * 2048, 2048), (2048, 2048), (4 * 2048, 2048), (2048, 4 * 2048)] * 20 + [(32000, 2048)]
    ours = sum(choose(1, 16384, r, c, 4).norm_cost.bytes for r, c in layers)
    ghost = sum(ghost_norm_cost(1, 16384, r, c, 4, bias=True).bytes for r, c in layers)
    assert ours == 4 * sum(r * c for r, c in layers)
    assert ghost == 4 * sum(8 * 16384**2 + 16384 * (2 * r + c) for r, c in layers)
    assert ours * 9 <= ghost


def test_ghost_clipping_forms_two_products_and_with_a_bias_three() -> None:
    assert ghost_norm_cost(2, 3, 5, 7, 4, bias=False) == Cost(2 * 2 * 9 * 12, 4 * (2 * 3 * 12 + 6 * 2 * 9))
    assert ghost_norm_cost(2, 3, 5, 7, 4, bias=True) == Cost(2 * 2 * 9 * 17, 4 * (2 * 3 * 17 + 8 * 2 * 9))
    assert ghost_norm_cost(64, 1, 1000, 512, 4, bias=True) == Cost(2 * 64 * 1512, 4 * 64 * 1512)


@given(batch=st.integers(1, 64), tokens=SIZES, rows=SIZES, columns=SIZES, itemsize=st.sampled_from([2, 4, 8]))
def test_the_smaller_is_kept(batch: int, tokens: int, rows: int, columns: int, itemsize: int) -> None:
    choice = choose(batch, tokens, rows, columns, itemsize)
    pair, gradient = batch * tokens * (rows + columns), batch * rows * columns
    assert choice.kept_bytes == min(pair, gradient) * itemsize
    assert choice.keep == ("gradient" if gradient <= pair else "pair")
    if choice.keep == "gradient":
        assert choice.norm_cost == kept_norm_cost(batch, rows, columns, itemsize)


@given(batch=st.integers(1, 64), tokens=SIZES, rows=SIZES, columns=SIZES)
def test_without_keeping_the_cheaper_norm_is_chosen(batch: int, tokens: int, rows: int, columns: int) -> None:
    choice = choose(batch, tokens, rows, columns, 4, keep=False)
    assert choice.kept_bytes == 0
    assert choice.norm_cost.in_bytes <= gram_norm_cost(batch, tokens, rows, columns, 4).in_bytes


@pytest.mark.parametrize("module", ["torch", "opacus"])
def test_costs_need_no_torch(module: str) -> None:
    code = f"import sys; import opacus_memprof.clipping.cost; print({module!r} in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "False"


@pytest.mark.parametrize("layout", ["tokens", "columns"])
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_sum_uses_the_workspace_and_no_more(dtype: torch.dtype, groups: int, layout: str) -> None:
    samples, tokens, rows, columns, workspace = 64, 16, 24, 40, 1 << 15
    g = torch.randn(samples * groups, tokens, rows, dtype=dtype).mT
    a = torch.randn(samples * groups, tokens, columns, dtype=dtype)
    if layout == "columns":  # as of an unfolded input
        a = a.mT.contiguous().mT
    kind = torch.float64 if dtype == torch.float64 else torch.float32

    def run() -> None:
        with record_function(WINDOW + "sum"):
            sum_products(g, a, torch.rand(samples, dtype=kind), groups, Workspace(workspace))

    peak = window_peaks(run)["sum"]
    total = groups * rows * columns * kind.itemsize
    held = 2 * total + samples * kind.itemsize  # the sum so far, what is added to it, and the factors
    assert total + 0.45 * workspace <= peak <= held + workspace
