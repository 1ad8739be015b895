# SPDX-License-Identifier: Apache-2.0
"""Finds the owners of blocks that no hook has claimed, among modules and optimizers that are not attached.

Examples are a second model, a copy of the model with averaged parameters, and an optimizer of tensors that are in no
module. A search goes through the heap and takes about a tenth of a second, so it only runs for much memory, and rarely.
"""

import copyreg
import gc
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, cast

import torch
from torch import nn
from torch.compiler import is_compiling
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakIdKeyDictionary

from opacus_memprof.hooks import diagnosis, modules
from opacus_memprof.hooks.fake_forward import FakeForward
from opacus_memprof.hooks.vocabulary import (
    BACKWARD_TEMPORARIES,
    BUFFERS,
    FORWARD_UNDECIDED,
    GRADIENTS,
    MODEL_PARAMETERS,
    OPTIMIZER_STATES,
    OPTIMIZER_TEMPORARIES,
    UNATTRIBUTED,
)
from opacus_memprof.profiles.layer_shapes import UntrainedGraphs
from opacus_memprof.recording import native, observations
from opacus_memprof.recording.attachment import Attachment, looks_compiled, reduce_to_noop
from opacus_memprof.recording.faults import contain

_UNCLAIMED = (UNATTRIBUTED, FORWARD_UNDECIDED, BACKWARD_TEMPORARIES, OPTIMIZER_TEMPORARIES)
# Between steps, all that is left of them is unclaimed: temporaries are gone then.
_UNCLAIMED_NAMES = ("unattributed", "backward_temporaries", "optimizer_temporaries")
_MATERIAL = 1 << 20  # bytes
_MATERIAL_SHARE = 0.01  # of the live bytes
_SHARE_OF_TIME = 0.002  # that searches may take, after the first few
_FREE_SEARCHES = 4
_MOMENT = 0.002  # seconds
_MOST_NODES = 10_000  # of autograd's graph that are looked at

Roots = Callable[[], list[nn.Module]]  # returns the attached models


class OwnerSearch:
    """Searches for owners where much is unclaimed. `roots` returns the models that are attached."""

    def __init__(self, roots: Roots) -> None:
        self._roots = roots
        self._prefixes = Attachment("names of models that are not attached")
        # Models that no optimizer trains, with what watches their calls.
        self._watched: weakref.WeakKeyDictionary[nn.Module, _BeforeCall] = weakref.WeakKeyDictionary()
        self.reset()

    def reset(self) -> None:
        """Forgets earlier searches, for a new recording."""
        self._prefixes.detach()
        self._watched.clear()
        self._with_gradients = WeakIdKeyDictionary()  # their parameters, as far as the latest search claimed gradients
        self._searches = 0
        self._resume = 0.0  # of time.monotonic()
        self._left: dict[str, int] = {}  # unclaimed bytes by device after the latest search

    def watch(self, attachment: Attachment) -> None:
        """Searches after the updates of all optimizers, until `attachment` is detached."""
        attachment.on_detach(register_optimizer_step_post_hook(self._after_step).remove)
        self._offer()
        attachment.on_detach(self.reset)

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self.search()

    @contain("looking for the owners of unattributed memory")
    def search(self) -> None:
        """Searches if there is a reason to, and time. Call it between the phases of a step."""
        if self._searches >= _FREE_SEARCHES and time.monotonic() < self._resume:
            return
        if not self._is_needed():
            return
        begin = time.monotonic()
        # Autograd's thread may still hold what the backward pass has dropped. The search holds all of the heap, so that
        # this thread would free it, as if the program had kept it.
        time.sleep(_MOMENT)
        if self._is_needed():
            self._claim()
            self._left = _unclaimed()
        self._searches += 1
        end = time.monotonic()
        self._resume = end + (end - begin) / _SHARE_OF_TIME

    def _is_needed(self) -> bool:
        live = native.counters()["devices"]
        for name, size in _unclaimed().items():
            added = size - self._left.get(name, 0)
            if added >= max(_MATERIAL, _MATERIAL_SHARE * live[name]["requested_bytes"]):
                return True
        return False

    def _claim(self) -> None:
        models, optimizers = _models_and_optimizers()
        attached = {module for root in self._roots() for module in root.modules()}
        owner: dict[int, int] = {}  # the module's id by the parameter's id
        for model in models:
            if model not in attached:
                modules.assign_name_prefix(self._prefixes, model, attached)
            for name, module in modules.named_modules(model):
                if module not in attached:
                    _claim_module(module, native.module_id(name), owner)
        for optimizer in optimizers:
            claim_tensors(optimizer, owner)
        self._offer()
        for model in self._watched:
            for parameter in model.parameters():
                if parameter.grad is not None:
                    self._with_gradients[parameter] = True
        for model in map(_trained_part, models):
            if model not in attached and model not in self._watched and not _is_trained(model, optimizers):
                self._watched[model] = _watch_calls(self._prefixes, model)

    def _offer(self) -> None:
        shapes = observations.layer_shapes()
        shapes.untrained_graphs = self._untrained_graphs
        shapes.untrained_gradients = self._untrained_gradients
        shapes.unclaimed_parameters = self._unclaimed_parameters

    def _unclaimed_parameters(self) -> int:
        """Returns the bytes of parameters on GPUs that were made after the latest search. At the end none is known."""
        found = [each for each in gc.get_objects() if issubclass(type(each), nn.Parameter)] if self._roots() else []
        with torch._C.DisableTorchFunctionSubclass():  # torch's expanded weights answer no question
            return sum(each.nbytes for each in found if each.is_cuda and not native.owner_of(each))

    def _untrained_graphs(self) -> list[UntrainedGraphs]:
        """Returns the graphs of models that no optimizer trains, as far as a call of each has ended."""
        calls = [each for each in self._watched.values() if each.kept >= _MATERIAL]
        used = _behind_losses()[0] if calls else set()
        return [
            UntrainedGraphs(each.name, each.kept, each.forward.peak_without_graph(), used.isdisjoint(each.graphs))
            for each in calls
        ]

    def _untrained_gradients(self) -> int:
        """Returns the bytes of gradients that graphs of models give that no optimizer trains, without claimed ones.

        A model that was made since the latest search is in the graph of a loss.
        """
        called = [model for model, calls in self._watched.items() if calls.is_running or calls.graphs]
        parameters = {parameter for model in called for parameter in model.parameters() if parameter.requires_grad}
        optimizers = _models_and_optimizers()[1]
        updated = {id(each) for optimizer in optimizers for group in optimizer.param_groups for each in group["params"]}
        made_late = (each for each in _behind_losses()[1] if not native.owner_of(each) and id(each) not in updated)
        parameters |= set(made_late)
        return sum(each.nbytes for each in parameters if each not in self._with_gradients)


