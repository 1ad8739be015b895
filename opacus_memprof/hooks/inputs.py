# SPDX-License-Identifier: Apache-2.0
"""What a step is given: the batches that a DataLoader yields, the data set that they come from if that is in the
profiled memory, the model's arguments, and the targets of losses.

Where a loop moves its labels is a line of the user's that nobody can wrap; what a loss compares with is known. torch's
losses are wrapped below `torch.nn.functional`, in the built-in functions that those call: the public functions stay the
very objects that others have imported, inspect, pickle, script, and dispatch on.
"""

import functools
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import torch
from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping
from torch import Tensor
from torch.compiler import is_compiling
from torch.jit import _builtins
from torch.utils.data import ConcatDataset, Subset, dataloader

from opacus_memprof import _native
from opacus_memprof.hooks.attach import Attachment
from opacus_memprof.hooks.vocabulary import DATASET, FORWARD_UNDECIDED, UNATTRIBUTED

_UNCLAIMED = (UNATTRIBUTED, FORWARD_UNDECIDED)

# By where torch.nn.functional looks them up; of all of these the target is the second argument.
_LOSSES: dict[ModuleType, tuple[str, ...]] = {
    torch._C._nn: (
        "binary_cross_entropy",
        "cross_entropy_loss",
        "huber_loss",
        "l1_loss",
        "mse_loss",
        "multi_margin_loss",
        "multilabel_margin_loss",
        "nll_loss_nd",
        "smooth_l1_loss",
        "soft_margin_loss",
    ),
    torch: (
        "binary_cross_entropy_with_logits",
        "ctc_loss",
        "hinge_embedding_loss",
        "kl_div",
        "poisson_nll_loss",
    ),
}


def tag_dataset(dataset: Any) -> None:
    """The tensors that a data set has as attributes, as TensorDataset and torchvision's have, get a category of their
    own: unlike inputs, they do not grow with the batch."""
    if kept := [tensor for tensor in _tensors_of(dataset) if not tensor.requires_grad]:
        _native.retag_if(kept, _UNCLAIMED, DATASET)


def _tensors_of(dataset: Any) -> Iterator[Tensor]:
    if isinstance(dataset, Subset):
        yield from _tensors_of(dataset.dataset)
    elif isinstance(dataset, ConcatDataset):
        for part in dataset.datasets:
            yield from _tensors_of(part)
    else:
        for value in tuple(getattr(dataset, "__dict__", {}).values()):
            if isinstance(value, (Tensor, tuple)):  # a list may have an item for each sample
                yield from _native.tensors_in(value)


def follow_batches(attachment: Attachment) -> None:
    """On the classes: iterators and losses are objects of their own."""
    iterator: Any = dataloader._BaseDataLoaderIter
    attachment.replace_attribute(iterator, "__init__", _drawing(iterator.__init__))
    attachment.replace_attribute(iterator, "__next__", _yielding(iterator.__next__))
    attachment.replace_attribute(DPLossFastGradientClipping, "__call__", _judging(DPLossFastGradientClipping.__call__))
    attachment.on_detach(_forget_rules)
    for module, names in _LOSSES.items():
        for name in names:
            attachment.replace_attribute(module, name, _comparing(attachment, vars(module)[name]))


def _drawing(begin: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(begin)
    def wrapper(self: Any, loader: Any) -> None:
        tag_dataset(loader.dataset)
        begin(self, loader)

    return wrapper


def _yielding(next_batch: Callable[[Any], Any]) -> Callable[[Any], Any]:
    @functools.wraps(next_batch)
    def wrapper(self: Any) -> Any:
        batch = next_batch(self)
        _native.tag_inputs((batch,))
        return batch

    return wrapper


def _judging(call: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(call)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        for target in _native.tensors_in((args[1:], kwargs)):
            _native.tag_target(target)
        return call(self, *args, **kwargs)

    return wrapper


def _comparing(attachment: Attachment, loss: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(loss)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if not is_compiling():
            _native.tag_target(args[1] if len(args) > 1 else kwargs.get("target"))
        return loss(*args, **kwargs)

    scriptable = _builtins._get_builtin_table()  # type: ignore[no-untyped-call]  # by identity
    scriptable[id(wrapper)] = scriptable[id(loss)]
    attachment.on_detach(functools.partial(scriptable.pop, id(wrapper)))
    return wrapper


def _forget_rules() -> None:
    """torch.compile, too, knows built-in functions by identity: those that it finds at its first use."""
    if (rules := sys.modules.get("torch._dynamo.trace_rules")) is not None:
        rules.clear_lru_cache()
