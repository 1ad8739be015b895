# SPDX-License-Identifier: Apache-2.0
"""Leaves contexts of the program that a proof must not run in."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch


def without_compiled_autograd() -> AbstractContextManager[Any]:
    """Inside, backward is not compiled: what a proof follows cannot be."""
    compiled: Any = sys.modules.get("torch._dynamo.compiled_autograd")
    return nullcontext() if compiled is None else compiled._disable()


@contextmanager
def without_saved_tensors_hooks() -> Iterator[None]:
    """Inside, autograd saves tensors as they are: a checkpoint around the model would take those of a proof for its
    own."""
    autograd: Any = torch._C._autograd
    hooks = []
    while (top := autograd._top_saved_tensors_default_hooks(False)) is not None:
        hooks.append(top)
        autograd._pop_saved_tensors_default_hooks()
    try:
        yield
    finally:
        for pack, unpack in reversed(hooks):
            autograd._push_saved_tensors_default_hooks(pack, unpack)