def _trained_part(model: nn.Module) -> nn.Module:
    """Returns what of a model has all parameters that require gradients, such as the teacher in a loss module."""
    while True:
        parts = [each for each in model.children() if any(p.requires_grad for p in each.parameters())]
        own = any(p is not None and p.requires_grad for p in model._parameters.values())
        if own or len(parts) != 1 or not any(parts[0].children()):
            return model
        (model,) = parts


def _is_trained(model: nn.Module, optimizers: list[Optimizer]) -> bool:
    """Returns whether a model has got gradients, or is an optimizer's, or has nothing that requires gradients."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    updated = {id(each) for optimizer in optimizers for group in optimizer.param_groups for each in group["params"]}
    return not parameters or any(each.grad is not None or id(each) in updated for each in parameters)


def _watch_calls(attachment: Attachment, model: nn.Module) -> "_BeforeCall":
    """Records whether calls of a model that no optimizer trains record graphs, in its first calls."""
    before = _BeforeCall(FakeForward(list(modules.named_modules(model))))
    if not looks_compiled(model):
        after = _AfterCall(before)
        before_hook = model.register_forward_pre_hook(before, with_kwargs=True)
        after.handles = (before_hook, model.register_forward_hook(after))
        attachment.on_detach(after.remove)
    return before


class _Graph:
    """Noted in a node of autograd's graph, with which it dies."""


