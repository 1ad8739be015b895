# SPDX-License-Identifier: Apache-2.0
"""Tags the inputs of a step.

These are the batches that a DataLoader yields, their data set if its memory is profiled, and the targets of losses. The
line of a training loop that moves labels to the device cannot be wrapped, but a loss function receives them. torch's
losses are wrapped below `torch.nn.functional`, in the built-in functions that it calls. The public functions stay the
same objects, which programs import, inspect, pickle, script and dispatch on.
"""

import functools
import gc
import math
import sys
from collections.abc import Iterator
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling
from torch.optim import Optimizer
from torch.utils.data import ConcatDataset, Subset

from opacus_memprof.hooks.shapes import coming_states
from opacus_memprof.hooks.vocabulary import DATASET, FORWARD_UNDECIDED, UNATTRIBUTED, find
from opacus_memprof.profiles.layer_shapes import TrainingShapes
from opacus_memprof.recording import native, observations
from opacus_memprof.recording.attachment import Attachment
from opacus_memprof.recording.faults import CallHook, contain

_UNCLAIMED = (UNATTRIBUTED, FORWARD_UNDECIDED)  # categories of blocks that no hook has attributed yet

# The losses, by the module in which torch.nn.functional finds them. Their second argument is the target.
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
    """Tags the tensors that are attributes of a data set, as in TensorDataset and torchvision's, as `dataset`.

    They are not inputs, because they do not grow with the batch.
    """
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
    """Wraps DataLoader's iterator and torch's losses."""
    iterator = "torch.utils.data.dataloader:_BaseDataLoaderIter"
    attachment.observe(f"{iterator}.__init__", _observe_iterator_init)
    attachment.observe(f"{iterator}.__next__", _observe_next)
    attachment.on_detach(_clear_dynamo_rules)
    for module, names in _LOSSES.items():
        for name in names:
            attachment.apply(f"{module.__name__}.{name}", partial(_replace_loss, module, name))


def wrap_dp_loss(attachment: Attachment) -> None:
    """Wraps Opacus' loss of ghost clipping."""
    loss = "opacus.utils.fast_gradient_clipping_utils:DPLossFastGradientClipping"
    attachment.observe(f"{loss}.__call__", _observe_dp_loss_call)


def _observe_iterator_init(iterator: Any, loader: Any) -> CallHook:
    tag_dataset(loader.dataset)
    yield


def _observe_next(iterator: Any) -> CallHook:
    native.tag_inputs(((yield),))
    shapes = observations.layer_shapes()
    if shapes.made_before is None and shapes.modules:
        devices = native.counters()["devices"].items()
        shapes.made_before = {name: device["categories"]["unattributed"] for name, device in devices}


def _observe_dp_loss_call(loss: Any, *args: Any, **kwargs: Any) -> CallHook:
    for target in native.tensors_in((args[1:], kwargs)):
        native.tag_target(target)
    yield


def _replace_loss(module: ModuleType, name: str, attachment: Attachment) -> None:
    loss = vars(module)[name]

    @functools.wraps(loss)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if not is_compiling():
            _tag_target(args[1] if len(args) > 1 else kwargs.get("target"))
        return loss(*args, **kwargs)

    from torch.jit import _builtins  # compares built-in functions by identity

    scriptable = _builtins._get_builtin_table()  # type: ignore[no-untyped-call]
    attachment.on_detach(partial(scriptable.pop, id(wrapper), None))
    scriptable[id(wrapper)] = scriptable[id(loss)]
    attachment.replace_attribute(module, name, wrapper)


@contain("tagging the target of a loss")
def _tag_target(target: Any) -> None:
    native.tag_target(target)


def _clear_dynamo_rules() -> None:
    """Clears torch.compile's table of built-in functions, which it builds at its first use, by identity."""
    if (rules := sys.modules.get("torch._dynamo.trace_rules")) is not None:
        rules.clear_lru_cache()


@contain("looking at what comes later in the training")
def observe_what_comes(shapes: TrainingShapes, model: nn.Module | None) -> None:
    """Records how many samples later batches can have, and what other optimizers than the model's will make.

    Searches the heap, which takes a tenth of a second.
    """
    live = gc.get_objects()
    if model is not None:
        dp = find("opacus.optimizers", "DPOptimizer") or ()
        optimizers = [each for each in live if issubclass(type(each), Optimizer) and not issubclass(type(each), dp)]
        shapes.coming_states, shapes.coming_gradients = coming_states(optimizers, model)
    splitter = find("opacus.utils.batch_memory_manager", "BatchSplittingSampler")
    drawing = find("opacus.utils.uniform_sampler", "UniformWithReplacementSampler")
    if drawing is None:
        return
    bounds = [
        max((each.max_batch_size for each in live if type(each) is splitter), default=None),
        max((_likely_most(each) for each in live if type(each) is drawing), default=None),
    ]
    shapes.most_samples = min((bound for bound in bounds if bound is not None), default=None)


def _likely_most(sampler: Any) -> int:
    """Returns the number of samples that fewer than one of 700 Poisson batches exceed: three standard deviations."""
    expected = sampler.num_samples * sampler.sample_rate
    deviation = math.sqrt(expected * max(1 - sampler.sample_rate, 0))
    return int(min(math.ceil(expected + 3 * deviation), sampler.num_samples))
