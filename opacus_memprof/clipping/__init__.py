# SPDX-License-Identifier: Apache-2.0
"""flash_clip: exact per-sample clipping that never forms a T x T matrix. See docs/flash_clip.md.

`cost` needs no torch. The names of this package are imported when they are first accessed.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from opacus_memprof.clipping.engine import FlashClipEngineMixin as FlashClipEngineMixin
    from opacus_memprof.clipping.grad_sample_copies import adopt_grad_samples as adopt_grad_samples
    from opacus_memprof.clipping.graphed import GraphedBackward as GraphedBackward
    from opacus_memprof.clipping.module import FlashClipHooks as FlashClipHooks
    from opacus_memprof.clipping.module import GradSampleModuleFlashClip as GradSampleModuleFlashClip
    from opacus_memprof.clipping.norm_samplers import register_norm_samplers as register_norm_samplers
    from opacus_memprof.clipping.opacus_functions import register as register
    from opacus_memprof.clipping.opacus_functions import unregister as unregister
    from opacus_memprof.clipping.optimizer import DPOptimizerFlashClip as DPOptimizerFlashClip
    from opacus_memprof.clipping.proof.verification import Verification as Verification
    from opacus_memprof.clipping.proof.verification import verify as verify

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
__all__ = [*_MODULES]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(importlib.import_module(f"opacus_memprof.clipping.{_MODULES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
