# SPDX-License-Identifier: Apache-2.0
"""Convolutions computed in another layout than their tensors have are recognized; random ones are drawn as they say.

The cases are the ones that benchmarks/virtual_gpu/convolution_workspace.py measured on an H200. A stand-in replaces the
tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks.virtual_gpu.cases import drawn, named
from benchmarks.virtual_gpu.models import named as model_named
from opacus_memprof.hooks.shapes import needs_layout_copy

CONVOLUTION = nn.Conv2d(16, 32, 3)


def on_gpu(dtype: torch.dtype = torch.float32, *, contiguous: bool = True) -> Any:
    return SimpleNamespace(dtype=dtype, is_cuda=True, is_contiguous=lambda: contiguous)


@pytest.mark.parametrize(
    ("module", "output", "relaid"),
    [
        (CONVOLUTION, on_gpu(), True),
        (CONVOLUTION, on_gpu(torch.bfloat16), True),
        (CONVOLUTION, on_gpu(torch.float64), False),
        (CONVOLUTION, on_gpu(contiguous=False), False),
        (nn.Conv2d(16, 32, 3, groups=4), on_gpu(), True),
        (nn.Conv2d(16, 16, 3, groups=16), on_gpu(), False),
        (nn.Conv2d(16, 32, 1, stride=2), on_gpu(), False),
        (nn.Conv2d(1, 32, 3), on_gpu(), True),
        (nn.Conv1d(16, 32, 9), on_gpu(), True),
    ],
)
def test_cudnn(module: nn.Conv1d | nn.Conv2d, output: Any, relaid: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    assert needs_layout_copy(module, output) == relaid


def test_cudnn_without_tensor_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    assert not needs_layout_copy(CONVOLUTION, on_gpu())
    assert needs_layout_copy(CONVOLUTION, on_gpu(torch.float16))


@pytest.mark.skipif(not hasattr(torch.backends.cudnn, "conv"), reason="this torch has one setting for TF32")
def test_cudnn_where_convolutions_have_a_setting_of_their_own(set_fp32_precision: Callable[[Any, str], None]) -> None:
    for precision, relaid in (("ieee", False), ("tf32", True)):
        set_fp32_precision(torch.backends.cudnn.conv, precision)
        assert needs_layout_copy(CONVOLUTION, on_gpu()) == relaid


def test_onednn() -> None:
    x = torch.randn(2, 16, 8, 8)
    assert needs_layout_copy(CONVOLUTION, CONVOLUTION(x))
    assert not needs_layout_copy(nn.Conv2d(16, 32, 1), nn.Conv2d(16, 32, 1)(x))
    last = x.contiguous(memory_format=torch.channels_last)
    assert not needs_layout_copy(CONVOLUTION, CONVOLUTION(last))
    with torch.backends.mkldnn.flags(enabled=False):
        assert not needs_layout_copy(CONVOLUTION, CONVOLUTION(x))


def test_a_drawn_training_depends_on_its_seed_alone() -> None:
    cases = [drawn(7, number) for number in range(40)]
    assert [named(case.name) for case in cases] == cases
    assert {case.mode for case in cases} == {"vanilla", "hooks", "ghost", "flash_clip"}
    assert {case.batch for case in cases} != {drawn(8, number).batch for number in range(40)}


@pytest.mark.parametrize("number", range(12))
def test_a_drawn_network_has_the_sizes_that_were_drawn(number: int) -> None:
    model = model_named(f"drawn 7 {number}")
    with torch.device("meta"):
        network, (inputs, _) = model.build(), model.data(2)
        convolutions = [part for part in network if isinstance(part, nn.modules.conv._ConvNd)]
        for part, conv in zip(convolutions, network.convs, strict=True):
            assert part.weight.shape == conv.weight
            inputs = part(inputs)
            assert inputs.shape == (2, *conv.output()[1:])
