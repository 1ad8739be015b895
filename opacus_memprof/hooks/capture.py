# SPDX-License-Identifier: Apache-2.0
"""Opacus' two module hooks: the one that captures activations in forward, and the one that uses them in backward.

Capturing allocates nothing: Opacus keeps detached views, which pins storages that others made. The core is told
which storages these are, so that it can say who else holds them.
"""

from collections.abc import Callable
from typing import Any

from torch import nn

from opacus_memprof import _native
from opacus_memprof.hooks import observe
from opacus_memprof.hooks.attach import Attachment, Wrapper
from opacus_memprof.hooks.vocabulary import BACKPROP_COPIES


class CaptureActivations(Wrapper):
    """Opacus' forward hook, and what it has appended to `module.activations`."""

    __slots__ = ("_module_id",)

    def __init__(self, wrapped: Callable[..., Any], module_id: int) -> None:
        super().__init__(wrapped)
        self._module_id = module_id

    def __call__(self, module: nn.Module, inputs: Any, output: Any) -> Any:
        held = len(module.__dict__.get("activations", ()))
        result = self.__wrapped__(module, inputs, output)
        activations = module.__dict__.get("activations", ())
        if len(activations) > held:
            _native.capture(self._module_id, activations[-1])
            observe.captured(self._module_id)
        return result


class CaptureBackprops(Wrapper):
    """Opacus' full backward hook. The module's own backward has run: autograd has let go of what it saved.

    What the hook allocates outside the samplers (samplers.py, functions.py) is the scaled copy of the output's
    gradient.
    """

    __slots__ = ("_module_id", "_tagged")

    def __init__(self, wrapped: Callable[..., Any], module_id: int) -> None:
        super().__init__(wrapped)
        self._module_id = module_id
        tag = _native.Tag(category=BACKPROP_COPIES, module=module_id, op=_native.op_id("capture_backprops_hook"))
        self._tagged = tag(wrapped)

    def __call__(self, module: nn.Module, grad_input: Any, grad_output: Any) -> Any:
        held = len(module.__dict__.get("activations", ()))
        if held == 0:  # nothing was captured, or this is ghost clipping's second pass
            return self.__wrapped__(module, grad_input, grad_output)
        _native.settle(self._module_id)
        try:
            return self._tagged(module, grad_input, grad_output)
        finally:
            if len(module.__dict__.get("activations", ())) < held:
                _native.release(self._module_id)


def wrap_opacus_hooks(attachment: Attachment, module: nn.Module, name: str, opacus_hooks: set[int]) -> None:
    """Wraps the hooks of the module `name` whose ids are among `opacus_hooks`."""
    module_id = _native.module_id(name)
    for key in opacus_hooks & module._forward_hooks.keys():
        attachment.replace_hook(module._forward_hooks, key, CaptureActivations(module._forward_hooks[key], module_id))
    for key in opacus_hooks & module._backward_hooks.keys():
        attachment.replace_hook(module._backward_hooks, key, CaptureBackprops(module._backward_hooks[key], module_id))
