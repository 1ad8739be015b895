# SPDX-License-Identifier: Apache-2.0
"""Compares the noise of a logical step with the requested standard deviation."""

import math

import torch
from torch import nn

from opacus_memprof.loop_check.records import Findings, LogicalStep, listed

_SIGMAS = 6.0  # of the measured standard deviation
_FEWEST = 64  # elements of a parameter whose standard deviation is compared separately


def check_noise(
    step: LogicalStep, trained: dict[str, nn.Parameter], findings: Findings
) -> tuple[float | None, torch.Tensor]:
    """Compares the noise with the requested standard deviation, in each parameter and over all.

    Args:
        step: the recorded sums with and without noise.
        trained: the parameters.
        findings: receives the defects and notes.

    Returns:
        The standard deviation relative to the requested one, None if unknown; and a part of the noise.
    """
    if step.std == 0:
        findings.not_checked("noise, because noise_multiplier is 0: the training is not private.")
        return None, torch.empty(0)
    rests = {}
    for name, p in trained.items():
        noised, summed = step.noised.get(id(p)), step.summed.get(id(p))
        if noised is not None and summed is not None:
            rests[name] = noised.double() - summed.double().reshape(noised.shape)
    if not rests:
        findings.not_checked("noise, because the clipped sum without it is not known.")
        return None, torch.empty(0)
    without = [name for name, rest in rests.items() if not bool(rest.any())]
    if without:
        findings.defect(
            f"No noise is added to {listed(without)}, although the optimizer asks for a standard deviation of "
            f"{step.std:.4g}.",
            "no noise",
        )
    off = {}
    for name, rest in rests.items():
        total = step.noised[id(trained[name])]
        rounding = torch.finfo(total.dtype).eps * float(total.double().square().mean().sqrt()) / step.std
        ratio = math.sqrt(float(rest.square().mean())) / step.std
        allowed = _SIGMAS / math.sqrt(2 * rest.numel()) + rounding
        if rest.numel() >= _FEWEST and name not in without and abs(ratio - 1) > allowed:
            off[name] = ratio
    count = sum(rest.numel() for rest in rests.values())
    measured = math.sqrt(sum(float(rest.square().sum()) for rest in rests.values()) / count) / step.std
    asked = (
        f"The noise has not the standard deviation that was asked for, {step.std:.4g} (noise_multiplier times bound)"
    )
    if off:
        worst = max(off, key=lambda name: abs(off[name] - 1))
        more = f", and {len(off) - 1} more parameters are off" if len(off) > 1 else ""
        findings.defect(f"{asked}: in {worst} it is {off[worst]:.3g} times that{more}.", "noise")
    elif not without and abs(measured - 1) > _SIGMAS / math.sqrt(2 * count) + 1e-2:
        findings.defect(f"{asked}: over all parameters it is {measured:.3g} times that.", "noise")
    largest = max(rests, key=lambda name: rests[name].numel())
    return measured, rests[largest].flatten()[:10_000] / step.std
