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
from torch.jit import _builtins
from torch.utils.data import ConcatDataset, Subset, dataloader

from opacus_memprof import _native
from opacus_memprof.hooks.attach import Attachment
from opacus_memprof.hooks.tensors import tensors_in
from opacus_memprof.hooks.vocabulary import DATASET, FORWARD_UNDECIDED, INPUTS, UNATTRIBUTED

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


def tag_inputs(batch: Any) -> list[Tensor]:
    """The tensors in nested sequences and mappings that nobody has computed from parameters become inputs, where their
    blocks have no other category. Returns them."""
    leaves = [tensor for tensor in tensors_in(batch) if tensor.grad_fn is None and not tensor.requires_grad]
    if leaves:
        _native.retag_if(leaves, _UNCLAIMED, INPUTS)
    return leaves


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
                yield from tensors_in(value)


def _tag_target(target: Any) -> None:
    """What a loss compares with becomes inputs, unless it was computed from parameters, or made in forward and held by
    autograd too."""
    if type(target) is Tensor and not target.requires_grad:
        unclaimed = _UNCLAIMED if _held_by_nobody_else(target) else _UNCLAIMED[:1]
        _native.retag_if(target, unclaimed, INPUTS)


def _held_by_nobody_else(tensor: Tensor) -> bool:
    """Its memory is this tensor's and, of a view, the base's: a detached activation's is also the activation's."""
    try:
        storage = tensor.untyped_storage()
    except NotImplementedError:  # inside of a function transform
        return False
    return torch._C._storage_Use_Count(storage._cdata) == (2 if tensor._base is None else 3)  # with `storage`


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
        tag_inputs(batch)
        return batch

    return wrapper


def _judging(call: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(call)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        for target in tensors_in((args[1:], kwargs)):
            _tag_target(target)
        return call(self, *args, **kwargs)

    return wrapper


def _comparing(attachment: Attachment, loss: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(loss)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():
            _tag_target(args[1] if len(args) > 1 else kwargs.get("target"))
        return loss(*args, **kwargs)

    scriptable = _builtins._get_builtin_table()  # type: ignore[no-untyped-call]  # by identity
    scriptable[id(wrapper)] = scriptable[id(loss)]
    attachment.on_detach(functools.partial(scriptable.pop, id(wrapper)))
    return wrapper


def _forget_rules() -> None:
    """torch.compile, too, knows built-in functions by identity: those that it finds at its first use."""
    if (rules := sys.modules.get("torch._dynamo.trace_rules")) is not None:
        rules.clear_lru_cache()
