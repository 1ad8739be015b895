# SPDX-License-Identifier: Apache-2.0
"""Opacus' per-sample gradients without the copy that Opacus makes of each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import opacus.grad_sample
import torch
from opacus.grad_sample import grad_sample_module, grad_sample_module_fast_gradient_clipping

_NAME = "create_or_accumulate_grad_sample"
_IMPORTED_BY: tuple[Any, ...] = (
    grad_sample_module,
    grad_sample_module_fast_gradient_clipping,
    opacus.grad_sample,
)


def adopt_grad_samples() -> Callable[[], None]:
    """Makes Opacus take what a grad sampler returns as ``p.grad_sample``.

    Opacus makes zeros of the same size and copies the result into them, so that backward holds the per-sample gradients
    of a layer twice. The copy is needed where a batch is padded (packed sequences) and where a parameter is used more
    than once in a forward pass: there it stays. The gradients have the same values. Models made private before are
    affected as well: Opacus looks the function up when it calls it.

    Returns:
        A function that restores what was there before.
    """
    copy = vars(grad_sample_module)[_NAME]

    def create_or_accumulate_grad_sample(*, param: Any, grad_sample: torch.Tensor, max_batch_len: int) -> None:
        complete = len(grad_sample) == max_batch_len and grad_sample.is_contiguous()
        is_only_use = getattr(param, "_forward_counter", 0) == 1 and not hasattr(param, "_current_grad_sample")
        if param.requires_grad and complete and is_only_use:
            param._current_grad_sample = grad_sample
        else:
            copy(param=param, grad_sample=grad_sample, max_batch_len=max_batch_len)

    for module in _IMPORTED_BY:
        setattr(module, _NAME, create_or_accumulate_grad_sample)

    def restore() -> None:
        for module in _IMPORTED_BY:
            setattr(module, _NAME, copy)

    return restore
