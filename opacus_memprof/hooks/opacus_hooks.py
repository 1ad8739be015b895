# SPDX-License-Identifier: Apache-2.0
"""Wraps the parts of Opacus that run in training: module hooks, samplers, functions, ghost clipping and `make_private`.

Two module hooks do most of the work. The forward hook captures activations. It allocates nothing: Opacus keeps detached
views of existing tensors, which keeps their storages alive. The core is told which storages these are, so that it can
tell whether autograd holds them too. The backward hook first allocates a scaled copy of the output's gradient. Then it
calls a sampler. Last, it allocates the zeros that the samples are copied into, which become `p.grad_sample`.
"""

import importlib
import sys
from collections.abc import Callable, Mapping
from functools import partial
from types import ModuleType
from typing import Any

from torch import Tensor, nn

from opacus_memprof.hooks import diagnosis, modules, observers
from opacus_memprof.hooks.observers import on_functorch_samples, on_linear_norm_samples
from opacus_memprof.hooks.vocabulary import (
    BACKPROP_COPIES,
    CLIP,
    CLIPPING_TEMPORARIES,
    IDLE,
    NOISE,
    NORM_SAMPLES,
    PER_SAMPLE_GRADIENTS,
    SETUP,
    SUMMED_GRADIENTS,
    TEMP_MATRICES,
)
from opacus_memprof.recording import native, observations
from opacus_memprof.recording.attachment import Attachment
from opacus_memprof.recording.faults import CallError, CallHook, describe

# One tag for all parameters: a tag for each would cost a call into the interpreter for each.
_AFTER_SAMPLER = native.Tag(category=PER_SAMPLE_GRADIENTS, op=native.op_id("create_or_accumulate_grad_sample"))


def wrap_opacus_hooks(attachment: Attachment, root: nn.Module) -> None:
    """Wraps the hooks that Opacus has registered on the modules of a model."""
    hook_ids = {handle.id for module in root.modules() for handle in vars(module).get("autograd_grad_sample_hooks", ())}
    for name, module in modules.named_modules(root):
        _wrap_hooks(attachment, module, name, hook_ids)


def _wrap_hooks(attachment: Attachment, module: nn.Module, name: str, opacus_hooks: set[int]) -> None:
    module_id = native.module_id(name)
    forward, backward = module._forward_hooks, module._backward_hooks
    for key in opacus_hooks & forward.keys():
        attachment.replace_hook(
            forward, key, native.CaptureActivations(forward[key], module_id, observers.on_recapture)
        )
    before_sampler = native.Tag(category=BACKPROP_COPIES, module=module_id, op=native.op_id("capture_backprops_hook"))
    for key in opacus_hooks & backward.keys():
        attachment.replace_hook(
            backward, key, native.CaptureBackprops(backward[key], module_id, before_sampler, _AFTER_SAMPLER)
        )


Observer = Callable[[Any, Tensor, Mapping[Any, Tensor]], None]


def wrap_sampler(
    sampler: Callable[..., Mapping[Any, Tensor]], category: int, observer: Observer | None = None
) -> native.Sampler:
    """Wraps a sampler `f(layer, activations, backprops) -> {parameter: result}`.

    The sampler's allocations are `temp_matrices` at first. Its results are retagged when it returns, because they are
    known only then. A result that is a view of the output's gradient keeps the gradient's category.

    Args:
        sampler: the function.
        category: the id of its results' category.
        observer: called with (layer, backprops, results) after the sampler.
    """
    op = native.op_id(getattr(sampler, "__name__", repr(sampler)))
    return native.Sampler(sampler, native.Tag(category=TEMP_MATRICES, op=op), category, observer)


