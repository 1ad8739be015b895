# SPDX-License-Identifier: Apache-2.0
"""flash_clip: exact per-sample clipping that never forms a T x T matrix. See docs/flash_clip.md.

``cost`` needs no torch. The names of this package are imported when they are first accessed.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from opacus_memprof.clipping.engine import FlashClipEngineMixin
    from opacus_memprof.clipping.grad_sample_copies import adopt_grad_samples
    from opacus_memprof.clipping.graphed import GraphedBackward
    from opacus_memprof.clipping.module import FlashClipHooks, GradSampleModuleFlashClip
    from opacus_memprof.clipping.norm_samplers import register_norm_samplers
    from opacus_memprof.clipping.opacus_functions import register, unregister
    from opacus_memprof.clipping.optimizer import DPOptimizerFlashClip
    from opacus_memprof.clipping.proof.verification import Verification, verify

_MODULES = {
    "DPOptimizerFlashClip": "optimizer",
    "FlashClipEngineMixin": "engine",
    "FlashClipHooks": "module",
    "GradSampleModuleFlashClip": "module",
    "GraphedBackward": "graphed",
    "adopt_grad_samples": "grad_sample_copies",
    "Verification": "proof.verification",
    "register": "opacus_functions",
    "register_norm_samplers": "norm_samplers",
    "unregister": "opacus_functions",
    "verify": "proof.verification",
}

__all__ = [
    "DPOptimizerFlashClip",
    "FlashClipEngineMixin",
    "FlashClipHooks",
    "GradSampleModuleFlashClip",
    "GraphedBackward",
    "Verification",
    "adopt_grad_samples",
    "register",
    "register_norm_samplers",
    "unregister",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(importlib.import_module(f"opacus_memprof.clipping.{_MODULES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
