# SPDX-License-Identifier: Apache-2.0
"""Chooses the hooks for an object that a program passes to `Session.attach`, by its type. Importing this loads
Opacus."""

from typing import Any

from opacus import PrivacyEngine
from opacus.grad_sample import AbstractGradSampleHooks
from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping
from torch import nn
from torch.nn.modules.loss import _Loss
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from opacus_memprof import hooks
from opacus_memprof.errors import MemprofError

attach_privacy_engine_class = hooks.attach_privacy_engine_class


def is_privacy_engine(target: Any) -> bool:
    """Whether `target` is Opacus' PrivacyEngine: the class, a subclass, or an instance."""
    return isinstance(target, PrivacyEngine) or (isinstance(target, type) and issubclass(target, PrivacyEngine))


def attach(target: Any) -> hooks.Attachment | None:
    """Attaches a model or an optimizer. Returns None for a criterion or a data loader, which need no hooks.

    Raises:
        MemprofError: `target` is of another type.
    """
    if isinstance(target, (DataLoader, DPLossFastGradientClipping, _Loss)):
        return None
    if isinstance(target, Optimizer):
        return hooks.attach_optimizer(target)
    if isinstance(target, (nn.Module, AbstractGradSampleHooks)):
        return hooks.attach_model(target)
    raise MemprofError(f"cannot attach a {type(target).__name__}: pass a PrivacyEngine, a model or an optimizer")
