# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import unittest
import weakref

import hypothesis.strategies as st
import torch
import torch.nn as nn
from hypothesis import given, settings
from opacus.grad_sample import GradSampleModuleFastGradientClipping
from opacus.grad_sample.embedding import compute_embedding_norm_sample
from opacus.grad_sample.linear import compute_linear_norm_sample
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from .norm_samplers import NORM_SAMPLERS, register_norm_samplers

GHOST = GradSampleModuleFastGradientClipping
OPACUS_NORM_SAMPLERS = {nn.Linear: compute_linear_norm_sample, nn.Embedding: compute_embedding_norm_sample}
WORKSPACES = st.sampled_from([1, 300, 2000, 1 << 20])  # bytes: the first leaves one row, token or channel at a time


def norms_by_autograd(layer, x, backprops):
    """Norms by parameter, one sample at a time."""
    parameters = [p for p in layer.parameters() if p.requires_grad]
    norms = {p: [] for p in parameters}
    for i in range(len(x)):
        gradients = torch.autograd.grad(layer(x[i : i + 1]), parameters, backprops[i : i + 1])
        for p, gradient in zip(parameters, gradients, strict=True):
            norms[p].append(gradient.norm())
    return {p: torch.stack(each) for p, each in norms.items()}


def norms_by_opacus(layer, x, backprops):
    """Norms by parameter, from Opacus' norm sampler or, where it has none, from its per-sample gradients."""
    if type(layer) in OPACUS_NORM_SAMPLERS:
        return OPACUS_NORM_SAMPLERS[type(layer)](layer, [x], backprops)
    stacks = GHOST.GRAD_SAMPLERS[type(layer)](layer, [x], backprops)
    return {p: stack.flatten(1).norm(dim=1) for p, stack in stacks.items()}


