# SPDX-License-Identifier: Apache-2.0
"""Checks the noise of an optimizer: a step without gradients must have the requested standard deviation."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

_FEWEST_DRAWS = 512  # for each parameter, unless the model is so large that this would take long
_MOST_DRAWS = 50_000_000  # for all parameters together
_MOST_SIGMAS = 6.0  # 2 in 10^9 draws are outside of this range


def measure_noise(optimizer: Any, names: Mapping[nn.Parameter, str], std: float) -> tuple[dict[str, float], str | None]:
    """Draws an optimizer's noise several times, added to sums that are zero.

    Args:
        optimizer: a DPOptimizer with loss_reduction="sum", whose `p.summed_grad` may be replaced.
        names: the parameters that must get noise.
        std: the requested standard deviation.

    Returns:
        Each parameter's standard deviation divided by `std`, and a description of a defect, or None.
    """
    elements = sum(parameter.numel() for parameter in names)
    smallest = min(parameter.numel() for parameter in names)
    repeats = max(2, min(-(-_FEWEST_DRAWS // smallest), _MOST_DRAWS // max(elements, 1)))
    drawn: dict[nn.Parameter, list[torch.Tensor]] = {parameter: [] for parameter in names}
    for _ in range(repeats):
        for parameter in optimizer.params:
            parameter.summed_grad = torch.zeros_like(parameter)
            parameter.grad = None
        optimizer.add_noise()
        for parameter, kept in drawn.items():
            if sum(map(len, kept)) < 10 * _FEWEST_DRAWS or len(kept) < 2:
                noise = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                kept.append(noise.detach().double().flatten().cpu() / std)
    draws = {names[parameter]: each for parameter, each in drawn.items()}
    stds = {name: float(torch.cat(each).square().mean().sqrt()) for name, each in draws.items()}
    return stds, _dependent(draws) or _wrong_size(draws, std)


def _wrong_size(draws: Mapping[str, list[torch.Tensor]], std: float) -> str | None:
    for name, each in draws.items():
        joined = torch.cat(each)
        count, square = len(joined), float(joined.square().mean())
        # The cube root of a chi-square variable is close to normal (Wilson and Hilferty 1931).
        spread = math.sqrt(2 / (9 * count))
        sigmas = (square ** (1 / 3) - 1 + spread**2) / spread
        if not abs(sigmas) <= _MOST_SIGMAS:
            return (
                f"the noise of {name} has a standard deviation of {math.sqrt(square) * std:.3g}, but {std:.3g} was "
                f"asked for ({count} draws)"
            )
        if not abs(float(joined.mean())) * math.sqrt(count) <= _MOST_SIGMAS:
            return f"the noise of {name} has a mean of {float(joined.mean()) * std:.3g} instead of 0 ({count} draws)"
    return None


def _dependent(draws: Mapping[str, list[torch.Tensor]]) -> str | None:
    """Returns which parameters' noise is correlated with earlier noise, or None.

    Compares each parameter's noise with that of the previous step, of the previous parameter, and of the first
    parameter of the same size. Generators with equal seeds draw equal numbers.
    """
    first_of_size: dict[int, str] = {}
    previous: str | None = None
    for name, each in draws.items():
        if _is_correlated(each[:-1], each[1:]):
            return f"the noise of {name} repeats that of the step before"
        for other in {previous, first_of_size.setdefault(len(each[0]), name)} - {None, name}:
            if _is_correlated(each, draws[other]):  # type: ignore[index]
                return f"the noise of {name} is not independent of that of {other}"
        previous = name
    return None


def _is_correlated(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    size = min(len(a[0]), len(b[0]))
    pairs = list(zip(a, b, strict=False))  # one parameter may have fewer draws
    x, y = (torch.cat([pair[side][:size] for pair in pairs]) for side in (0, 1))
    sizes = float(x.norm() * y.norm())
    # With fewer draws the tails are longer than the normal distribution's.
    return sizes > 0 and len(x) >= _FEWEST_DRAWS / 2 and abs(float(x @ y)) / sizes * math.sqrt(len(x)) > _MOST_SIGMAS
