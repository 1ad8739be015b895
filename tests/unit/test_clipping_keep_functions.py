# SPDX-License-Identifier: Apache-2.0
"""The functions that `Layer.keep_function` returns keep what `Layer.keep` keeps."""

import sys
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from opacus_memprof.clipping.kernels import norms
from opacus_memprof.clipping.layers import KeptTensors, Layer, convolution, layer_for, linear, normalization
from opacus_memprof.clipping.workspace import Workspace
from tests.unit.test_clipping_recognition import Transposed

WORKSPACE = Workspace.from_mib(64)
Build = Callable[[], nn.Module]
CASES: dict[str, tuple[Build, tuple[int, ...]]] = {  # module, and its input's shape
    "pair": (lambda: nn.Linear(6, 5), (4, 2, 6)),
    "pair, no bias": (lambda: nn.Linear(6, 5, bias=False), (4, 2, 6)),
    "pair of many dimensions": (lambda: nn.Linear(6, 5), (4, 2, 1, 6)),
    "gradient": (lambda: nn.Linear(6, 5), (4, 9, 6)),
    "gradient of one sample": (lambda: nn.Linear(6, 5), (1, 9, 6)),
    "gradient, no bias": (lambda: nn.Linear(6, 5, bias=False), (1, 9, 6)),
    "gradient of many dimensions": (lambda: nn.Linear(6, 5), (4, 3, 4, 6)),
    "gradient of a transposed weight": (lambda: Transposed(6, 5), (4, 9, 6)),
    "pointwise convolution": (lambda: nn.Conv2d(6, 5, 1), (4, 6, 2, 1)),
    "convolution": (lambda: nn.Conv2d(3, 4, 3, padding=1), (4, 3, 6, 5)),
    "convolution with strides and groups": (lambda: nn.Conv2d(4, 6, 3, stride=2, groups=2, bias=False), (4, 4, 6, 7)),
    "convolution of a sequence": (lambda: nn.Conv1d(3, 4, 2, dilation=2), (4, 3, 9)),
    "convolution's pair": (lambda: nn.Conv2d(6, 8, 3, padding=1), (4, 6, 2, 2)),
    "convolution's pair, groups": (lambda: nn.Conv2d(6, 8, 3, padding=1, groups=2), (4, 6, 2, 2)),
    "layer norm": (lambda: nn.LayerNorm(6), (4, 9, 6)),
    "layer norm, eps": (lambda: nn.LayerNorm(6, eps=0.5), (4, 9, 6)),
    "layer norm, no bias": (lambda: nn.LayerNorm(6, bias=False), (4, 9, 6)),
    "root mean square norm": (lambda: nn.RMSNorm(6), (4, 9, 6)),
    "group norm": (lambda: nn.GroupNorm(2, 6), (4, 6, 3, 4)),
}


# All have one with CUDA's kernels. On the CPU a group norm has none.
WITH_SHORTCUT = [*(("cuda", name) for name in CASES), *(("cpu", name) for name in CASES if name != "group norm")]


@pytest.fixture
def _device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """All norms wait for the step, as on CUDA, or those of small per-sample gradients, as on the CPU.

    What kernels find at once is found here without them.
    """
    if request.param == "cpu":
        return
    for module in (norms, linear, normalization):
        monkeypatch.setattr(module, "has_kernels", lambda x: x.dtype == torch.float32)
    monkeypatch.setattr(
        convolution,
        "gram_squared_norms",
        lambda g, a, workspace, lost=None: norms._tiled_squared_norms(g, a, workspace),
    )
    kernel = SimpleNamespace(
        group_norm_gradients_cuda=group_norm_gradients, token_norm_gradients_cuda=token_norm_gradients
    )
    monkeypatch.setitem(sys.modules, "opacus_memprof.clipping.kernels.stacks", kernel)


def group_norm_gradients(
    x: torch.Tensor, g: torch.Tensor, groups: int, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    normalized = nn.functional.group_norm(x, groups, eps=eps)
    return (normalized * g).flatten(2).sum(2), g.flatten(2).sum(2)


def token_norm_gradients(
    x: torch.Tensor, g: torch.Tensor, eps: float, *, has_mean: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    own = x - x.mean(2, keepdim=True) if has_mean else x
    products = g * own * (own.square().mean(2, keepdim=True) + eps).rsqrt()
    return products.sum(1), g.sum(1) if has_mean else None


def assert_equal(kept: KeptTensors, expected: KeptTensors) -> None:
    assert list(kept.norms) == list(expected.norms)
    for parameter, found in expected.norms.items():
        own = kept.norms[parameter]
        assert (own is None) == (found is None)
        if own is not None and found is not None:
            torch.testing.assert_close(own, found)
    assert kept.stacks.keys() == expected.stacks.keys()
    for parameter, stack in expected.stacks.items():
        assert kept.stacks[parameter].shape == stack.shape == (len(stack), *parameter.shape)
        assert kept.stacks[parameter].dtype == stack.dtype
        torch.testing.assert_close(kept.stacks[parameter], stack)
    assert (kept.pair is None) == (expected.pair is None)
    if kept.pair is not None and expected.pair is not None:
        assert all(one is other for one, other in zip(kept.pair, expected.pair, strict=True))


def count_keeps(layer: Layer, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Has one number more each time that the layer decides what to keep."""
    times: list[int] = []
    decide = layer._keep

    def keep(*args: object) -> KeptTensors:
        times.append(1)
        return decide(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(layer, "_keep", keep)
    return times


def tensors(module: nn.Module, shape: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """An input, and a gradient of the output."""
    x = torch.randn(shape)
    return x, torch.randn_like(module(x)).detach()


def build_layer(module: nn.Module) -> Layer:
    return layer_for("layer", module, [name for name, _ in module.named_parameters()])


@pytest.mark.usefixtures("_device")
@pytest.mark.parametrize(("_device", "name"), WITH_SHORTCUT, indirect=["_device"])
def test_the_same_is_kept(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    build, shape = CASES[name]
    torch.manual_seed(0)
    module = build()
    layer = build_layer(module)
    times = count_keeps(layer, monkeypatch)
    layer.keep(*tensors(module, shape), WORKSPACE)
    assert len(times) == 1
    for _ in range(2):
        x, g = tensors(module, shape)
        kept = layer.keep(x, g, WORKSPACE)
        assert len(times) == 1
        assert_equal(kept, build_layer(module).keep(x, g, WORKSPACE))


@pytest.mark.usefixtures("_device")
@pytest.mark.parametrize(("_device", "name"), WITH_SHORTCUT, indirect=["_device"])
def test_a_layer_decides_again_where_something_has_changed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    build, shape = CASES[name]
    module = build()
    layer = build_layer(module)
    times = count_keeps(layer, monkeypatch)
    x, g = tensors(module, shape)
    layer.keep(x, g, WORKSPACE)
    more = tensors(module, (shape[0] + 1, *shape[1:]))
    turned = (x.mT.contiguous().mT, g)
    for changed in (more, turned, (x.double(), g.double())):
        before = len(times)
        layer.keep(x, g, WORKSPACE)
        layer.keep(*changed, WORKSPACE)
        assert len(times) > before
    before = len(times)
    layer.keep(x, g, WORKSPACE, norms=False)  # of a layer that is used more than once
    assert len(times) == before + 1
    layer.keep(x, g, WORKSPACE)
    next(module.parameters()).requires_grad_(False)
    before = len(times)
    layer.keep(x, g, WORKSPACE)
    assert len(times) == before + 1
