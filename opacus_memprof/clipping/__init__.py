# SPDX-License-Identifier: Apache-2.0
"""flash_clip: exact per-sample clipping that never forms a T x T matrix. See docs/flash_clip.md.

``cost`` needs no torch; everything else is loaded when asked for.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from opacus_memprof.clipping.engine import FlashClipEngineMixin
    from opacus_memprof.clipping.module import FlashClipHooks, GradSampleModuleFlashClip
    from opacus_memprof.clipping.optimizer import DPOptimizerFlashClip
    from opacus_memprof.clipping.register import register_norm_samplers

_HOME = {
    "DPOptimizerFlashClip": "optimizer",
    "FlashClipEngineMixin": "engine",
    "FlashClipHooks": "module",
    "GradSampleModuleFlashClip": "module",
    "register_norm_samplers": "register",
}

__all__ = [
    "DPOptimizerFlashClip",
    "FlashClipEngineMixin",
    "FlashClipHooks",
    "GradSampleModuleFlashClip",
    "register_norm_samplers",
]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(f"opacus_memprof.clipping.{_HOME[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
