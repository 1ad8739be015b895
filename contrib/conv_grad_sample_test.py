# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import unittest

import hypothesis.strategies as st
import torch
import torch.nn as nn
from hypothesis import given, settings
from opacus.grad_sample.conv import compute_conv_grad_sample as compute_conv_grad_sample_of_opacus

from .conv_grad_sample import compute_conv_grad_sample

CONVOLUTIONS = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}


class ConvGradSampleTest(unittest.TestCase):
    def setUp(self):
        torch.manual_seed(0)

    def check(self, sampler, layer, x):
        """Compares with autograd, one sample at a time, in float64."""
        layer, x = layer.double(), x.double()
        backprops = torch.randn_like(layer(x)).detach()
        parameters = [p for p in layer.parameters() if p.requires_grad]
        stacks = sampler(layer, [x], backprops)
        self.assertEqual(set(stacks), set(parameters))
        for p in parameters:
            self.assertEqual(stacks[p].shape, (len(x), *p.shape))
        for i in range(len(x)):
            gradients = torch.autograd.grad(layer(x[i : i + 1]), parameters, backprops[i : i + 1])
            for p, gradient in zip(parameters, gradients, strict=True):
                torch.testing.assert_close(stacks[p][i], gradient, rtol=1e-10, atol=1e-10)

    @given(
        N=st.integers(0, 3),
        dims=st.integers(1, 3),
        groups=st.integers(1, 2),
        channels=st.integers(1, 3),
        kernel=st.lists(st.integers(1, 3), min_size=3, max_size=3),
        stride=st.lists(st.integers(1, 3), min_size=3, max_size=3),
        dilation=st.lists(st.integers(1, 2), min_size=3, max_size=3),
        padding=st.one_of(st.integers(0, 2), st.sampled_from(["same", "valid"])),
        mode=st.sampled_from(["zeros", "circular", "reflect", "replicate"]),
        channels_first=st.booleans(),
        frozen=st.booleans(),
    )
    @settings(deadline=60000, max_examples=60)
    def test_conv(self, N, dims, groups, channels, kernel, stride, dilation, padding, mode, channels_first, frozen):
        layer = CONVOLUTIONS[dims](
            groups * channels,
            groups * 2,
            kernel[:dims],
            1 if padding == "same" else stride[:dims],
            padding,
            dilation[:dims],
            groups,
            padding_mode=mode,
        )
        layer.weight.requires_grad_(not frozen)
        sides = (6, 7, 5)[:dims]
        if channels_first:
            x = torch.randn(N, groups * channels, *sides)
        else:
            x = torch.randn(N, *sides, groups * channels).movedim(-1, 1)
        self.check(compute_conv_grad_sample, layer, x)

    def defects(self):
        for dims, conv in CONVOLUTIONS.items():
            for mode in ("circular", "reflect", "replicate"):
                for padding in (1, "same"):
                    layer = conv(4, 6, 3, padding=padding, padding_mode=mode)
                    yield f"{conv.__name__} {mode} {padding}", layer, torch.randn(3, 4, *[6] * dims)
        x = torch.randn(3, 4, 6, 6)
        yield "channels_last", nn.Conv2d(4, 6, 3), x.to(memory_format=torch.channels_last)
        yield "permuted view", nn.Conv2d(4, 6, 3), x.transpose(2, 3)

    def test_padding_modes_and_memory_formats(self):
        for name, layer, x in self.defects():
            with self.subTest(name):
                self.check(compute_conv_grad_sample, layer, x)

    def test_opacus_has_other_gradients(self):
        """Fails when Opacus is fixed."""
        for name, layer, x in self.defects():
            with self.subTest(name), self.assertRaises(AssertionError):  # noqa: PT027  # in Opacus' style
                self.check(compute_conv_grad_sample_of_opacus, layer, x)


if __name__ == "__main__":
    unittest.main()
