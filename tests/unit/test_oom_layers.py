# SPDX-License-Identifier: Apache-2.0
"""The memory of layers agrees with the formulas that describe Opacus' own allocations (tests/oracle)."""

from __future__ import annotations

import math

import pytest

from opacus_memprof.analysis.oom.layers import Layer, reduction_workspace
from opacus_memprof.profiles.layer_shapes import CaptureShape, LayerShape
from tests.oracle import formulas
from tests.oracle.layer import Layer as OracleLayer
from tests.oracle.layer import peak


def layer(kind: str, oracle: OracleLayer, tokens: int, rows: int = 0, columns: int = 0) -> Layer:
    """The layer as hooks see it. The oracle's last of two parameters is the bias."""
    weight, *bias = [parameter.numel for parameter in oracle.parameters]
    module = LayerShape(
        kind, 4 * (weight + sum(bias)), weight, sum(bias), rows, columns, kind in ("Linear", "Embedding")
    )
    return Layer(
        "layer", module, CaptureShape(oracle.batch, tokens, oracle.captured, oracle.backprop, oracle.s, False), 0
    )


def with_copies(oracle: OracleLayer) -> int:
    """The sampler's peak, or its results and the largest of them in zeros of the same size."""
    sampler = oracle.grad_sampler()
    return max(peak(sampler.timeline), sum(sampler.timeline) + max(oracle.per_sample_results))


LINEARS = [
    formulas.Linear(batch=6, s=4, d=24, p=40, middle=middle, bias=bias)
    for middle in ((), (64,), (5, 9))
    for bias in (True, None)
]


@pytest.mark.parametrize("oracle", LINEARS, ids=str)
def test_linear(oracle: formulas.Linear) -> None:
    ours = layer("Linear", oracle, oracle.positions, oracle.p, oracle.d)
    n = oracle.batch
    assert ours.per_sample_gradients(n) == sum(oracle.per_sample_results)
    assert ours.sampler(n) == pytest.approx(with_copies(oracle), rel=0.05)  # the bias is copied after the weight
    assert ours.passed_gradients(n, mean_loss=True) == 2 * oracle.backprop + oracle.captured
    norms = oracle.norm_sampler()
    assert norms is not None
    if len(oracle.middle) == 1:
        assert ours.ghost_norms(n) == pytest.approx(peak(norms.timeline), rel=0.01)  # norms take a few bytes more


def test_what_scales_with_the_number_of_samples() -> None:
    ours = layer("Linear", LINEARS[2], 64, 40, 24)
    for size in (
        ours.per_sample_gradients,
        ours.sampler,
        ours.ghost_norms,
        lambda n: ours.passed_gradients(n, mean_loss=True),
    ):
        assert 3 * size(2) == size(6)


def test_embedding() -> None:
    oracle = formulas.Embedding(batch=4, s=4, length=6, entries=50, dim=16)
    ours = layer("Embedding", oracle, 6, 50, 16)
    assert ours.sampler(4) == with_copies(oracle)
    assert ours.ghost_norms(4) < ours.sampler(4)


def test_layer_norm() -> None:
    oracle = formulas.Norm(batch=4, s=4, dim=32, middle=(30,))
    assert layer("LayerNorm", oracle, 30).sampler(4) == pytest.approx(with_copies(oracle), rel=0.05)


@pytest.mark.parametrize("padding", [0, 1])
def test_convolution(padding: int) -> None:
    oracle = formulas.Conv(batch=4, s=4, c=8, o=16, kernel=(3, 3), size=(20, 20), padding=padding)
    ours = layer("Conv2d", oracle, math.prod(oracle.output), 16, 8 * 9)
    assert ours.sampler(4) == pytest.approx(with_copies(oracle), rel=0.05)


def test_casts_of_clipping() -> None:
    half = formulas.Linear(batch=6, s=2, d=24, p=40)
    assert layer("Linear", half, 1, 40, 24).clipping_casts(6) == 4 * 6 * 24 * 40
    assert layer("Linear", LINEARS[0], 1, 40, 24).clipping_casts(6) == 0


@pytest.mark.parametrize(
    ("outputs", "rows", "measured"),
    [
        (256, 98304, 138412032),
        (64, 98304, 12582912),
        (12 * 256, 8192, 138412032),
        (12 * 64, 8192, 50331648),
        (2048, 48, 0),
    ],
)
def test_what_sums_took_on_an_h200(outputs: int, rows: int, measured: int) -> None:
    assert reduction_workspace(outputs, rows, 132) == measured
    assert reduction_workspace(outputs, rows, 0) == 0
