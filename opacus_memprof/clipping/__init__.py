# SPDX-License-Identifier: Apache-2.0
"""flash_clip: exact per-sample clipping that never forms a T x T matrix. See docs/flash_clip.md.

Names are imported on first access. `clipping.cost`, which needs no torch, can therefore be imported without it.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from opacus_memprof.clipping.engine import FlashClipEngineMixin as FlashClipEngineMixin
    from opacus_memprof.clipping.graphed import GraphedBackward as GraphedBackward
    from opacus_memprof.clipping.modes import adopt_grad_samples as adopt_grad_samples
    from opacus_memprof.clipping.modes import register_norm_samplers as register_norm_samplers
    from opacus_memprof.clipping.module.hooks import FlashClipHooks as FlashClipHooks
    from opacus_memprof.clipping.module.hooks import GradSampleModuleFlashClip as GradSampleModuleFlashClip
    from opacus_memprof.clipping.opacus_functions import register as register
    from opacus_memprof.clipping.opacus_functions import unregister as unregister
    from opacus_memprof.clipping.optimizers.optimizer import DPOptimizerFlashClip as DPOptimizerFlashClip
    from opacus_memprof.clipping.verification import Verification as Verification
    from opacus_memprof.clipping.verification import verify as verify

_MODULES = {
    "DPOptimizerFlashClip": "optimizers.optimizer",
    "FlashClipEngineMixin": "engine",
    "FlashClipHooks": "module.hooks",
    "GradSampleModuleFlashClip": "module.hooks",
    "GraphedBackward": "graphed",
    "Verification": "verification",
    "adopt_grad_samples": "modes",
    "register": "opacus_functions",
    "register_norm_samplers": "modes",
    "unregister": "opacus_functions",
    "verify": "verification",
}
__all__ = list(_MODULES)


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(importlib.import_module(f"opacus_memprof.clipping.{_MODULES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
