# SPDX-License-Identifier: Apache-2.0
"""Refuses models that cannot be clipped exactly, and steps that no accountant would hear of."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from opacus_memprof.errors import MemprofError


def check_model(model: nn.Module) -> None:
    """Checks that the samples of a batch do not influence one another, as far as the types of layers tell.

    Raises:
        MemprofError: nothing is trainable; a layer normalizes over the batch; an embedding has options under which
            per-sample gradients do not exist.
    """
    for name, module in model.named_modules():
        mixes = isinstance(module, _BatchNorm) and not isinstance(module, _InstanceNorm)
        if module.training and (mixes or (isinstance(module, _InstanceNorm) and module.track_running_stats)):
            raise MemprofError(
                f"layer {name!r} ({type(module).__name__}) computes statistics of the whole batch, so that samples "
                "have no gradients of their own: replace it by GroupNorm (opacus.validators.ModuleValidator.fix does), "
                "or freeze it and call eval() on it before training."
            )
        if isinstance(module, nn.Embedding) and any(p.requires_grad for p in module.parameters(recurse=False)):
            _refuse_embedding_options(module, name)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise MemprofError("flash_clip found no trainable parameter: every parameter has requires_grad=False.")


def refuse_capture() -> None:
    """Raises MemprofError while a CUDA graph is captured on the current stream."""
    initialized = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    if initialized and torch.cuda.is_current_stream_capturing():
        raise MemprofError(
            "flash_clip cannot be captured in a CUDA graph: replays would go past the privacy accountant, and past the "
            "check that gradient norms are finite. Leave private training steps out of the capture, or have "
            "opacus_memprof.clipping.GraphedBackward capture what can be."
        )


def _refuse_embedding_options(module: nn.Embedding, name: str) -> None:
    for option in ("max_norm", "scale_grad_by_freq", "sparse"):
        if getattr(module, option):
            raise MemprofError(
                f"layer {name!r} (Embedding) has {option}={getattr(module, option)}, under which the samples of a "
                f"batch have no exact gradients of their own; build it without {option}."
            )
