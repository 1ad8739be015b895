# SPDX-License-Identifier: Apache-2.0
"""Attaches the hooks of flash_clip to layers, parameters, and the modules that a program may call.

Also finds the flash_clip module of a parameter, for optimizers that are made from parameters alone.
"""

import functools
import sys
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import is_
from types import MethodType
from typing import Any

import torch
from opacus.grad_sample.gsm_base import AbstractGradSampleHooks
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakTensorKeyDictionary

from opacus_memprof.clipping.forwards.repetition import Modes
from opacus_memprof.clipping.forwards.state import is_own
from opacus_memprof.clipping.kernels.native import ModuleHook, is_backward_of_inputs
from opacus_memprof.clipping.layers.registry import LayerRegistry
from opacus_memprof.clipping.proof.batches import OUTPUT, Root, edge_of, graph_nodes
from opacus_memprof.clipping.proof.model_state import run_hooks, run_pre_hooks
from opacus_memprof.errors import MemprofError


class AttachedHooks:
    """The hooks of flash_clip on a model.

    The program may call every module that contains trained parameters (an entry), and parts of a container that has no
    forward. Every layer's module is tapped. Every trained parameter is watched for gradients from autograd.

    Args:
        handles: the list to which the handles of all hooks are added.
        before_entry, before_layer: forward pre-hooks with kwargs.
        after_entry, after_layer: forward hooks with kwargs, which are also called if the forward raises.
        note_gradient: called with the name of a parameter that autograd has given a gradient.
    """

    def __init__(
        self,
        handles: list[RemovableHandle],
        *,
        before_entry: Callable[..., Any],
        after_entry: Callable[..., Any],
        before_layer: Callable[..., Any],
        after_layer: Callable[..., Any],
        note_gradient: Callable[[str], None],
    ) -> None:
        self.handles, self.note_gradient = handles, note_gradient
        self._before_entry, self._after_entry = before_entry, after_entry
        self._before_layer, self._after_layer = before_layer, after_layer
        self._entries: dict[nn.Module, tuple[int, int]] = {}  # ids of the hooks
        self._were_entries: set[nn.Module] = set()  # one whose layers are frozen now may be trained again, or run now
        self._taps: dict[nn.Module, int] = {}
        self._watched: dict[int, RemovableHandle] = {}  # by id of the parameter

    def attach(self, registry: LayerRegistry, parameter_names: Mapping[nn.Parameter, str]) -> None:
        """Adds the hooks that are missing.

        Args:
            registry: the layers of the model.
            parameter_names: the names of the trained parameters.
        """
        parts, count = _parts_of(registry.model), len(self.handles)
        for module in registry.model.modules():
            if any(each in registry.at for each in module.modules()):
                parts.add(module)
            if module not in self._entries and (module in parts or module in self._were_entries):
                self._attach_entry(module)
        self._were_entries = self._entries.keys() | set()
        for module in registry.at:
            if module not in self._taps:
                self._attach_layer(module)
        if len(self.handles) > count and any(map(_is_compiled, registry.model.modules())):
            _forget_compiled()
        if not registry.is_sharded:
            self._watch(parameter_names)

    def tap_of(self, module: nn.Module) -> int | None:
        """Returns the id of the hook that taps a layer's output; None if the module has no hooks of a layer."""
        return self._taps.get(module)

    def remove(self) -> None:
        """Removes all hooks."""
        while self.handles:
            self.handles.pop().remove()
        self._entries.clear()
        self._taps.clear()
        self._watched.clear()

    def keep_taps_first(self) -> None:
        """Moves taps before the hooks that the program has put before them."""
        for module, tap in self._taps.items():
            if _is_tapped_first(module):
                _hooks_of(module).move_to_end(tap, last=False)

    def run(self, entry: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs a module's forward with the hooks of layers and users, but without its entry hooks.

        Raises:
            MemprofError: it leaves modes on.
        """
        before, after = self._entries[entry]
        with Modes.now().staying(entry):
            args, kwargs = run_pre_hooks(entry, before, args, kwargs)
            args, kwargs = self._before_layer(entry, args, kwargs) or (args, kwargs)
            output = None
            try:
                output = entry.forward(*args, **kwargs)
            finally:
                changed = self._after_layer(entry, args, kwargs, output)
            return run_hooks(entry, after, args, kwargs, output if changed is None else changed)

    def _attach_entry(self, module: nn.Module) -> None:
        """Adds entry hooks to a module: one before and one after all hooks that are there."""
        before = module.register_forward_pre_hook(_hook(self._before_entry), with_kwargs=True, prepend=True)
        after = module.register_forward_hook(_hook(self._after_entry), with_kwargs=True, always_call=True)
        self._entries[module] = before.id, after.id
        self.handles += [before, after]

    def _attach_layer(self, module: nn.Module) -> None:
        """Taps a layer's output before other hooks, of users or of the profiler, can change it."""
        before = module.register_forward_pre_hook(_hook(self._before_layer), with_kwargs=True)
        tap = module.register_forward_hook(
            _hook(self._after_layer), with_kwargs=True, always_call=True, prepend=_is_tapped_first(module)
        )
        self._taps[module] = tap.id
        _hooks_of(module).move_to_end(self._entries[module][1])  # behind a tap that is not the first hook
        self.handles += [before, tap]

    def _watch(self, parameter_names: Mapping[nn.Parameter, str]) -> None:
        """Watches trained parameters: autograd gives them a gradient only if they are used outside of their layers."""
        for parameter, name in parameter_names.items():
            watched = self._watched.get(id(parameter))
            if watched is None or watched.hooks_dict_ref() is None:
                handle = parameter.register_post_accumulate_grad_hook(_NoteGradient(self, name))  # type: ignore[no-untyped-call]
                self._watched[id(parameter)] = handle
                self.handles.append(handle)


class GraphHooks:
    """Watches the hooks that a program adds to the graph behind a model's outputs after the call, where no proof is.

    Hooks on the outputs themselves are a part of the loss, unless other outputs are computed from these.

    Args:
        refuse: called with the error where such a hook changes a gradient.
    """

    def __init__(self, refuse: Callable[[MemprofError], None]) -> None:
        self.refuse = refuse
        self._begin = 0
        self._graphs: list[_Graph] = []
        self._inner: list[InnerOutput] = []

    def __getstate__(self) -> dict[str, Any]:
        return {"refuse": self.refuse, "_begin": 0, "_graphs": [], "_inner": []}

    def begin_call(self) -> None:
        """Called before a forward. Nodes of autograd's graph are numbered in the order in which they are made."""
        self._begin = torch._C._autograd._get_sequence_nr()

    def end_call(self, outputs: list[torch.Tensor]) -> None:
        """Called when a call of the program has these outputs with gradients, and is over."""
        places = [] if any(x.grad_fn is None for x in outputs) else [_number_of(x.grad_fn) for x in outputs]
        if places:
            end = max(torch._C._autograd._get_sequence_nr(), 1 + max(places))
            self._graphs.append(_Graph(self._begin, end, places, [weakref.ref(x) for x in outputs]))
            _follow_registrations(self)

    def add_inner(self, outputs: list[torch.Tensor]) -> "dict[int, InnerOutput]":
        """Returns those of a call's outputs from which others are computed, by id. They cannot be replaced by aliases.

        The program may ask for the gradient that reaches them through the others: of an alias, which the others are
        not computed from, autograd has none.
        """
        found = {}
        for x in outputs:
            if x.grad_fn is not None and x.grad_fn in graph_nodes([each for each in outputs if each is not x]):
                found[id(x)] = InnerOutput(x)
        self._inner += found.values()
        return found

    def begin_backward(self, roots: Sequence[Root], gradients: Sequence[torch.Tensor | None]) -> list[Any]:
        """Called before a backward from these tensors. Returns handles of hooks, which are removed after it."""
        handles = []
        for node in graph_nodes(roots, stop_at_outputs=True) if self._inner else ():
            for each in self._inner:
                handles += each.follow(node)
        for each in self._inner:
            each.begin(roots, gradients)
        return handles

    def clear(self) -> None:
        """Forgets all calls, whose backward is over or does not count."""
        self._graphs.clear()
        self._inner.clear()
        _watching.discard(self)
        if not _watching:
            _end_following()

    def watched(self, hook: Any, x: torch.Tensor | None) -> Any:
        """Returns what is registered instead of a hook: on a tensor or, without one, on a node that is not known."""
        if x is not None and not any(each.is_inside(x) for each in self._graphs):
            return hook
        return functools.wraps(hook)(functools.partial(self._run, hook, x is None)) if callable(hook) else hook

    def _run(self, hook: Any, is_of_node: bool, *gradients: Any) -> Any:
        given = [x for x in tree_leaves(gradients) if isinstance(x, torch.Tensor)]
        versions = [x._version for x in given]
        found = hook(*gradients)
        changed = [x._version for x in given] != versions
        if found is not None:
            before = gradients[0]
            changed |= not all(map(is_, tree_leaves(found), tree_leaves(before)))
        if changed and not is_backward_of_inputs():
            node = torch._C._current_autograd_node()
            is_input = len(gradients) == 1 and is_of_node
            if node is not None and any(each.has(_number_of(node), is_input) for each in self._graphs):
                self.refuse(
                    MemprofError(
                        "a hook that the program has added between the model's call and backward() changes gradients "
                        f"inside of the model ({node.name()}), where no proof has seen it: add it in the model's "
                        "forward, to the tensor that it computes, or to the outputs of the model, if no other output "
                        "is computed from them."
                    )
                )
        return found


class InnerOutput:
    """An output of a call from which other outputs are computed, and the gradient that the program's own use gives it.

    Args:
        x: the output. Only its place in the graph is kept: hooks of the graph hold this object.
    """

    def __init__(self, x: torch.Tensor) -> None:
        node: Any = x.grad_fn
        node.metadata[OUTPUT] = True
        self._place = _number_of(node), x.output_nr
        self._end = torch._C._autograd._get_sequence_nr()
        self.gradient: torch.Tensor | None = None

    def begin(self, roots: Sequence[Root], gradients: Sequence[torch.Tensor | None]) -> None:
        """Begins a backward from these tensors, of which it may be one."""
        self.gradient = None
        for (node, nr), gradient in zip(map(edge_of, roots), gradients, strict=False):
            if node is not None and (_number_of(node), nr) == self._place:
                self._add(gradient)

    def follow(self, node: Any) -> list[Any]:
        """Adds the gradient that a node of the program's graph will give to it. Returns the handles of hooks."""
        if _number_of(node) < self._end:
            return []
        places = [i for i, (x, nr) in enumerate(node.next_functions) if x and (_number_of(x), nr) == self._place]
        return [node.register_hook(functools.partial(self._add_of, i)) for i in places]

    def _add_of(self, place: int, gradients: Sequence[torch.Tensor | None], _: Any) -> None:
        self._add(gradients[place])

    def _add(self, gradient: torch.Tensor | None) -> None:
        if gradient is not None:
            self.gradient = gradient if self.gradient is None else self.gradient + gradient

    def of_program(self, hook: Callable[[torch.Tensor], None]) -> Callable[[torch.Tensor], None]:
        """Returns a hook for the tensor that passes on what the program's own use of it gives, if it uses it."""

        def run(_: torch.Tensor) -> None:
            if self.gradient is not None:
                hook(self.gradient)

        return run


@dataclass
class _Graph:
    """The graph of a call: the range of its nodes' numbers, and those of its outputs' nodes."""

    begin: int
    end: int
    places: list[int]
    outputs: list[weakref.ref[torch.Tensor]]

    def has(self, number: int, is_input: bool) -> bool:
        """Returns whether a node is in the graph, and its hook not behind the one output."""
        is_last = is_input and self.places == [number]
        return self.begin <= number < self.end and not is_last

    def is_inside(self, x: torch.Tensor) -> bool:
        """Returns whether a tensor is in the graph, and not at its end."""
        if x.grad_fn is None or not self.begin <= _number_of(x.grad_fn) < self.end:
            return False
        outputs = [each() for each in self.outputs]
        if not any(each is x for each in outputs):
            return True
        others = [each for each in outputs if each is not None and each is not x]
        return len(others) + 1 < len(outputs) or x.grad_fn in graph_nodes(others)


def _number_of(node: Any) -> int:
    return int(node._sequence_nr())


_watching: weakref.WeakSet[GraphHooks] = weakref.WeakSet()
_replaced: list[Any] = []  # torch's own way to register a hook on a tensor, and the one that stands for it


def _follow_registrations(owner: GraphHooks) -> None:
    """Makes hooks of the program known to their graph's owner. Autograd's nodes register theirs by `_register_hook`."""
    _watching.add(owner)
    if _replaced:
        return
    on_tensor: Any = torch.Tensor.register_hook
    on_node: Any = torch.autograd.Function._register_hook

    @functools.wraps(on_tensor)
    def watched(self: torch.Tensor, hook: Any) -> Any:
        return on_tensor(self, _watched(hook, self))

    _replaced[:] = on_tensor, watched
    setattr(torch.Tensor, "register_hook", watched)  # noqa: B010  # not an assignment to a method
    by_node = staticmethod(lambda hooks, hook: on_node(hooks, _watched(hook, None)))
    setattr(torch.autograd.Function, "_register_hook", by_node)  # noqa: B010
    setattr(torch.autograd, "_engine_run_backward", _run_backward)  # noqa: B010


def _end_following() -> None:
    if _replaced and torch.Tensor.register_hook is _replaced[1]:  # otherwise somebody else has replaced it since
        setattr(torch.Tensor, "register_hook", _replaced[0])  # noqa: B010
        del torch.autograd.Function._register_hook
        setattr(torch.autograd, "_engine_run_backward", torch.autograd.graph._engine_run_backward)  # noqa: B010
        _replaced.clear()


def _run_backward(roots: Sequence[Root], *args: Any, **kwargs: Any) -> Any:
    is_first = torch._C._current_graph_task_id() == -1
    handles = [each for owner in _watching for each in owner.begin_backward(roots, args[0])] if is_first else []
    try:
        return torch.autograd.graph._engine_run_backward(roots, *args, **kwargs)
    finally:
        for handle in handles:
            handle.remove()


def _watched(hook: Any, x: torch.Tensor | None) -> Any:
    if torch._C._current_graph_task_id() == -1 and not is_own(hook):
        for owner in _watching:
            hook = owner.watched(hook, x)
    return hook


class _NoteGradient:
    """A parameter's hook that reports a gradient from autograd."""

    def __init__(self, owner: AttachedHooks, name: str) -> None:
        self.owner = weakref.ref(owner)  # Python's garbage collector cannot find a cycle through a parameter's hook
        self.name = name

    def __call__(self, parameter: torch.Tensor) -> None:
        owner = self.owner()
        if owner is not None:
            owner.note_gradient(self.name)

    def __reduce__(self) -> tuple[Any, ...]:  # a weak reference cannot be pickled
        return _NoteGradient, (self.owner(), self.name)


def _is_compiled(module: nn.Module) -> bool:
    """Returns whether torch.compile compiles a module of the model by itself."""
    return "_orig_mod" in module._modules or module._compiled_call_impl is not None


def _forget_compiled() -> None:
    """Makes torch compile again what it compiled without hooks, and from now on for modules with hooks and without.

    Otherwise what was compiled for a module runs for others of its class, too, which have hooks: they are not called.
    """
    if "torch._dynamo" in sys.modules:
        torch._dynamo.config.skip_nnmodule_hook_guards = False
        torch.compiler.reset()


def _parts_of(model: nn.Module) -> set[nn.Module]:
    """Returns the parts that a program must call by themselves, because what contains them has no forward."""
    if type(model).forward is not nn.Module.forward or "forward" in vars(model):
        return {model}
    return {model}.union(*map(_parts_of, model.children()))


def _hooks_of(module: nn.Module) -> Any:
    """Returns the forward hooks of a module by id, in the order in which they are called."""
    return module._forward_hooks


def _is_tapped_first(module: nn.Module) -> bool:
    """Returns whether a module's tap comes before its other hooks.

    A tap must precede FSDP's hooks, too. Then backward gathers the parameters before the tap keeps tensors, and has
    released FSDP's buffer by that time. An embedding needs no parameters there.
    """
    return not (isinstance(module, FSDPModule) and isinstance(module, nn.Embedding))


def _hook(method: Any) -> ModuleHook:
    """Returns a hook for a method of FlashClipHooks, which torch.compile does not trace where a program uses it.

    A hook is not a part of the model's graph. Through it, a tracer would reach the model that it is tracing.
    """
    if "torch._dynamo" in sys.modules:  # importing it takes seconds
        method = MethodType(torch.compiler.disable(method.__func__), method.__self__)  # type: ignore[no-untyped-call]
    return ModuleHook(method)


def refuse_private(model: nn.Module) -> None:
    """Raises MemprofError if hooks of Opacus or flash_clip are on a module of the model."""
    for module in model.modules():
        methods = (getattr(hook, "__wrapped__", hook) for hook in module._forward_pre_hooks.values())
        owners = (getattr(method, "__self__", None) for method in methods)
        if getattr(module, "autograd_grad_sample_hooks", None) or any(
            isinstance(owner, AbstractGradSampleHooks) for owner in owners
        ):
            raise MemprofError(
                f"the model, or its part {type(module).__name__}, was made private already: build it anew, or call "
                "remove_hooks() of what make_private has returned for it."
            )


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
