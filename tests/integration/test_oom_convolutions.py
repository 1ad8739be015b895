# SPDX-License-Identifier: Apache-2.0
"""After convolutions ran out of memory under hooks, flash_clip's predicted peak is the measured one.

The session measures the same training with flash_clip.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from tests.planted_models import images
from tests.planted_oom import Changes, Plan, train

SECOND = {  # behind a convolution of 16 channels
    "kernel 3": lambda: nn.Conv2d(16, 16, 3, padding=1),
    "kernel 7": lambda: nn.Conv2d(16, 16, 7, padding=3),
    "no padding, no bias": lambda: nn.Conv2d(16, 24, 5, bias=False),
    "stride": lambda: nn.Conv2d(16, 32, 3, stride=2, padding=1),
    "groups": lambda: nn.Conv2d(16, 32, 3, padding=1, groups=4),
    "1x1": lambda: nn.Conv2d(16, 32, 1),
    "depthwise": lambda: nn.Conv2d(16, 16, 3, padding=1, groups=16),
}


def small(second: nn.Conv2d) -> nn.Module:
    layers = [nn.Conv2d(3, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.ReLU(), second, nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(16 * second.out_channels, 10))


class InvertedResidual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        wide = 4 * channels
        self.branch = nn.Sequential(
            *(nn.Conv2d(channels, wide, 1), nn.GroupNorm(4, wide), nn.SiLU()),
            *(nn.Conv2d(wide, wide, 3, padding=1, groups=wide), nn.GroupNorm(4, wide), nn.SiLU()),
            *(nn.Conv2d(wide, channels, 1), nn.GroupNorm(4, channels)),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.branch(x)


def residual() -> nn.Module:
    blocks = [nn.Conv2d(3, 16, 3, stride=2, padding=1), InvertedResidual(16), InvertedResidual(16)]
    return nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(64, 10))


def deep() -> nn.Module:
    """Few positions at its end, whose pairs are smaller than per-sample gradients: the peak is in clipping."""
    convolutions = [nn.Conv2d(3, 64, 3, stride=4, padding=1), nn.ReLU(), nn.Conv2d(64, 128, 3, stride=2, padding=1)]
    features = nn.Sequential(*convolutions, nn.ReLU(), nn.AdaptiveAvgPool2d(2))
    return nn.Sequential(features, nn.Flatten(), nn.Linear(512, 10))


SIZES = {"length": 32, "out": 10, "batch": 8}
PLANS = [
    *(Plan(name, lambda _, second=second: small(second()), images, SIZES, {}) for name, second in SECOND.items()),
    Plan("pairs", lambda _: deep(), images, {"length": 48, "out": 10, "batch": 24}, {}),
    Plan("residual", lambda _: residual(), images, SIZES, {}),
]


@pytest.mark.usefixtures("clean_process")
@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_the_peak_under_flash_clip(plan: Plan, tmp_path: Path) -> None:
    measured = train(plan, "cpu", tmp_path / "flash_clip", changes=Changes(mode="flash_clip")).peak
    failed = train(plan, "cpu", tmp_path / "failed", measured)  # hooks need more
    assert failed.report is not None
    wanted = [{"kind": "grad_sample_mode", "value": "flash_clip"}]
    predicted = next(
        suggestion["predicted_peak_bytes"]
        for suggestion in failed.report["suggestions"]
        if suggestion["actions"] == wanted
    )
    assert predicted == pytest.approx(measured, rel=0.05)
