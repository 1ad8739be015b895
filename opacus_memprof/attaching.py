# SPDX-License-Identifier: Apache-2.0
"""Which hooks go with which object that a program hands to `Session.attach`. Importing this loads Opacus."""

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


def is_engine(thing: Any) -> bool:
    """Whether it is Opacus' PrivacyEngine, the class or one of its instances."""
    return isinstance(thing, PrivacyEngine) or (isinstance(thing, type) and issubclass(thing, PrivacyEngine))


def attach_engines() -> hooks.Attachment:
    """Attaches what any PrivacyEngine's make_private returns from now on."""
    return hooks.attach_privacy_engine_class()


def attach(thing: Any) -> hooks.Attachment | None:
    """Attaches a model or an optimizer; None for what needs nothing, a criterion or a data loader.

    Raises:
        MemprofError: it is something else.
    """
    if isinstance(thing, (DataLoader, DPLossFastGradientClipping, _Loss)):
        return None
    if isinstance(thing, Optimizer):
        return hooks.attach_optimizer(thing)
    if isinstance(thing, (nn.Module, AbstractGradSampleHooks)):
        return hooks.attach_model(thing)
    raise MemprofError(f"cannot attach a {type(thing).__name__}: pass a PrivacyEngine, a model or an optimizer")
