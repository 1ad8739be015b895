# SPDX-License-Identifier: Apache-2.0
"""The noise of a step: the numbers that Opacus draws, without the zeros that it allocates beside them."""

from __future__ import annotations

import torch
from opacus.optimizers import optimizer as opacus_optimizer


def draw_noise(
    std: float, reference: torch.Tensor, generator: torch.Generator | None, secure_mode: bool
) -> torch.Tensor:
    """Noise of the shape, dtype and device of ``reference``, as ``_generate_noise`` of opacus.optimizers.optimizer."""
    if secure_mode or std == 0 or type(reference) is not torch.Tensor:
        noise: torch.Tensor = opacus_optimizer._generate_noise(std, reference, generator, secure_mode)
        return noise
    return torch.normal(
        mean=0,
        std=std,
        size=reference.shape,
        generator=generator,
        dtype=reference.dtype,
        device=reference.device,
    )
