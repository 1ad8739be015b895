# SPDX-License-Identifier: Apache-2.0
"""Attaches the hooks of flash_clip to layers, parameters, and the modules that a program may call.

Also finds the flash_clip module of a parameter, for optimizers that are made from parameters alone.
"""

import sys
import weakref
from collections.abc import Callable, Iterable, Mapping
from types import MethodType
from typing import Any

import torch
from opacus.grad_sample.gsm_base import AbstractGradSampleHooks
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakTensorKeyDictionary

from opacus_memprof.clipping.forwards.repetition import Modes
from opacus_memprof.clipping.kernels.native import ModuleHook
from opacus_memprof.clipping.layers.registry import LayerRegistry
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
