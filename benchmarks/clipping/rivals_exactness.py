# SPDX-License-Identifier: Apache-2.0
"""Whether a mode clips exactly: the update of a step without noise, on a small model, beside clipping by hand."""

from __future__ import annotations

import statistics
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from benchmarks.clipping.models import Config
from benchmarks.clipping.training_modes import adapt, prepare

EXACT = 1e-4  # transformers' normalization layers compute in float32
STABILITY = 1e-6  # in the factors min(1, bound / (norm + STABILITY)), as all of these have it


def exactness(mode: str, config: Config, device: torch.device, sharded: bool = False) -> dict[str, Any]:
    """Returns {"error", "dtype", "worst", "wrong", "parameters"} or {"failed"}.

    Computed in float64, or in float32 if the mode supports nothing wider. With ``sharded`` the model is sharded over
    all ranks, and each rank has a part of the batch.
    """
    for dtype in (torch.float64, torch.float32):
        try:
            errors = update_errors(mode, replace(config, dtype=dtype), device, sharded)
        except Exception as raised:
            failed = f"{type(raised).__name__}: {(str(raised).splitlines() or [''])[0][:160]}"
            continue
        worst = max(errors, key=lambda name: errors[name])
        return {
            "error": errors[worst],
            "dtype": str(dtype).removeprefix("torch."),
            "worst": worst,
            "wrong": sum(not error <= EXACT for error in errors.values()),  # NaN is wrong
            "parameters": len(errors),
        }
    return {"failed": failed}


def update_errors(mode: str, config: Config, device: torch.device, sharded: bool) -> dict[str, float]:
    """The largest difference of each parameter's update from that by hand, relative to its largest element."""
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if sharded else (0, 1)
    torch.manual_seed(0)
    with device:
        model = adapt(mode, config.build().to(device, config.dtype)).train()
    x, y = replace(config, batch=config.batch * ranks).inputs(device)
    norms, _ = gradients_by_hand(model, x, y, 1.0)
    bound = statistics.median_low(norms)  # so that some samples are clipped
    _, expected = gradients_by_hand(model, x, y, bound)
    if sharded:
        from benchmarks.clipping.rivals_sharded import shard  # imports what forks of Opacus may not have

        model = shard(mode, model)
    before = _parameters(model)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1.0)
    step, _ = prepare(mode, model, optimizer, len(x), noise_multiplier=0.0, max_grad_norm=bound)
    step(x.chunk(ranks)[rank], y.chunk(ranks)[rank])
    after = _parameters(model)
    smallest = 1e-6 * max(float(g.abs().max()) for g in expected.values())
    return {
        name: float((before[name] - after[name] - g).abs().max()) / max(float(g.abs().max()), smallest)
        for name, g in expected.items()
    }


def _parameters(model: nn.Module) -> dict[str, torch.Tensor]:
    """Copies of the trained parameters, whole where they are sharded."""
    trained: dict[str, Any] = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
    # On one rank full_tensor() returns the parameter's own memory.
    return {n: (p.full_tensor() if hasattr(p, "full_tensor") else p).clone() for n, p in trained.items()}


def gradients_by_hand(
    model: nn.Module, x: torch.Tensor, y: torch.Tensor, bound: float
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """(norms, means of clipped gradients by parameter), one sample at a time."""
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    total, norms = {name: torch.zeros_like(p) for name, p in trained.items()}, []
    for n in range(len(x)):
        loss = functional.cross_entropy(model(x[n : n + 1]).flatten(0, -2), y[n : n + 1].flatten())
        gradients = torch.autograd.grad(loss, list(trained.values()), allow_unused=True, materialize_grads=True)
        norms.append(sum(float(g.square().sum()) for g in gradients) ** 0.5)
        for name, g in zip(trained, gradients, strict=True):
            total[name] += g * (min(1.0, bound / (norms[-1] + STABILITY)) / len(x))
    return norms, total
