# SPDX-License-Identifier: Apache-2.0
"""The methods that ``Layer.shortcut`` returns keep what ``Layer.keep`` keeps."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from opacus_memprof.clipping import norms
from opacus_memprof.clipping.layers import KeptTensors, Layer, layer_for, matrix
from opacus_memprof.clipping.workspace import Workspace

WORKSPACE = Workspace.from_mib(64)
Build = Callable[[], nn.Module]
SHAPES: dict[str, tuple[Build, tuple[int, ...], int]] = {  # module, its input's shape, its output's features
    "pair": (lambda: nn.Linear(6, 5), (4, 2, 6), 5),
    "pair, no bias": (lambda: nn.Linear(6, 5, bias=False), (4, 2, 6), 5),
    "gradient": (lambda: nn.Linear(6, 5), (4, 9, 6), 5),
    "gradient of one sample": (lambda: nn.Linear(6, 5), (1, 9, 6), 5),
    "gradient, no bias": (lambda: nn.Linear(6, 5, bias=False), (1, 9, 6), 5),
    "layer norm": (lambda: nn.LayerNorm(6), (4, 9, 6), 6),
    "layer norm, no bias": (lambda: nn.LayerNorm(6, bias=False), (4, 9, 6), 6),
    "root mean square norm": (lambda: nn.RMSNorm(6), (4, 9, 6), 6),
}


@pytest.fixture(autouse=True)
def _kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Norms wait for the step, as on CUDA."""
    for module in (norms, matrix):
        monkeypatch.setattr(module, "has_kernels", lambda x: x.dtype == torch.float32)


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


def tensors(shape: tuple[int, ...], features: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(shape), torch.randn(*shape[:-1], features)


@pytest.mark.parametrize("name", SHAPES)
def test_the_same_is_kept(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    build, shape, features = SHAPES[name]
    torch.manual_seed(0)
    module = build()
    names = [name for name, _ in module.named_parameters()]
    layer = layer_for("layer", module, names)
    times = count_keeps(layer, monkeypatch)
    layer.keep(*tensors(shape, features), WORKSPACE)
    assert len(times) == 1
    for _ in range(2):
        x, g = tensors(shape, features)
        kept = layer.keep(x, g, WORKSPACE)
        assert len(times) == 1
        assert_equal(
            kept, layer_for("another", module, [n for n, _ in module.named_parameters()]).keep(x, g, WORKSPACE)
        )


@pytest.mark.parametrize("name", SHAPES)
def test_a_layer_decides_again_where_something_has_changed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    build, shape, features = SHAPES[name]
    module = build()
    layer = layer_for("layer", module, [name for name, _ in module.named_parameters()])
    times = count_keeps(layer, monkeypatch)
    x, g = tensors(shape, features)
    layer.keep(x, g, WORKSPACE)
    longer = tensors((shape[0], shape[1] + 1, shape[2]), features)
    turned = (x.mT.contiguous().mT, g)
    for changed in (longer, turned, (x.double(), g.double())):
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
