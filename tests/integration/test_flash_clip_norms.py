# SPDX-License-Identifier: Apache-2.0
"""flash_clip bounds what a sample does: norms and clipped sums are those of one sample at a time in plain autograd."""

import copy

import pytest
import torch
from opacus.grad_sample import GradSampleModuleFastGradientClipping
from torch import nn

from opacus_memprof.clipping import register_norm_samplers
from opacus_memprof.clipping.layers import LAYERS
from opacus_memprof.clipping.modes import FlashNormSampler
from opacus_memprof.clipping.workspace import Workspace
from tests.integration.flash_clip_models import MODELS, assert_same, criterion, make_private, vector_data


@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("name", MODELS)
def test_clipped_sum_and_norms_equal_plain_autograd(name: str, passes: int) -> None:
    torch.manual_seed(0)
    build, data = MODELS[name]
    model = build().double()
    x, y = data(5).tensors
    oracle = copy.deepcopy(model)
    norms, total = [], {n: torch.zeros_like(p) for n, p in oracle.named_parameters()}
    for i in range(5):
        oracle.zero_grad()
        criterion("sum")(oracle(x[i : i + 1]), y[i : i + 1]).backward()
        gradients = {n: p.grad for n, p in oracle.named_parameters()}
        norm = torch.stack([g.norm() for g in gradients.values()]).norm()
        norms.append(norm)
        for n, g in gradients.items():
            total[n] += g * min(1.0, 0.3 / (norm.item() + 1e-6))
    module, optimizer, _ = make_private(model, data(5), "flash_clip", noise_multiplier=0.0, flash_clip_passes=passes)
    criterion("mean")(module(x), y).backward()
    optimizer.clip_and_accumulate()
    torch.testing.assert_close(module.per_sample_gradient_norms, torch.stack(norms), rtol=1e-10, atol=0)
    assert_same({n: p.summed_grad for n, p in module._module.named_parameters()}, total)


@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_sensitivity(dtype: torch.dtype, passes: int) -> None:
    """Whatever its scale, a sample changes the clipped sum by at most max_grad_norm (to rounding)."""
    slack = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 1e-2}[dtype]
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(9, 20), nn.ReLU(), nn.LayerNorm(20), nn.Linear(20, 20), nn.Linear(20, 4)).to(dtype)
    x = torch.randn(6, 9).to(dtype) * torch.tensor([[1e-8], [1e-3], [1.0], [1e3], [1e6], [1e8]]).to(dtype)
    weights = torch.tensor([1e8, 1e5, 1.0, 1e3, 1e-4, 1e6]).to(dtype)

    def clipped(at: list[int]) -> torch.Tensor:
        private = copy.deepcopy(model)
        module, optimizer, _ = make_private(
            private, vector_data(8), "flash_clip", noise_multiplier=0.0, loss_reduction="sum", flash_clip_passes=passes
        )
        (module(x[at]).float().square().sum(1) * weights[at].float()).sum().backward()
        optimizer.clip_and_accumulate()
        return torch.cat([p.summed_grad.double().flatten() for p in private.parameters()])

    together = clipped(list(range(6)))
    for i in range(6):
        alone = clipped([i]).norm()
        assert alone <= 0.3 * (1 + slack)
        # The sum is stored in the parameters' dtype, so what is left when a sample leaves is rounded to it.
        rounding = torch.finfo(dtype).eps * 6 * 0.3
        assert (together - clipped([j for j in range(6) if j != i])).norm() <= 0.3 * (1 + slack) + rounding


