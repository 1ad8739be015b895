# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import unittest

import hypothesis.strategies as st
import torch
import torch.nn as nn
from hypothesis import given, settings
from opacus.grad_sample import GradSampleModuleFastGradientClipping
from opacus.grad_sample.linear import compute_linear_norm_sample as compute_linear_norm_sample_of_opacus

from .linear_norm_sample import compute_linear_norm_sample
from .norm_samplers import compute_linear_norm_sample as compute_linear_norm_sample_in_tiles

GHOST = GradSampleModuleFastGradientClipping


def norms_by_hand(a, backprops):
    """The norms of the weight's gradients, formed in float64."""
    return (backprops.double().mT @ a.double()).flatten(1).norm(dim=1)


def opposing_tokens(dtype, size, rest, tokens=2):
    """Constant inputs; output gradients that cancel except for ``rest``. The second sample is an ordinary one."""
    a, g = torch.full((2, tokens, 16), 0.25).double(), torch.zeros(2, tokens, 16).double()
    g[0, 0], g[0, -1] = size, rest - size
    a[1], g[1] = torch.randn(tokens, 16), torch.randn(tokens, 16)
    return a.to(dtype), g.to(dtype)


class LinearNormSampleTest(unittest.TestCase):
    def setUp(self):
        torch.manual_seed(0)

    def check(self, sampler, a, backprops, rtol=5e-4):
        layer = nn.Linear(a.shape[-1], backprops.shape[-1], bias=False, dtype=a.dtype)
        norms = sampler(layer, [a], backprops)[layer.weight]
        torch.testing.assert_close(norms.double(), norms_by_hand(a, backprops), rtol=rtol, atol=0)

    def cases(self):
        yield opposing_tokens(torch.float32, 1e8, 8192.0)
        yield opposing_tokens(torch.float32, 1e8, 8192.0, tokens=20)
        yield opposing_tokens(torch.float64, 1e12, 8192.0)
        a = nn.functional.layer_norm(torch.randn(1, 1, 32) + 1e-4 * torch.randn(2, 250, 32), (32,))
        g = torch.randn(2, 250, 64)
        yield a, g - g.mean(1, keepdim=True)
        yield torch.randn(2, 5, 64) * 1e19, torch.randn(2, 5, 64) * 1e-23

    def test_norms_keep_their_digits_where_tokens_cancel(self):
        for sampler in (compute_linear_norm_sample, compute_linear_norm_sample_in_tiles):
            for i, (a, backprops) in enumerate(self.cases()):
                with self.subTest(sampler=sampler.__module__, case=i):
                    self.check(sampler, a, backprops)

    def test_opacus_loses_these_digits(self):
        """Fails when Opacus has the bound."""
        for i, (a, backprops) in enumerate(self.cases()):
            with self.subTest(case=i), self.assertRaises(AssertionError):  # noqa: PT027  # in Opacus' style
                self.check(compute_linear_norm_sample_of_opacus, a, backprops, rtol=0.01)

    @given(
        N=st.integers(0, 4),
        tokens=st.lists(st.integers(1, 7), max_size=1),
        W=st.integers(1, 17),
        out=st.integers(1, 17),
        bias=st.booleans(),
    )
    @settings(deadline=60000, max_examples=25)
    def test_norms_are_those_of_opacus_otherwise(self, N, tokens, W, out, bias):
        layer = nn.Linear(W, out, bias=bias).double()
        a, backprops = torch.randn(N, *tokens, W).double(), torch.randn(N, *tokens, out).double()
        norms = compute_linear_norm_sample(layer, [a], backprops)
        expected = compute_linear_norm_sample_of_opacus(layer, [a], backprops)
        self.assertEqual(norms.keys(), expected.keys())
        for p, norm in expected.items():
            torch.testing.assert_close(norms[p], norm, rtol=1e-8, atol=1e-12)

    def test_ghost_clipping_bounds_each_sample(self):
        """Also a sample whose tokens cancel. With Opacus' sampler it contributes more than 1000 times the bound."""
        original = dict(GHOST.NORM_SAMPLERS)
        self.addCleanup(lambda: (GHOST.NORM_SAMPLERS.clear(), GHOST.NORM_SAMPLERS.update(original)))
        a, g = opposing_tokens(torch.float32, 1e8, 8192.0)
        contributions = []
        for sampler in (compute_linear_norm_sample_of_opacus, compute_linear_norm_sample):
            GHOST.NORM_SAMPLERS[nn.Linear] = sampler
            model = GHOST(nn.Linear(16, 16, bias=False), max_grad_norm=1.0, loss_reduction="sum")
            (model(a) * g).sum().backward()
            factor = (1.0 / (model.get_norm_sample() + 1e-6)).clamp(max=1.0)[0]
            contributions.append((factor * norms_by_hand(a, g)[0]).item())
            model.remove_hooks()
        self.assertGreater(contributions[0], 1000)
        self.assertLessEqual(contributions[1], 1 + 1e-3)


if __name__ == "__main__":
    unittest.main()