def wrap_samplers(attachment: Attachment) -> None:
    """Wraps every registered sampler that is not wrapped yet. Keys stay, because Opacus looks types up among them."""
    from opacus.grad_sample import GradSampleHooks, GradSampleHooksFastGradientClipping
    from opacus.grad_sample.linear import compute_linear_norm_sample

    registries = (
        (GradSampleHooks.GRAD_SAMPLERS, PER_SAMPLE_GRADIENTS),
        (GradSampleHooksFastGradientClipping.NORM_SAMPLERS, NORM_SAMPLES),
    )
    for registry, category in registries:
        for module_type, sampler in registry.items():
            if isinstance(sampler, native.Sampler):
                continue
            observer = on_linear_norm_samples if sampler is compute_linear_norm_sample else None
            wrapped = wrap_sampler(sampler, category, observer)
            attachment.replace_item(registry, module_type, wrapped)


Function = Callable[..., Any]


def wrap_functions(attachment: Attachment) -> None:
    """Wraps functions that other modules import by name.

    Each of those modules refers to the function directly, so it is replaced in all of them.
    """
    importers = _importers()
    for path, wrap in _WRAPPERS.items():
        attachment.apply(path, partial(_replace, importers, path, wrap))


def _wrap_norm_sample(function: Function) -> Function:
    return _tag(function, NORM_SAMPLES)(function)


def _wrap_functorch(function: Function) -> Function:
    return wrap_sampler(function, PER_SAMPLE_GRADIENTS, on_functorch_samples)


def _wrap_noise(function: Function) -> Function:
    """Wraps the noise function, which Opacus calls for each parameter, with its clipped sum as `reference`."""
    return _tag(function, NOISE)(function, module_of="reference")


def _wrap_added_noise(function: Function) -> Function:
    """Wraps flash_clip's kernel that draws and adds noise. It allocates only its table of sums."""
    return _tag(function, NOISE)(function)


def _wrap_noise_of_many(function: Function) -> Function:
    """Wraps flash_clip's function for many clipped sums, and passes them one by one, so that noise has its module."""

    def draw_one(*args: Any, reference: Any) -> Any:
        return function([reference], *args)[0]

    draw_one.__name__ = function.__name__  # the operation in the profile
    draw_tagged = _wrap_noise(draw_one)
    return lambda references, *args: [draw_tagged(*args, reference=reference) for reference in references]


def _wrap_clipping(function: Function) -> Function:
    """Wraps the function that clips one parameter's gradients during the backward pass."""
    tag = _tag(function, CLIPPING_TEMPORARIES)
    return native.ParameterFunction(function, tag, "summed_grad", SUMMED_GRADIENTS, None)


def _wrap_expanded_weights(function: Function) -> Function:
    """Wraps the grad sampler of ExpandedWeights. Its first argument may be a parameter's ExpandedWeight."""
    tag = _tag(function, TEMP_MATRICES)
    return native.ParameterFunction(function, tag, "grad_sample", PER_SAMPLE_GRADIENTS, "orig_weight")


_WRAPPERS: dict[str, Callable[[Function], Function]] = {
    "opacus.grad_sample.grad_sample_module_fast_gradient_clipping:create_norm_sample": _wrap_norm_sample,
    "opacus.grad_sample.functorch:ft_compute_per_sample_gradient": _wrap_functorch,
    "opacus.optimizers.optimizer:_generate_noise": _wrap_noise,
    "opacus_memprof.clipping.kernels.sums:add_noise": _wrap_added_noise,
    "opacus_memprof.clipping.kernels.sums:draw_noise": _wrap_noise_of_many,
    "opacus.optimizers.ddp_perlayeroptimizer:_clip_and_accumulate_parameter": _wrap_clipping,
    "torch.nn.utils._expanded_weights.expanded_weights_utils:set_grad_sample_if_exists": _wrap_expanded_weights,
}


def _tag(function: Function, category: int) -> native.Tag:
    return native.Tag(category=category, op=native.op_id(function.__name__))


def _replace(
    importers: list[ModuleType], path: str, wrap: Callable[[Function], Function], attachment: Attachment
) -> None:
    module, _, name = path.partition(":")
    function = getattr(importlib.import_module(module), name)
    wrapped = wrap(function)
    for importer in importers:
        if vars(importer).get(name) is function:
            attachment.replace_attribute(importer, name, wrapped)