@pytest.mark.parametrize("name", MODELS)
def test_samplers_for_plain_ghost_clipping(name: str) -> None:
    """Norms as Opacus' own; Opacus' ghost mode has no exact norms for four-dimensional inputs, ours has."""
    torch.manual_seed(0)
    build, data = MODELS[name]
    model, samples = build().double(), data(8)
    norms = []
    for ours in (False, True):
        restore = register_norm_samplers(workspace_mb=0.02) if ours else (lambda: None)
        try:
            module, _, loss, _ = make_private(copy.deepcopy(model), samples, "ghost", criterion=nn.CrossEntropyLoss())
            x, y = samples.tensors
            output = module(x)
            output = output.mean(2) if output.dim() == 3 else output
            loss(output, y.flatten() if y.dim() == 1 else y[:, 0]).backward()
            norms.append({n: p._norm_sample.clone() for n, p in module.named_parameters()})
        finally:
            restore()
    assert_same(norms[1], norms[0])


def test_samplers_for_layers_that_are_recognized() -> None:
    """Conv1D of GPT-2, which plain ghost clipping samples by forming its per-sample gradients."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=17,
        n_embd=8,
        n_layer=1,
        n_head=2,
        n_positions=9,
        resid_pdrop=0,
        embd_pdrop=0,
        attn_pdrop=0,
        classifier_dropout=0,
    )
    model = transformers.GPT2ForTokenClassification(config).double().train()
    model.transformer.wpe.requires_grad_(False)
    ids = torch.randint(0, 17, (4, 6))
    restore = register_norm_samplers(model=model)
    try:
        private = copy.deepcopy(model)
        module = GradSampleModuleFastGradientClipping(private, max_grad_norm=1.0, loss_reduction="sum", strict=False)
        module(input_ids=ids).logits.square().sum().backward()
        norms = module.get_norm_sample()
    finally:
        restore()
    assert transformers.pytorch_utils.Conv1D not in GradSampleModuleFastGradientClipping.NORM_SAMPLERS
    for i in range(4):
        model.zero_grad()
        model(input_ids=ids[i : i + 1]).logits.square().sum().backward()
        expected = torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm()
        torch.testing.assert_close(norms[i], expected, rtol=1e-10, atol=0)


def test_restoring_samplers_leaves_opacus_as_it_was() -> None:
    from opacus.grad_sample import GradSampleHooksFastGradientClipping as Ghost

    before = dict(Ghost.NORM_SAMPLERS)
    restore = register_norm_samplers()
    assert before != Ghost.NORM_SAMPLERS
    restore()
    assert before == Ghost.NORM_SAMPLERS


@pytest.mark.parametrize("workspace_mb", [0.006, 1])
def test_what_opacus_could_take_agrees_with_ours(workspace_mb: float) -> None:
    """contrib says the mathematics again, in one module that Opacus could take: both must stay the same."""
    from contrib.norm_samplers import NORM_SAMPLERS

    torch.manual_seed(0)
    workspace = Workspace.from_mib(workspace_mb)
    cases = [
        (nn.Linear(9, 7), torch.randn(3, 5, 4, 9)),
        (nn.Linear(9, 7), torch.randn(3, 40, 9)),
        (nn.Embedding(9, 7, padding_idx=2), torch.randint(0, 9, (3, 20))),
        (nn.LayerNorm((3, 9)), torch.randn(3, 5, 3, 9)),
        (nn.RMSNorm(9), torch.randn(3, 5, 9)),
        (nn.GroupNorm(2, 6), torch.randn(3, 6, 5, 5)),
        (nn.Conv1d(6, 4, 3, stride=2, padding=1, groups=2), torch.randn(3, 6, 11)),
        (nn.Conv2d(6, 4, 2, stride=2, padding_mode="circular", padding=1), torch.randn(3, 6, 8, 8)),
    ]
    assert {type(layer) for layer, _ in cases} == set(NORM_SAMPLERS) == set(LAYERS)
    for layer, x in cases:
        layer, x = layer.double(), x.double() if x.is_floating_point() else x
        g = torch.randn_like(layer(x)).detach()
        ours = FlashNormSampler(workspace)(layer, [x], g)
        theirs = NORM_SAMPLERS[type(layer)](layer, [x], g, workspace.bytes)
        assert ours.keys() == theirs.keys()
        for parameter, norms in ours.items():
            torch.testing.assert_close(theirs[parameter], norms, rtol=1e-12, atol=0)
