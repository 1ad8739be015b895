# SPDX-License-Identifier: Apache-2.0
"""The noise of a step: the numbers that Opacus draws, without the zeros that it allocates beside them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from opacus.optimizers import optimizer as opacus_optimizer

from opacus_memprof.clipping.native import draw_normal
from opacus_memprof.clipping.workspace import batches


def add_noise(
    sums: Sequence[torch.Tensor], *, std: float, generator: torch.Generator | None, secure_mode: bool
) -> None:
    """Adds noise to every sum in place. Noise is drawn in the order of the sums, and several are added at once: as many
    as take no more memory than the largest sum's noise."""
    largest = max((total.nbytes for total in sums), default=0)
    for batch in batches(sums, largest, lambda total: total.nbytes):
        drawn = draw_noise(batch, std, generator, secure_mode)
        torch._foreach_add_(batch, drawn)
        del drawn  # before the next is drawn


def draw_noise(
    references: list[torch.Tensor], std: float, generator: torch.Generator | None, secure_mode: bool
) -> list[torch.Tensor]:
    """Noise of the shape, dtype and device of each reference, as ``_generate_noise`` of opacus.optimizers.optimizer
    draws it for one after the other."""
    if secure_mode or std == 0 or any(type(each) is not torch.Tensor for each in references):
        return [opacus_optimizer._generate_noise(std, each, generator, secure_mode) for each in references]
    return draw_normal(references, std, generator)