class PeakBytes(TorchDispatchMode):
    """The most bytes that were live at a time, of what was allocated inside."""

    def __init__(self):
        super().__init__()
        self.live, self.peak, self.known = 0, 0, {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        before = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        output = func(*args, **(kwargs or {}))
        for x in tree_leaves(output):
            if isinstance(x, torch.Tensor) and x.untyped_storage()._cdata not in before:
                storage = x.untyped_storage()
                self.live += storage.nbytes()
                self.peak = max(self.peak, self.live)
                weakref.finalize(storage, self.free, storage.nbytes())
        return output

    def free(self, count):
        self.live -= count


class NormSamplersTest(unittest.TestCase):
    def setUp(self):
        torch.manual_seed(0)

    def run_test(self, layer, x, workspace_bytes, opacus=True):
        """Compares norms in float64 with those of one sample at a time, and with Opacus' own."""
        layer = layer.double()
        x = x.double() if x.is_floating_point() else x
        backprops = torch.randn_like(layer(x)).detach()
        norms = NORM_SAMPLERS[type(layer)](layer, [x], backprops, workspace_bytes)
        self.assertEqual(set(norms), {p for p in layer.parameters() if p.requires_grad})
        if len(x) == 0:
            self.assertEqual({each.shape for each in norms.values()}, {(0,)})
            return
        self.check(norms, norms_by_autograd(layer, x, backprops))
        if opacus:
            self.check(norms, norms_by_opacus(layer, x, backprops))

    def check(self, actual, expected):
        for p, norm in expected.items():
            torch.testing.assert_close(actual[p], norm.detach(), rtol=1e-10, atol=1e-12)

    @given(
        N=st.integers(0, 4),
        tokens=st.lists(st.integers(1, 7), max_size=2),
        W=st.integers(1, 17),
        out=st.integers(1, 17),
        bias=st.booleans(),
        frozen=st.booleans(),
        workspace_bytes=WORKSPACES,
    )
    @settings(deadline=60000, max_examples=25)
    def test_linear(self, N, tokens, W, out, bias, frozen, workspace_bytes):
        layer = nn.Linear(W, out, bias=bias)
        layer.weight.requires_grad_(not (frozen and bias))
        # Opacus' norm sampler leaves four-dimensional inputs out.
        self.run_test(layer, torch.randn(N, *tokens, W), workspace_bytes, opacus=len(tokens) < 2)

    @given(
        N=st.integers(0, 4),
        T=st.integers(1, 9),
        V=st.integers(1, 5),
        D=st.integers(1, 9),
        padding=st.booleans(),
        workspace_bytes=WORKSPACES,
    )
    @settings(deadline=60000, max_examples=25)
    def test_embedding(self, N, T, V, D, padding, workspace_bytes):
        layer = nn.Embedding(V, D, padding_idx=0 if padding else None)
        # Opacus' samplers give the row at padding_idx a gradient.
        self.run_test(layer, torch.randint(0, V, (N, T)), workspace_bytes, opacus=not padding)

    @given(
        N=st.integers(0, 4),
        T=st.integers(1, 5),
        shape=st.lists(st.integers(2, 6), min_size=1, max_size=2),
        rms=st.booleans(),
        workspace_bytes=WORKSPACES,
    )
    @settings(deadline=60000, max_examples=25)
    def test_layer_norm(self, N, T, shape, rms, workspace_bytes):
        layer = nn.RMSNorm(shape, eps=1e-6) if rms else nn.LayerNorm(shape)
        self.run_test(layer, torch.randn(N, T, *shape), workspace_bytes)

    @given(
        N=st.integers(0, 4),
        groups=st.integers(1, 3),
        width=st.integers(2, 3),
        H=st.integers(2, 5),
        workspace_bytes=WORKSPACES,
    )
    @settings(deadline=60000, max_examples=25)
    def test_group_norm(self, N, groups, width, H, workspace_bytes):
        self.run_test(nn.GroupNorm(groups, groups * width), torch.randn(N, groups * width, H, H), workspace_bytes)

    @given(
        N=st.integers(0, 4),
        groups=st.integers(1, 3),
        channels=st.integers(1, 3),
        out=st.integers(1, 4),
        size=st.integers(6, 8),
        kernel=st.integers(1, 3),
        stride=st.integers(1, 3),
        dilation=st.integers(1, 2),
        padding=st.integers(0, 2),
        one_dimensional=st.booleans(),
        workspace_bytes=WORKSPACES,
    )
    @settings(deadline=60000, max_examples=25)
    def test_conv(
        self,
        N,
        groups,
        channels,
        out,
        size,
        kernel,
        stride,
        dilation,
        padding,
        one_dimensional,
        workspace_bytes,
    ):
        conv = nn.Conv1d if one_dimensional else nn.Conv2d
        layer = conv(groups * channels, groups * out, kernel, stride, padding, dilation, groups)
        x = torch.randn(N, groups * channels, *[size] * (1 if one_dimensional else 2))
        self.run_test(layer, x, workspace_bytes)

    def test_conv_padding(self):
        for padding, mode in (("same", "zeros"), (1, "circular"), ("same", "reflect")):
            for conv, sides in ((nn.Conv1d, (8,)), (nn.Conv2d, (8, 7))):
                with self.subTest(padding=padding, mode=mode, conv=conv):
                    layer = conv(2, 3, 3, padding=padding, padding_mode=mode)
                    self.run_test(layer, torch.randn(3, 2, *sides), 500, opacus=mode == "zeros")

    def test_conv_of_permuted_view(self):
        """The downsampling of ConvNeXt, which has its features last."""
        x = torch.randn(3, 8, 8, 4).permute(0, 3, 1, 2)
        self.run_test(nn.Conv2d(4, 6, 2, stride=2), x, 1 << 20, opacus=False)

    def test_low_precision_accumulates_in_float32(self):
        for layer, shape in ((nn.Linear(64, 48), (2, 20, 64)), (nn.LayerNorm(64), (2, 20, 64))):
            for workspace_bytes in (4000, 1 << 20):
                x = torch.randn(shape).bfloat16()
                layer = layer.float()
                backprops = torch.randn_like(layer(x.float())).bfloat16()
                expected = norms_by_autograd(layer, x.float(), backprops.float())
                expected = [expected[p].detach() for p in layer.parameters()]
                layer = layer.bfloat16()
                norms = NORM_SAMPLERS[type(layer)](layer, [x], backprops, workspace_bytes)
                for p, norm in zip(layer.parameters(), expected, strict=True):
                    torch.testing.assert_close(norms[p], norm, rtol=1e-2, atol=0)

    def test_temporaries_fit_into_the_workspace(self):
        """Beside the workspace there are norms, and what is as large as a bias for each sample."""
        workspace_bytes, small = 1 << 18, 1 << 15
        cases = {
            "gram": (nn.Linear(600, 400), torch.randn(2, 400, 600)),  # 2 · 400² elements are 1.2 MiB
            "gradients": (nn.Linear(300, 400), torch.randn(3, 900, 300)),  # 3 · 300 · 400 are 1.4 MiB
            "embedding": (nn.Embedding(1000, 256), torch.randint(0, 1000, (4, 300))),
            "convolution": (nn.Conv2d(32, 64, 3, padding=1), torch.randn(4, 32, 28, 28)),
            "layer norm": (nn.LayerNorm(512), torch.randn(4, 200, 512)),
            "group norm": (nn.GroupNorm(16, 64), torch.randn(4, 64, 32, 32)),
        }
        for name, (layer, x) in cases.items():
            with self.subTest(name):
                backprops = torch.randn_like(layer(x)).detach()
                peaks = []
                for ceiling in (workspace_bytes, 1 << 40):
                    with PeakBytes() as mode:
                        NORM_SAMPLERS[type(layer)](layer, [x], backprops, ceiling)
                    peaks.append(mode.peak)
                self.assertLessEqual(peaks[0], workspace_bytes + small)
                self.assertGreater(peaks[1], 2 * workspace_bytes)  # what is measured would be seen

    def test_ghost_clipping_finds_the_norms_of_autograd(self):
        """A model of all of these layers under ``register_norm_sampler``."""
        original = dict(GHOST.NORM_SAMPLERS)
        self.addCleanup(lambda: (GHOST.NORM_SAMPLERS.clear(), GHOST.NORM_SAMPLERS.update(original)))
        model = nn.Sequential(
            nn.Embedding(9, 16),
            nn.Unflatten(1, (4, 4)),
            nn.LayerNorm(16),
            nn.Linear(16, 8),
            nn.Conv2d(4, 6, 2),
            nn.GroupNorm(2, 6),
            nn.Flatten(2),
            nn.Conv1d(6, 5, 3),
            nn.RMSNorm(19, eps=1e-6),
            nn.Linear(19, 3),
        ).double()
        x = torch.randint(0, 9, (5, 16))
        expected = []
        for i in range(5):
            loss = model(x[i : i + 1]).square().sum()
            gradients = torch.autograd.grad(loss, list(model.parameters()))
            expected.append(torch.stack([gradient.norm() for gradient in gradients]).norm())
        register_norm_samplers(workspace_bytes=400)
        private = GHOST(model, max_grad_norm=1.0, loss_reduction="sum")
        private(x).square().sum().backward()
        torch.testing.assert_close(private.get_norm_sample(), torch.stack(expected), rtol=1e-10, atol=0)
        private.remove_hooks()


if __name__ == "__main__":
    unittest.main()
