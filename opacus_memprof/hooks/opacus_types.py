# SPDX-License-Identifier: Apache-2.0
"""The classes of Opacus that hooks tell apart, without importing Opacus: only the program imports it, or nobody does.

Before Opacus is imported, no object is an instance of them.
"""

import sys
from typing import TYPE_CHECKING, Any


class _OpacusType(type):
    """Stands for a class of Opacus in isinstance and issubclass."""

    module: str

    def __instancecheck__(cls, instance: Any) -> bool:
        real = find(cls.module, cls.__name__)
        return real is not None and isinstance(instance, real)

    def __subclasscheck__(cls, subclass: type) -> bool:
        real = find(cls.module, cls.__name__)
        return real is not None and issubclass(subclass, real)


def find(module: str, name: str) -> Any:
    """Returns what an imported module of Opacus calls `name`; None if it is not imported."""
    return getattr(sys.modules.get(module), name, None)


def is_imported() -> bool:
    """Returns whether the program has imported Opacus."""
    return find("opacus", "PrivacyEngine") is not None


if TYPE_CHECKING:
    from opacus import PrivacyEngine as PrivacyEngine
    from opacus.data_loader import DPDataLoader as DPDataLoader
    from opacus.distributed import (
        DifferentiallyPrivateDistributedDataParallel as DifferentiallyPrivateDistributedDataParallel,
    )
    from opacus.grad_sample import AbstractGradSampleHooks as AbstractGradSampleHooks
    from opacus.grad_sample import AbstractGradSampleModule as AbstractGradSampleModule
    from opacus.grad_sample import GradSampleHooks as GradSampleHooks
    from opacus.grad_sample import GradSampleHooksFastGradientClipping as GradSampleHooksFastGradientClipping
    from opacus.grad_sample import GradSampleHooksNoOp as GradSampleHooksNoOp
    from opacus.grad_sample import GradSampleModuleExpandedWeights as GradSampleModuleExpandedWeights
    from opacus.optimizers import DPOptimizer as DPOptimizer
    from opacus.optimizers import DPOptimizerFastGradientClipping as DPOptimizerFastGradientClipping
    from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping as DPLossFastGradientClipping
else:
    for _module, _names in {
        "opacus": ["PrivacyEngine"],
        "opacus.data_loader": ["DPDataLoader"],
        "opacus.distributed": ["DifferentiallyPrivateDistributedDataParallel"],
        "opacus.grad_sample": [
            "AbstractGradSampleHooks",
            "AbstractGradSampleModule",
            "GradSampleHooks",
            "GradSampleHooksFastGradientClipping",
            "GradSampleHooksNoOp",
            "GradSampleModuleExpandedWeights",
        ],
        "opacus.optimizers": ["DPOptimizer", "DPOptimizerFastGradientClipping"],
        "opacus.utils.fast_gradient_clipping_utils": ["DPLossFastGradientClipping"],
    }.items():
        for _name in _names:
            globals()[_name] = _OpacusType(_name, (), {"module": _module})
