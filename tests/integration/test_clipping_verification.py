# SPDX-License-Identifier: Apache-2.0
"""verify says which modes clip a model exactly, and leaves the model as it was."""

import copy

import pytest
import torch
from opacus.grad_sample import GradSampleModule
from torch import nn

from opacus_memprof.clipping import verify
from opacus_memprof.errors import MemprofError
from tests.integration.flash_clip_models import Transformer, convnet, image_data, mlp, token_data, vector_data


class Permuted(nn.Module):
    """A 2x2 convolution of stride 2 of a permuted view, as in ConvNeXt."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.conv = nn.LayerNorm(3), nn.Conv2d(3, 4, 2, stride=2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.conv(self.norm(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2))
        return out


class Dropped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Sequential(nn.Linear(9, 9), nn.Dropout(0.5), nn.Linear(9, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layer(x)
        return nn.functional.dropout(out, 0.5)


@pytest.mark.parametrize("mode", ["flash_clip", "hooks", "functorch", "ew", "ghost"])
def test_modes_that_are_exact(mode: str) -> None:
    torch.manual_seed(0)
    for model, batch in [(mlp(), vector_data(6).tensors[0].float()), (Transformer(), token_data(6).tensors[0])]:
        if mode == "ew" and isinstance(model, Transformer):
            continue  # scaled_dot_product_attention has no expanded weights
        found = verify(model, batch, mode)
        assert found.exact, found
        assert f"{mode!r} clips this model exactly: 4 samples" in str(found)


@pytest.mark.parametrize(
    ("mode", "exact"), [("flash_clip", True), ("functorch", True), ("hooks", False), ("ghost", False)]
)
def test_a_sampler_of_opacus_that_is_wrong(mode: str, exact: bool) -> None:
    torch.manual_seed(0)
    found = verify(Permuted(), torch.randn(4, 3, 4, 4), mode)
    assert found.exact == exact
    assert ("does not clip this model exactly" in str(found)) != exact
    assert exact or found.errors["conv.weight"] > 0.01


def test_the_model_is_left_as_it_was() -> None:
    torch.manual_seed(0)
    model, x = Dropped(), torch.randn(3, 9)
    model(x).sum().backward()
    before, gradients = copy.deepcopy(model.state_dict()), [p.grad.clone() for p in model.parameters()]
    model.eval()
    state = torch.get_rng_state()
    for mode in ("flash_clip", "hooks", "ghost"):
        assert verify(model, (x,), mode).exact
    assert torch.equal(torch.get_rng_state(), state)
    assert not model.training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), gradients, strict=True))
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert not any(hasattr(p, "grad_sample") for p in model.parameters())


def test_losses_and_keyword_arguments() -> None:
    torch.manual_seed(0)
    model, x = convnet(), image_data(5).tensors[0].float()
    seen = []

    def losses(module: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        seen.append(len(batch["input"]))
        return module(batch["input"]).square().sum(1)  # type: ignore[no-any-return]

    found = verify(model, {"input": x}, losses=losses, max_samples=2)
    assert found.exact
    assert len(found.norms) == 2
    assert set(seen) == {1, 2}


def test_refusals() -> None:
    x = torch.randn(4, 9)
    with pytest.raises(MemprofError, match="mode is 'fast'"):
        verify(mlp(), x, "fast")
    with pytest.raises(MemprofError, match="has been made private"):
        verify(GradSampleModule(mlp()), x)
    with pytest.raises(MemprofError, match="no sample"):
        verify(mlp(), x[:0])
    with pytest.raises(MemprofError, match="zero or not finite"):
        verify(mlp(), x, losses=lambda model, batch: model(batch).sum(1) * 0)
