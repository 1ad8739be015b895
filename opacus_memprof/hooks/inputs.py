# SPDX-License-Identifier: Apache-2.0
"""What a step begins with: the batches that a DataLoader yields, the model's arguments, and the targets of a criterion
that Opacus wraps."""

import functools
from collections.abc import Callable
from typing import Any

from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping
from torch import Tensor
from torch.utils.data import dataloader

from opacus_memprof import _native
from opacus_memprof.hooks.attach import Attachment
from opacus_memprof.hooks.tensors import tensors_in
from opacus_memprof.hooks.vocabulary import FORWARD_UNDECIDED, INPUTS, UNATTRIBUTED

_UNCLAIMED = (UNATTRIBUTED, FORWARD_UNDECIDED)


def tag_inputs(batch: Any) -> list[Tensor]:
    """The tensors in nested sequences and mappings that nobody has computed from parameters become inputs, where their
    blocks have no other category. Returns them."""
    leaves = [tensor for tensor in tensors_in(batch) if tensor.grad_fn is None and not tensor.requires_grad]
    if leaves:
        _native.retag_if(leaves, _UNCLAIMED, INPUTS)
    return leaves


def follow_batches(attachment: Attachment) -> None:
    """On the classes: iterators and losses are objects of their own."""
    iterator: Any = dataloader._BaseDataLoaderIter
    attachment.replace_attribute(iterator, "__next__", _yielding(iterator.__next__))
    attachment.replace_attribute(DPLossFastGradientClipping, "__call__", _judging(DPLossFastGradientClipping.__call__))


def _yielding(next_batch: Callable[[Any], Any]) -> Callable[[Any], Any]:
    @functools.wraps(next_batch)
    def wrapper(self: Any) -> Any:
        batch = next_batch(self)
        tag_inputs(batch)
        return batch

    return wrapper


def _judging(call: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(call)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        tag_inputs((args, kwargs))
        return call(self, *args, **kwargs)

    return wrapper
