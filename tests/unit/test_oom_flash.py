# SPDX-License-Identifier: Apache-2.0
"""What flash_clip is said to take for a layer, against what its layers take, as torch's own profiler sees it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.profiler import record_function

from opacus_memprof.analysis.oom import flash
from opacus_memprof.analysis.oom.layers import Layer
from opacus_memprof.clipping.layers import LAYERS
from opacus_memprof.clipping.layers.base import KeptTensors
from opacus_memprof.clipping.layers.normalization import LayerNormLayer
from opacus_memprof.clipping.layers.shared import SharedGradient
from opacus_memprof.clipping.workspace import Workspace
from opacus_memprof.hooks.forward_shapes import ShapeProbe
from opacus_memprof.hooks.shapes import capture_shape, layer_shape_of
from opacus_memprof.profiles.layer_shapes import CaptureShape
from opacus_memprof.recording.observations import layer_shapes
from tests.oracle.meter import WINDOW, storage_bytes, window_peaks

BATCH = 6
ROUNDING = 200  # norms, of a few bytes each
LAYERS_AND_INPUTS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear, gradients": (lambda: nn.Linear(24, 40), (200, 24)),
    "linear, pair": (lambda: nn.Linear(256, 192), (40, 256)),
    "linear, a token": (lambda: nn.Linear(256, 192), (256,)),
    "layer norm": (lambda: nn.LayerNorm(64), (200, 64)),
    "group norm": (lambda: nn.GroupNorm(4, 32), (32, 30, 30)),
    "convolution": (lambda: nn.Conv2d(8, 16, 3, padding=1), (8, 40, 40)),
    "kernel 7": (lambda: nn.Conv2d(8, 8, 7, padding=3, bias=False), (8, 30, 30)),
    "stride": (lambda: nn.Conv2d(8, 24, 5, stride=2), (8, 40, 40)),
    "groups": (lambda: nn.Conv2d(16, 8, 3, groups=4), (16, 40, 40)),
    "depthwise": (lambda: nn.Conv2d(16, 16, 3, padding=1, groups=16), (16, 40, 40)),
    "1x1": (lambda: nn.Conv2d(16, 32, 1), (16, 40, 40)),
    "1x1, stride": (lambda: nn.Conv2d(16, 32, 1, stride=2), (16, 40, 40)),
    "one dimension": (lambda: nn.Conv1d(16, 24, 9, padding=4), (16, 400)),
    "convolution, pair": (lambda: nn.Conv2d(64, 128, 3, stride=2, padding=1), (64, 8, 8)),
    "large, pair": (lambda: nn.Conv2d(32, 256, 3), (32, 12, 12)),
    "groups, pair": (lambda: nn.Conv2d(64, 128, 3, groups=2), (64, 5, 5)),
}


@pytest.mark.parametrize("ceiling", [256 * 2**20, 3 * 2**19], ids=["all samples at once", "some at a time"])
@pytest.mark.parametrize("name", LAYERS_AND_INPUTS)
def test_a_layer(name: str, ceiling: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flash, "WORKSPACE_BYTES", ceiling)
    # What is predicted is what a GPU without kernels of ours takes.
    monkeypatch.setattr(LayerNormLayer, "_accumulates_in_float64", lambda self, g: False)
    build, shape = LAYERS_AND_INPUTS[name]
    module, x = build(), torch.randn(BATCH, *shape, requires_grad=True)
    y = module(x)
    ShapeProbe("layer")(module, (x,), y)
    parameters = dict(module.named_parameters())
    seen = Layer("layer", layer_shape_of(module, parameters), layer_shapes().forwards.pop("layer"), 0)
    predicted = flash.FlashClip(seen, in_registers=False)
    layer, workspace = LAYERS[type(module)]("layer", module), Workspace(ceiling)
    x, g, factors = x.detach(), torch.randn_like(y), torch.ones(BATCH)
    kept: list[KeptTensors] = []

    def norms() -> None:
        with record_function(WINDOW + "norms"):
            kept.append(layer.keep(x, g, workspace))

    def sums() -> None:
        totals = []
        with record_function(WINDOW + "sums"):
            for _, total in layer.clipped_sums(kept.pop(), factors, workspace):
                totals.append(total)

    peak = window_peaks(norms)["norms"]
    statistics = 2 * 4 * BATCH * shape[0] if isinstance(module, nn.LayerNorm) else 0  # of every token
    assert predicted.new_bytes(BATCH) + predicted.norm_temporaries(BATCH) + statistics == pytest.approx(
        peak, rel=2e-3, abs=ROUNDING
    )
    kept_bytes = storage_bytes(tensor for _, tensor in kept[0].tensors())
    assert predicted.kept_bytes(BATCH) == pytest.approx(kept_bytes, abs=ROUNDING)
    pair = kept[0].pair is not None
    assert pair == ("pair" in name or "token" in name)
    parameters, peak = sum(p.nbytes for p in module.parameters()), window_peaks(sums)["sums"]
    if pair:
        assert predicted.sum_temporaries(BATCH) + parameters == pytest.approx(peak, rel=0.02)
        assert peak <= ceiling + 2 * parameters  # the sum, and the sum over some samples
    else:
        assert predicted.sum_temporaries(BATCH) == 0
        assert peak <= parameters


@pytest.mark.parametrize("samples", [1, 5])
def test_norms_of_which_nothing_is_kept(samples: int) -> None:
    """As ghost clipping uses them; a convolution's input is unfolded all the same."""
    module, x = nn.Conv2d(8, 16, 3, padding=1), torch.randn(samples, 8, 40, 40)
    y = module(x)
    ShapeProbe("layer")(module, (x,), y)
    parameters = dict(module.named_parameters())
    seen = Layer("layer", layer_shape_of(module, parameters), layer_shapes().forwards.pop("layer"), 0)
    layer, workspace, g = LAYERS[nn.Conv2d]("layer", module), Workspace(flash.WORKSPACE_BYTES), torch.randn_like(y)

    def norms() -> None:
        with record_function(WINDOW + "norms"):
            layer.keep_norms(x, g, workspace)

    predicted = flash.FlashClip(seen, in_registers=False).norm_temporaries(samples, keep=False)
    assert predicted == pytest.approx(window_peaks(norms)["norms"], rel=0.01, abs=ROUNDING)


