# SPDX-License-Identifier: Apache-2.0
"""Chooses the hooks for an object that a program passes to `Session.attach`, by its type. Importing this loads
Opacus."""

from collections.abc import Callable
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


def is_privacy_engine(target: Any) -> bool:
    """Whether `target` is Opacus' PrivacyEngine: the class, a subclass, or an instance."""
    return isinstance(target, PrivacyEngine) or (isinstance(target, type) and issubclass(target, PrivacyEngine))


def change_for(target: Any) -> Callable[[hooks.Attachment], None]:
    """The change that follows `target`: a PrivacyEngine, which stands for all, a model or an optimizer. A criterion and
    a data loader need none.

    Raises:
        MemprofError: `target` is of another type.
    """
    if isinstance(target, (DataLoader, DPLossFastGradientClipping, _Loss)):
        return lambda attachment: None
    if is_privacy_engine(target):
        return hooks.follow_privacy_engines
    if isinstance(target, Optimizer):
        return lambda attachment: hooks.follow_optimizer(attachment, target)
    if isinstance(target, (nn.Module, AbstractGradSampleHooks)):
        return lambda attachment: hooks.follow_model(attachment, target)
    raise MemprofError(f"cannot attach a {type(target).__name__}: pass a PrivacyEngine, a model or an optimizer")
