# SPDX-License-Identifier: Apache-2.0
"""Finds the flash_clip module of a parameter, for optimizers that are made from parameters alone."""

import weakref
from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from opacus_memprof.errors import MemprofError

_OWNERS: Any = WeakTensorKeyDictionary()  # parameter -> weak reference to its hooks, which hold the parameter


def remember_owner(hooks: Any, parameters: Iterable[nn.Parameter]) -> None:
    """Records that these parameters belong to the model with these FlashClipHooks, replacing earlier records."""
    reference = weakref.ref(hooks)
    for parameter in parameters:
        _OWNERS[parameter] = reference


def find_owner(parameters: Iterable[nn.Parameter]) -> Any:
    """Returns the FlashClipHooks of the model that all these parameters belong to.

    Raises:
        MemprofError: they belong to none or to several models, or the hooks were removed.
    """
    owners: list[Any] = []
    strangers = []
    for parameter in parameters:
        reference = _OWNERS.get(parameter)
        hooks = reference() if reference is not None else None
        if hooks is None or not hooks.autograd_grad_sample_hooks:
            strangers.append(parameter)
        elif not any(hooks is each for each in owners):
            owners.append(hooks)
    if not owners:
        raise MemprofError(
            "the optimizer's parameters belong to no flash_clip module: call wrap_model(model, 'flash_clip', ...) "
            "first, and make the optimizer from the parameters of that model."
        )
    if strangers:
        raise MemprofError(
            f"{len(strangers)} of the optimizer's parameters, the first of shape {list(strangers[0].shape)}, do not "
            "belong to the flash_clip module of the others: give them another optimizer, or make the model that "
            "contains all of them private."
        )
    if len(owners) > 1:
        raise MemprofError(
            f"the optimizer's parameters belong to {len(owners)} flash_clip modules, but a sample's gradient is "
            "clipped as a whole: wrap one model that contains them all."
        )
    return owners[0]