@pytest.mark.parametrize(("ceiling", "at_once"), [(2**28, BATCH), (4 * 2 * 4 * 40 * 24, 4)])
def test_a_call_s_remaining_pair_is_added_to_the_others(
    ceiling: int, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three gradients of each sample: that of the call, a copy of the others' sum, and the new sum."""
    monkeypatch.setattr(flash, "WORKSPACE_BYTES", ceiling)
    module, tokens = nn.Linear(24, 40, bias=False), 10  # a pair is larger than half of a gradient, and not than one
    sizes = (3 * 4 * BATCH * tokens * width for width in (24, 40))
    forward = CaptureShape(BATCH, 3 * tokens, *sizes, element_bytes=4, from_leaf=False, calls=3)
    seen = Layer("layer", layer_shape_of(module, dict(module.named_parameters())), forward, 0)
    predicted = flash.FlashClip(seen, in_registers=False)
    assert predicted.kept_calls(BATCH) == 1
    assert predicted.merged_norm_temporaries(BATCH) == at_once * 3 * 4 * 40 * 24


@pytest.mark.parametrize("ceiling", [2**28, 2**21], ids=["all samples at once", "some at a time"])
def test_norms_of_a_convolution_that_runs_twice(ceiling: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a discriminator's of real and generated samples: both gradients and their sum are formed."""
    monkeypatch.setattr(flash, "WORKSPACE_BYTES", ceiling)
    module, x = nn.Conv2d(64, 128, 3, stride=2, padding=1, bias=False), torch.randn(BATCH, 64, 8, 8)
    y = module(x)
    ShapeProbe("layer")(module, (x,), y)
    once = layer_shapes().forwards.pop("layer")
    seen = Layer("layer", layer_shape_of(module, dict(module.named_parameters())), once.repeated(2), 0)
    predicted = flash.FlashClip(seen, in_registers=False)
    layer, workspace = LAYERS[nn.Conv2d]("layer", module), Workspace(ceiling)
    shared = SharedGradient(module.weight, layer)
    for _ in range(2):
        shared.add(layer, layer.keep(x, torch.randn_like(y), workspace), workspace)
    assert len(shared.uses) == 2
    assert predicted.kept_calls(BATCH) == 2

    def norms() -> None:
        with record_function(WINDOW + "norms"):
            shared.squared_norms(workspace)

    peak = window_peaks(norms)["norms"]
    assert 0.97 * peak <= predicted.merged_norm_temporaries(BATCH) <= 1.1 * peak


@pytest.mark.parametrize("samples", [6, 2])
def test_gradients_of_a_transposed_convolution_are_formed_and_kept(
    samples: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has no rule of its own: its forward is repeated, for as many samples at a time as fit."""
    module, x = nn.ConvTranspose2d(32, 16, 4, stride=2, bias=False), torch.randn(6, 32, 5, 5, requires_grad=True) * 1
    y = module(x)
    shape = capture_shape(module, (x,), y)
    assert shape is not None
    moved, weight = (x[0].nbytes + y[0].nbytes), module.weight.nbytes
    monkeypatch.setattr(flash, "WORKSPACE_BYTES", samples * (4 * moved + weight))
    seen = Layer("up", layer_shape_of(module, dict(module.named_parameters())), shape, 0)
    clip = flash.FlashClip(seen, in_registers=True)
    assert clip.kept_bytes(6) == 6 * weight
    assert clip.norm_temporaries(6) >= samples * moved + (samples < 6) * samples * weight


def test_views_of_one_tensor_keep_it_until_the_clipped_sums() -> None:
    """Of the last token, as many classifiers have it: the pair keeps the tensor of all tokens alive."""
    states = torch.randn(BATCH, 50, 24, requires_grad=True) * 1
    module = nn.Linear(24, 3)
    x = states[:, -1]
    shape = capture_shape(module, (x,), module(x))
    assert shape is not None
    assert (shape.input_bytes, shape.viewed_bytes) == (x.nbytes, states.nbytes)
    assert shape.viewed_id == id(states)
    seen = Layer("head", layer_shape_of(module, dict(module.named_parameters())), shape, 0)
    clip = flash.FlashClip(seen, in_registers=True)
    assert clip.kept_bytes(BATCH) == states.nbytes + BATCH * 3 * 4 + clip.new_bytes(BATCH)
    assert clip.new_bytes(BATCH) == 0  # the bias' gradients are those of the output
