# SPDX-License-Identifier: Apache-2.0
"""Measures one configuration in the modes of one library: first whether each clips exactly, then time and peak, all
modes and training without privacy interleaved in this process. Prints one JSON object a line as results come."""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from clipping_models import Config
from clipping_worker import Bench, run_rounds
from rivals_models import CONFIGS
from torch import nn
from torch.nn import functional
from training_modes import FASTDP, FLASHNORM, adapt, prepare

EXACT = 1e-4  # transformers' normalization layers compute in float32
STABILITY = 1e-6  # in the factors min(1, bound / (norm + STABILITY)), as all of these have it


class RivalBench(Bench):
    """Libraries of others change models in place: they get a new one for each visit."""

    def wrap(self, mode: str) -> tuple[Callable[[], None], Callable[[], None]]:
        if mode not in FASTDP and mode not in FLASHNORM:
            return super().wrap(mode)
        self.renew(mode)
        step, _ = super().wrap(mode)
        return step, lambda: self.renew("vanilla")

    def renew(self, mode: str) -> None:
        """Makes another model when the last one has gone."""
        del self.model, self.optimizer
        gc.collect()
        self.make_model(mode)


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


def update_errors(mode: str, config: Config, device: torch.device) -> dict[str, float]:
    """The largest difference of each parameter's update, in a step of SGD without noise, from that by hand, relative to
    its largest element."""
    torch.manual_seed(0)
    with device:
        model = adapt(mode, config.build().to(device, config.dtype)).train()
    x, y = config.inputs(device)
    norms, _ = gradients_by_hand(model, x, y, 1.0)
    bound = statistics.median_low(norms)  # so that some samples are clipped
    _, expected = gradients_by_hand(model, x, y, bound)
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    before = {name: p.detach().clone() for name, p in parameters.items()}
    optimizer = torch.optim.SGD(list(parameters.values()), lr=1.0)
    step, _ = prepare(mode, model, optimizer, len(x), noise_multiplier=0.0, max_grad_norm=bound)
    step(x, y)
    smallest = 1e-6 * max(float(g.abs().max()) for g in expected.values())
    return {
        name: float((before[name] - parameters[name].detach() - g).abs().max()) / max(float(g.abs().max()), smallest)
        for name, g in expected.items()
    }


def exactness(mode: str, config: Config, device: torch.device) -> dict[str, Any]:
    """{"error", "dtype", "worst", "wrong", "parameters"} or {"failed"}: in float64, or in float32 where the mode knows
    nothing wider."""
    for dtype in (torch.float64, torch.float32):
        try:
            errors = update_errors(mode, replace(config, dtype=dtype), device)
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("config", choices=[c.name for c in CONFIGS])
    parser.add_argument("--modes", nargs="+", required=True)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--precision", default="high")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_float32_matmul_precision(arguments.precision)
    device = torch.device("cuda" if torch.cuda.is_available() and not arguments.tiny else "cpu")
    found = next(c for c in CONFIGS if c.name == arguments.config)
    for mode in arguments.modes:
        if mode != "vanilla":
            print(json.dumps({"mode": mode, "exactness": exactness(mode, found.small, device)}), flush=True)
    run_rounds(
        RivalBench(found.small if arguments.tiny else found.config, device),
        arguments.modes,
        arguments.seconds,
        arguments.rounds,
    )


if __name__ == "__main__":
    main()