class _BeforeCall:
    """Remembers the live bytes before a call, or None where the call's graph may be needed for its inputs.

    Attributes:
        forward: repeats the latest call on fake tensors.
        live: these bytes.
        kept: what the graph of a call keeps, without its output; 0 if that is not known.
        name: what the program calls the model.
        is_running: whether a call has begun that records a graph, and has not ended.
        graphs: those of earlier calls that are alive.
    """

    def __init__(self, forward: FakeForward) -> None:
        self.forward = forward
        self.live: int | None = None
        self.kept = 0
        self.name = ""
        self.is_running = False
        self.graphs: weakref.WeakSet[_Graph] = weakref.WeakSet()

    @contain("watching a model that no optimizer trains")
    def __call__(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        self.is_running = torch.is_grad_enabled() and not is_compiling()
        if self.is_running:
            self.forward.record_inputs((args, kwargs))
        args = (args, kwargs)
        differentiable = not torch.is_grad_enabled() or any(each.requires_grad for each in native.tensors_in(args))
        self.live = None if is_compiling() or differentiable else _live()


class _AfterCall:
    """Records what a call keeps for a backward pass, if the model still has no gradients when it is called again."""

    def __init__(self, before: _BeforeCall) -> None:
        self._before = before
        self.handles: tuple[RemovableHandle, ...] = ()

    def remove(self) -> None:
        for handle in self.handles:
            handle.remove()

    @contain("watching a model that no optimizer trains")
    def __call__(self, model: nn.Module, args: Any, output: Any) -> None:
        outputs = native.tensors_in((output,))
        self._before.is_running = False
        if is_compiling() or not any(each.requires_grad for each in outputs):
            return
        for node in {each.grad_fn for each in outputs if each.grad_fn is not None}:
            graph = _Graph()
            cast("dict[object, object]", node.metadata)[_Graph] = graph  # which torch declares as a method
            self._before.graphs.add(graph)
        if self._before.live is None:
            return
        kept = _live() - self._before.live - sum(each.nbytes for each in outputs)
        if not self._before.kept:
            self._before.kept, self._before.name = kept, diagnosis.name_of(model) or type(model).__name__
            return
        self.remove()
        _, optimizers = _models_and_optimizers()
        if kept >= _MATERIAL and not _is_trained(model, optimizers):
            observations.record("untrained_graphs", 0, kept, name=self._before.name)


def _behind_losses() -> tuple["set[_Graph]", set[nn.Parameter]]:
    """Returns the noted graphs and the parameters from which tensors of one number were computed."""
    tensors = [each for each in gc.get_objects() if issubclass(type(each), torch.Tensor)]
    with torch._C.DisableTorchFunctionSubclass():
        losses = [each for each in tensors if each.grad_fn is not None and each.numel() == 1]
    waiting, seen = [each.grad_fn for each in losses], set[Any]()
    found, parameters = set[_Graph](), set[nn.Parameter]()
    while waiting and len(seen) < _MOST_NODES:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if (graph := cast("dict[object, object]", node.metadata).get(_Graph)) is not None:
            found.add(cast("_Graph", graph))
        if isinstance(getattr(node, "variable", None), nn.Parameter):
            parameters.add(node.variable)
        waiting += [following for following, _ in node.next_functions]
    return found, parameters


for _hook in (_BeforeCall, _AfterCall):
    copyreg.pickle(_hook, reduce_to_noop)


def _live() -> int:
    return sum(device["requested_bytes"] for device in native.counters()["devices"].values())


def claim_tensors(optimizer: Optimizer, owner: Mapping[int, int] = MappingProxyType({})) -> None:
    """Tags what an optimizer updates and keeps, where no hook has claimed it.

    Args:
        optimizer: the optimizer.
        owner: ids of modules by the id of their parameter, for parameters of modules that are not attached.
    """
    for parameter in native.tensors_in(optimizer.param_groups):
        module_id = native.owner_of(parameter) or owner.get(id(parameter))
        native.retag_if(parameter, _UNCLAIMED, MODEL_PARAMETERS, module_id)
        native.retag_if((parameter.grad,) if parameter.is_leaf else (), _UNCLAIMED, GRADIENTS, module_id)
        native.retag_if((optimizer.state.get(parameter),), _UNCLAIMED, OPTIMIZER_STATES, module_id)


def _claim_module(module: nn.Module, module_id: int, owner: dict[int, int]) -> None:
    for parameter in module._parameters.values():
        if parameter is not None:
            owner.setdefault(id(parameter), module_id)
            native.retag_if(parameter, _UNCLAIMED, MODEL_PARAMETERS, module_id)
            native.retag_if((parameter.grad,), _UNCLAIMED, GRADIENTS, module_id)
    native.retag_if(tuple(module._buffers.values()), _UNCLAIMED, BUFFERS, module_id)


def _unclaimed() -> dict[str, int]:
    """Returns the unclaimed bytes by device."""
    devices = native.counters()["devices"].items()
    return {name: sum(device["categories"][category] for category in _UNCLAIMED_NAMES) for name, device in devices}


def _models_and_optimizers() -> tuple[list[nn.Module], list[Optimizer]]:
    """Returns all outermost modules and all optimizers. Uses `type(...)`, since isinstance evaluates weak proxies."""
    found: list[nn.Module] = []
    optimizers: list[Optimizer] = []
    for each in gc.get_objects():
        if issubclass(type(each), nn.Module):
            found.append(each)
        elif issubclass(type(each), Optimizer):
            optimizers.append(each)
    complete = [module for module in found if isinstance(vars(module).get("_modules"), dict)]
    inner = {id(child) for module in complete for child in _children(module)}
    initialized = [each for each in optimizers if hasattr(each, "param_groups") and hasattr(each, "state")]
    return [module for module in complete if id(module) not in inner], initialized


def _children(module: nn.Module) -> Iterator[nn.Module | None]:
    return iter(module._modules.values())
