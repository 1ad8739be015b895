# SPDX-License-Identifier: Apache-2.0
"""Tags the inputs of a step: the batches that a DataLoader yields, their data set if it is in the profiled memory, and
the targets of losses.

The line of a training loop that moves labels to the device cannot be wrapped, but a loss function receives them.
torch's losses are wrapped below `torch.nn.functional`, in the built-in functions that it calls: the public functions
stay the same objects, which programs have imported, inspect, pickle, script and dispatch on."""

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

from opacus_memprof.hooks.attachment import Attachment
from opacus_memprof.hooks.vocabulary import DATASET, FORWARD_UNDECIDED, UNATTRIBUTED
from opacus_memprof.recording import native

_UNCLAIMED = (UNATTRIBUTED, FORWARD_UNDECIDED)  # categories of blocks that no hook has attributed yet

# The losses, by the module in which torch.nn.functional looks them up. Their second argument is the target.
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
    """Tags the tensors that are attributes of a data set, as those of TensorDataset and of torchvision's, as `dataset`.
    They are no inputs, because they do not grow with the batch."""
    if tensors := [tensor for tensor in _tensors_of(dataset) if not tensor.requires_grad]:
        native.retag_if(tensors, _UNCLAIMED, DATASET)


def _tensors_of(dataset: Any) -> Iterator[Tensor]:
    if isinstance(dataset, Subset):
        yield from _tensors_of(dataset.dataset)
    elif isinstance(dataset, ConcatDataset):
        for part in dataset.datasets:
            yield from _tensors_of(part)
    else:
        for value in tuple(getattr(dataset, "__dict__", {}).values()):
            if isinstance(value, (Tensor, tuple)):  # a list may have an item for each sample
                yield from native.tensors_in(value)


def wrap_inputs(attachment: Attachment) -> None:
    """Wraps DataLoader's iterator, Opacus' loss of ghost clipping, and torch's losses."""
    iterator: Any = dataloader._BaseDataLoaderIter
    attachment.replace_attribute(iterator, "__init__", _wrap_iterator_init(iterator.__init__))
    attachment.replace_attribute(iterator, "__next__", _wrap_next(iterator.__next__))
    attachment.replace_attribute(
        DPLossFastGradientClipping, "__call__", _wrap_dp_loss_call(DPLossFastGradientClipping.__call__)
    )
    attachment.on_detach(_clear_dynamo_rules)
    for module, names in _LOSSES.items():
        for name in names:
            attachment.replace_attribute(module, name, _wrap_loss(attachment, vars(module)[name]))


def _wrap_iterator_init(init: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(init)
    def wrapper(self: Any, loader: Any) -> None:
        tag_dataset(loader.dataset)
        init(self, loader)

    return wrapper


def _wrap_next(next_batch: Callable[[Any], Any]) -> Callable[[Any], Any]:
    @functools.wraps(next_batch)
    def wrapper(self: Any) -> Any:
        batch = next_batch(self)
        native.tag_inputs((batch,))
        return batch

    return wrapper


def _wrap_dp_loss_call(call: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(call)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        for target in native.tensors_in((args[1:], kwargs)):
            native.tag_target(target)
        return call(self, *args, **kwargs)

    return wrapper


def _wrap_loss(attachment: Attachment, loss: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(loss)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if not is_compiling():
            native.tag_target(args[1] if len(args) > 1 else kwargs.get("target"))
        return loss(*args, **kwargs)

    # torch.jit knows built-in functions by identity.
    scriptable = _builtins._get_builtin_table()  # type: ignore[no-untyped-call]
    scriptable[id(wrapper)] = scriptable[id(loss)]
    attachment.on_detach(functools.partial(scriptable.pop, id(wrapper)))
    return wrapper


def _clear_dynamo_rules() -> None:
    """Clears torch.compile's table of built-in functions, which it builds at its first use, by identity."""
    if (rules := sys.modules.get("torch._dynamo.trace_rules")) is not None:
        rules.clear_lru_cache()
