# SPDX-License-Identifier: Apache-2.0
"""Clipping done by hand, one sample at a time through plain autograd: the oracle of the clipping tests."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from opacus_memprof.clipping import DPOptimizerFlashClip, GradSampleModuleFlashClip

Batch = dict[str, torch.Tensor]
Forward = Callable[[nn.Module, Batch], torch.Tensor]
"""A sample's losses, [B], of a model and a batch."""


def by_hand(model: nn.Module, batch: Batch, losses: Forward, bound: float) -> tuple[list[float], dict[str, Any]]:
    """The norms, and the sum of clipped gradients by parameter, of the sum of losses."""
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    total = {name: torch.zeros_like(p) for name, p in trained.items()}
    norms = []
    for n in range(len(next(iter(batch.values())))):
        loss = losses(model, {key: value[n : n + 1] for key, value in batch.items()}).sum()
        model.zero_grad()
        loss.backward()
        found = [p.grad for p in trained.values()]
        norm = torch.stack([g.square().sum() for g in found if g is not None]).sum().sqrt()
        factor = min(1.0, bound / (float(norm) + 1e-6))
        norms.append(float(norm))
        for name, g in zip(trained, found, strict=True):
            if g is not None:
                total[name] += factor * g
    model.zero_grad()
    return norms, total


def by_flash_clip(
    model: nn.Module, batch: Batch, losses: Forward, bound: float, **options: Any
) -> tuple[list[float], dict[str, Any]]:
    """The same of a copy of the model, by flash_clip."""
    copied = copy.deepcopy(model)
    module = GradSampleModuleFlashClip(copied, loss_reduction="sum", max_grad_norm=bound, **options)
    parameters = [p for p in copied.parameters() if p.requires_grad]
    optimizer = DPOptimizerFlashClip(
        torch.optim.SGD(parameters, lr=0.1),
        module=module,
        noise_multiplier=0.0,
        max_grad_norm=bound,
        expected_batch_size=1,
        loss_reduction="sum",
    )
    losses(module, batch).sum().backward()
    optimizer.pre_step()
    return module.per_sample_gradient_norms.tolist(), {
        name: p.grad for name, p in copied.named_parameters() if p.requires_grad
    }


def difference(model: nn.Module, batch: Batch, losses: Forward, **options: Any) -> float:
    """The largest relative difference of the norms and of any parameter's clipped gradient.

    The bound is the median of the norms, so that half of the samples are clipped.
    """
    norms, _ = by_hand(model, batch, losses, 1.0)
    bound = sorted(norms)[len(norms) // 2]
    _, expected = by_hand(model, batch, losses, bound)
    found_norms, found = by_flash_clip(model, batch, losses, bound, **options)
    worst = max(abs(a - b) / max(b, 1e-9 * max(norms)) for a, b in zip(found_norms, norms, strict=True))
    scale = max(float(each.abs().max()) for each in expected.values())
    assert scale > 0
    assert found.keys() == expected.keys()
    for name, each in expected.items():
        worst = max(worst, float((found[name] - each).abs().max()) / max(float(each.abs().max()), 1e-6 * scale))
    return worst