def _importers() -> list[ModuleType]:
    """Returns the loaded modules that may have imported one of the functions. It takes about a millisecond."""
    packages = ("opacus.", "opacus_memprof.clipping.kernels.sums", "torch.nn.utils._expanded_weights.")
    return [module for name, module in list(sys.modules.items()) if name.startswith(packages)]


_LOSSES = (
    "opacus.utils.fast_gradient_clipping_utils:DPTensorFastGradientClipping",
    "opacus.utils.adaptive_clipping.adaptive_clipping_utils:DPTensorFastGradientAdaptiveClipping",
)
_CLIPPING = (
    "GradSampleHooksFastGradientClipping.get_clipping_coef",
    "GradSampleHooksFastGradientClipping.get_norm_sample",
    "GradSampleHooksFastGradientClippingFSDP.get_norm_sample",
    "GradSampleHooksFastGradientClippingTP.get_norm_sample",
)

_running_backwards = 0  # calls of `backward` that have not returned


def observe_ghost_backward(attachment: Attachment) -> None:
    """Sets the phases of ghost clipping's `loss.backward()`.

    It runs a backward pass for the gradient norms, computes the clipping factors, and runs a second backward pass for
    the clipped gradients. Classes are patched, because each loss is a new object.
    """
    for loss in _LOSSES:
        attachment.observe(f"{loss}.backward", _observe_backward)
    for method in _CLIPPING:
        attachment.observe(f"opacus.grad_sample:{method}", _observe_clipping(method.partition(".")[2]))
    attachment.observe("opacus.grad_sample:GradSampleHooks.disable_hooks", _observe_disable_hooks)


def _observe_backward(loss: Any) -> CallHook:
    global _running_backwards
    _running_backwards += 1
    try:
        yield
    finally:
        _running_backwards -= 1
        native.set_second_backward(False)
        native.set_phase(IDLE)


def _observe_clipping(op: str) -> Callable[[Any], CallHook]:
    """Sets the phase `clip`, which lasts until the second pass: Opacus rescales the losses in between."""
    tag = native.Tag(category=CLIPPING_TEMPORARIES, op=native.op_id(op))

    def observation(hooks: Any) -> CallHook:
        if _running_backwards:
            native.set_phase(CLIP)
        if op == "get_clipping_coef":
            diagnosis.on_clipping_factors()
        with tag:
            yield

    return observation


def _observe_disable_hooks(hooks: Any) -> CallHook:
    """Marks the beginning of the second pass: Opacus disables its hooks right before it."""
    yield
    if _running_backwards:
        native.set_second_backward(True)


def observe_make_private(attachment: Attachment, follow: Callable[[Attachment, Any], object]) -> None:
    """Calls `follow(attachment, prepared)` with the result of every engine's `make_private`.

    `make_private_with_epsilon` calls `make_private` too.
    """

    def observation(*args: Any, **kwargs: Any) -> CallHook:
        shapes = observations.layer_shapes()
        shapes.engine_call, shapes.draws_poisson = "make_private", kwargs.get("poisson_sampling", True)
        return in_setup_phase(lambda prepared: follow(attachment, prepared))

    attachment.observe("opacus:PrivacyEngine.make_private", observation)
    attachment.observe("opacus:PrivacyEngine.make_private_with_epsilon", _observe_with_epsilon)


def _observe_with_epsilon(*args: Any, **kwargs: Any) -> CallHook:
    yield
    observations.layer_shapes().engine_call = "make_private_with_epsilon"


def in_setup_phase(follow: Callable[[Any], object]) -> CallHook:
    """Observes `make_private` in the phase `setup`, and calls `follow` with its result.

    Preparing a model for functorch copies its layers on the device.

    Raises:
        CallError: make_private has raised.
    """
    previous_phase = native.set_phase(SETUP)
    try:
        prepared = yield
    except CallError as failed:
        observations.record("make_private_raised", 0, 0, error=describe(failed.error))
        raise
    finally:
        native.set_phase(previous_phase)
    observations.discard("make_private_raised")
    follow(prepared)
