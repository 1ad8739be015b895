# SPDX-License-Identifier: Apache-2.0
"""Norms and clipped sums of every layer, against one sample at a time through plain autograd, in float64."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from opacus_memprof.clipping.layers import LAYERS, Layer
from opacus_memprof.clipping.workspace import Workspace
from opacus_memprof.errors import MemprofError
from tests.unit.clipping_cases import (
    CASES,
    Case,
    keep_with_norms,
    per_sample_gradients,
    randomized,
    relative_error,
)

TOLERANCE = 1e-10
HUGE = Workspace(1 << 40)


def ids(case: Case) -> str:
    return case.name


class Backward:
    """One layer's input and output gradient, and its per-sample gradients from the oracle."""

    def __init__(self, case: Case, batch: int, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.module = randomized(case)
        self.layer: Layer = LAYERS[type(self.module)]("layer", self.module)
        self.x = case.inputs(batch)
        output = self.module(self.x)
        self.g = torch.randn_like(output)
        self.gradients = per_sample_gradients(self.module, self.x, lambda i: self.g[i : i + 1])
        self.squared_norms = sum(g.flatten(1).square().sum(1) for g in self.gradients.values())
        self.factors = torch.rand(batch, dtype=torch.float64)

    def expected_sum(self, name: str, factors: torch.Tensor) -> torch.Tensor:
        return torch.einsum("n,n...->...", factors, self.gradients[name])

    def check_kept(self, workspace: Workspace) -> None:
        kept = keep_with_norms(self.layer, self.x, self.g, workspace)
        assert relative_error(kept.squared_norms, self.squared_norms) < TOLERANCE
        names = {parameter: name for name, parameter in self.module.named_parameters()}
        seen = set()
        for parameter, total in self.layer.clipped_sums(kept, self.factors, workspace):
            seen.add(names[parameter])
            assert total.shape == parameter.shape
            assert relative_error(total, self.expected_sum(names[parameter], self.factors)) < TOLERANCE
        assert seen == set(self.gradients)
        assert not kept.stacks
        assert kept.pair is None

    def check_norms(self, workspace: Workspace) -> None:
        norms = self.layer.keep_norms(self.x, self.g, workspace).norms
        for name, parameter in self.module.named_parameters():
            expected = self.gradients[name].flatten(1).square().sum(1)
            assert relative_error(norms[parameter], expected) < TOLERANCE

    def check_sums(self, workspace: Workspace) -> None:
        some = torch.arange(1, len(self.factors))
        of_some = self.factors.clone().index_fill_(0, torch.tensor([0]), 0)
        for samples, factors in ((None, self.factors), (some, of_some)):
            sums = self.layer.sums_of_backward(self.x, self.g, self.factors, samples, workspace)
            for name, parameter in self.module.named_parameters():
                assert relative_error(sums[parameter], self.expected_sum(name, factors)) < TOLERANCE


@pytest.mark.parametrize("case", CASES, ids=ids)
@pytest.mark.parametrize("batch", [1, 2, 5])
def test_layer_equals_plain_autograd(case: Case, batch: int) -> None:
    run = Backward(case, batch)
    x, g = run.x.clone(), run.g.clone()
    run.check_kept(HUGE)
    run.check_norms(HUGE)
    run.check_sums(HUGE)
    assert torch.equal(run.x, x)  # others hold these tensors too
    assert torch.equal(run.g, g)


@pytest.mark.parametrize("case", CASES, ids=ids)
@pytest.mark.parametrize("size", [2_000, 20_000])
def test_any_ceiling_gives_the_same_result(case: Case, size: int) -> None:
    """The small one cuts everything several times over, into pieces that do not divide evenly."""
    if size == 2_000 and case.name.startswith("conv2d") and "pointwise" not in case.name:
        size = 12_000  # one unfolded channel
    run = Backward(case, 5)
    run.check_kept(Workspace(size))
    run.check_norms(Workspace(size))
    run.check_sums(Workspace(size))


@pytest.mark.parametrize("name", ["linear_3d_short", "embedding", "rms_norm", "conv1d", "conv2d", "group_norm"])
def test_a_ceiling_below_one_unit_of_work_is_refused(name: str) -> None:
    run = Backward(next(c for c in CASES if c.name == name), 5)
    with pytest.raises(MemprofError, match=r"needs .* MiB; raise flash_clip_workspace_mb"):
        run.layer.keep_norms(run.x, run.g, Workspace(8))


@pytest.mark.parametrize("case", CASES, ids=ids)
def test_an_empty_batch_has_zero_sums(case: Case) -> None:
    torch.manual_seed(0)
    module = randomized(case)
    layer = LAYERS[type(module)]("layer", module)
    with torch.no_grad():
        shape = module(case.inputs(1)).shape[1:]
    x, g = case.inputs(0), torch.zeros(0, *shape, dtype=torch.float64)
    kept = keep_with_norms(layer, x, g, HUGE)
    assert kept.squared_norms.shape == (0,)
    sums = dict(layer.clipped_sums(kept, torch.zeros(0, dtype=torch.float64), HUGE))
    assert set(sums) == set(module.parameters())
    assert all(torch.equal(total, torch.zeros_like(parameter)) for parameter, total in sums.items())
    assert all(n.shape == (0,) for n in layer.keep_norms(x, g, HUGE).norms.values())


@pytest.mark.parametrize("frozen", ["weight", "bias"])
@pytest.mark.parametrize(
    "case", [c for c in CASES if c.name in ("linear_3d_short", "conv2d", "layer_norm", "group_norm")], ids=ids
)
def test_frozen_parameters_are_left_out(case: Case, frozen: str) -> None:
    run = Backward(case, 3)
    getattr(run.module, frozen).requires_grad_(False)
    other = {"weight": "bias", "bias": "weight"}[frozen]
    x = None if frozen == "weight" else run.x
    kept = keep_with_norms(run.layer, x, run.g, HUGE)
    assert relative_error(kept.squared_norms, run.gradients[other].flatten(1).square().sum(1)) < TOLERANCE
    assert [p for p, _ in run.layer.clipped_sums(kept, run.factors, HUGE)] == [getattr(run.module, other)]


def test_shared_output_gradients_are_not_scaled_in_place() -> None:
    """A bias' per-sample gradients may be the very tensor that autograd handed on."""
    run = Backward(next(c for c in CASES if c.name == "linear_2d"), 1)
    g = run.g.clone()
    kept = run.layer.keep(run.x, run.g, HUGE)
    list(run.layer.clipped_sums(kept, torch.tensor([0.25], dtype=torch.float64), HUGE))
    assert torch.equal(run.g, g)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("case", CASES, ids=ids)
def test_low_precision_accumulates_in_float32(case: Case, dtype: torch.dtype, tolerance: float) -> None:
    torch.manual_seed(0)
    module = randomized(case)
    layer = LAYERS[type(module)]("layer", module)
    x = case.inputs(4)
    g = torch.randn_like(module(x)).to(dtype)
    x = x if case.indices else x.to(dtype)
    exact = per_sample_gradients(module, x if case.indices else x.double(), lambda i: g[i : i + 1].double())
    expected = sum(e.flatten(1).square().sum(1) for e in exact.values())
    module.to(dtype)
    norms = keep_with_norms(layer, x, g, HUGE).squared_norms
    assert norms.dtype == torch.float32
    assert relative_error(norms.double(), expected) < tolerance


def peak_bytes(function: Any) -> tuple[int, int]:
    """Highest and final bytes allocated by ``function`` on the CPU, by the profiler's memory events."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        result = function()
    current = peak = 0
    for event in recorded.profiler.kineto_results.events():
        if event.name() == "[memory]":
            current += event.nbytes()
            peak = max(peak, current)
    del result
    return peak, current


def nbytes(tensors: Any) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


LARGE = [
    Case("linear_gram", lambda: nn.Linear(256, 256), (48, 256)),
    Case("linear_gradient", lambda: nn.Linear(48, 64), (512, 48)),
    Case("linear_4d", lambda: nn.Linear(96, 64), (16, 24, 96)),
    Case("embedding", lambda: nn.Embedding(500, 64), (300,), 500),
    Case("layer_norm", lambda: nn.LayerNorm(64), (700, 64)),
    Case("rms_norm", lambda: nn.RMSNorm(64), (700, 64)),
    Case("conv1d", lambda: nn.Conv1d(32, 48, 5, padding=2), (32, 200)),
    Case("conv2d_gradient", lambda: nn.Conv2d(16, 24, 3, padding=1), (16, 24, 24)),
    Case("conv2d_gram", lambda: nn.Conv2d(96, 96, 3, padding=1), (96, 6, 6)),
    Case("conv2d_groups", lambda: nn.Conv2d(32, 64, 3, padding="same", groups=4), (32, 12, 12)),
    Case("group_norm", lambda: nn.GroupNorm(4, 16), (16, 40, 40)),
]


@pytest.mark.parametrize("case", LARGE, ids=ids)
@pytest.mark.parametrize("size", [200_000, 1_000_000, 8_000_000])
def test_temporaries_stay_under_the_ceiling(case: Case, size: int) -> None:
    run = Backward(case, 6)
    ceiling, slack = Workspace(size), 4096  # norms, factors and the like: [B]
    run.check_kept(ceiling)
    run.check_norms(ceiling)

    peak, _ = peak_bytes(lambda: run.layer.keep_norms(run.x, run.g, ceiling).norms)
    small = nbytes(s for s in run.layer.small_gradients(run.x, run.g, ceiling).values())
    assert peak <= size + small + slack

    kept = run.layer.keep(run.x, run.g, ceiling)
    outputs = nbytes(kept.stacks.values())
    peak, _ = peak_bytes(lambda: run.layer.keep(run.x, run.g, ceiling))
    assert peak <= size + outputs + slack

    sums = nbytes(run.module.parameters())
    peak, _ = peak_bytes(lambda: list(run.layer.clipped_sums(kept, run.factors, ceiling)))
    # Where a sum is formed in pieces, one piece lives beside it.
    assert peak <= size + 2 * sums + slack


@pytest.mark.parametrize("tokens", [64, 257])
def test_no_tokens_by_tokens_matrix(tokens: int) -> None:
    """With room for a hundred rows of it, the T x T matrix is never formed."""
    case = Case("wide", lambda: nn.Linear(700, 700, bias=False), (tokens, 700))
    run = Backward(case, 2)
    size = 100 * tokens * 8
    run.check_kept(Workspace(size))
    peak, _ = peak_bytes(lambda: run.layer.keep(run.x, run.g, Workspace(size)))
    assert peak < size + 4096


@pytest.mark.parametrize(("rows", "columns"), [(0, 3), (3, 0), (1, 1), (5, 7), (7, 5)])
@pytest.mark.parametrize("fits", [1, 4, 7, 20, 1000])
def test_tiles_cover_a_grid_once_and_fit(rows: int, columns: int, fits: int) -> None:
    covered = torch.zeros(rows, columns)
    for tile in Workspace(10 * fits + 9).tiles(rows, columns, 10, "a unit"):
        covered[tile] += 1
        assert covered[tile].numel() <= fits
    assert torch.equal(covered, torch.ones(rows, columns))
    with pytest.raises(MemprofError, match="but a unit needs"):
        list(Workspace(9).tiles(5, 7, 10, "a unit"))
