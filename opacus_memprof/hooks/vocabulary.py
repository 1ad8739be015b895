# SPDX-License-Identifier: Apache-2.0
"""Names that hooks distinguish: ids of categories and phases, as csrc/core/vocabulary.h has them, and Opacus' classes.

Opacus is not imported: only the program imports it, or nobody does. Before that, no object is an instance of its
classes.
"""

import sys
from typing import TYPE_CHECKING, Any, Final

from opacus_memprof.recording import native

UNATTRIBUTED: Final = native.category_id("unattributed")
MODEL_PARAMETERS: Final = native.category_id("model_parameters")
BUFFERS: Final = native.category_id("buffers")
GRADIENTS: Final = native.category_id("gradients")
OPTIMIZER_STATES: Final = native.category_id("optimizer_states")
PER_SAMPLE_GRADIENTS: Final = native.category_id("per_sample_gradients")
NORM_SAMPLES: Final = native.category_id("norm_samples")
TEMP_MATRICES: Final = native.category_id("temp_matrices")
CLIPPING_TEMPORARIES: Final = native.category_id("clipping_temporaries")
SUMMED_GRADIENTS: Final = native.category_id("summed_gradients")
NOISE: Final = native.category_id("noise")
BACKPROP_COPIES: Final = native.category_id("backprop_copies")
COMMUNICATION: Final = native.category_id("communication")
INPUTS: Final = native.category_id("inputs")
FORWARD_UNDECIDED: Final = native.category_id("forward_undecided")
BACKWARD_TEMPORARIES: Final = native.category_id("backward_temporaries")
OPTIMIZER_TEMPORARIES: Final = native.category_id("optimizer_temporaries")
DATASET: Final = native.category_id("dataset")  # not one of the core's built-in categories

IDLE: Final = native.phase_id("idle")
SETUP: Final = native.phase_id("setup")
FORWARD: Final = native.phase_id("forward")
CLIP: Final = native.phase_id("clip")
ADD_NOISE: Final = native.phase_id("noise")
OPTIMIZER_STEP: Final = native.phase_id("optimizer_step")
ZERO_GRAD: Final = native.phase_id("zero_grad")


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
